"""The Swin Transformer (arXiv 2103.14030)."""

import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from vit_jax.errors import UserError
from vit_jax.models.contract import Defaults, refuse_others
from vit_jax.models.layers.head import head
from vit_jax.models.layers.linear import Linear
from vit_jax.models.swin import relative, sizes
from vit_jax.models.swin.attention import INIT
from vit_jax.models.swin.stage import (
  LN_EPSILON,
  LayerNorm,
  Merge,
  Stage,
  halved,
)
from vit_jax.models.swin.windows import Windows

Images = Float[Array | np.ndarray, 'n y x c']
Grid = tuple[int, int]
_TABLE = 'attention/bias_table'


class Swin(nn.Module, Defaults):
  """A Swin Transformer; build it with `Model`, which knows the sizes.

  It keeps `models.contract.Model`, but for `embed` and `encode`: its tokens
  lie on maps, none can be left out. Parameters: `embedding/{kernel,bias}`,
  `embedding_norm/…`, `stage{1…}/layers/{plain,shifted}/…` (pairs of blocks
  stacked), `merge{1…}/{norm/…,kernel}`, `norm/…`, `head/{kernel,bias}`.
  """

  num_classes: int
  width: int
  depths: tuple[int, ...]
  num_heads: int
  window_size: int
  drop_path: float
  dtype: jnp.dtype
  remat: str
  unroll: int

  gelu, norm_eps = 'exact', LN_EPSILON  # as published, and no options
  sharding_rules = (
    (r'attention/(query|key|value)/kernel', -2),
    (r'attention/(query|key|value)/bias', -2),
    (r'attention/out/kernel', -3),
    (r'attention/bias_table', -1),
    (r'mlp/fc1/(kernel|bias)', -1),
    (r'mlp/fc2/kernel', -2),
    (r'head/(kernel|bias)', -1),
  )

  def setup(self):
    lecun_uniform = nn.initializers.variance_scaling(1 / 3, 'fan_in', 'uniform')
    # The authors leave this layer as PyTorch initialises a convolution.
    self.embedding = Linear(
      (self.width,),
      input_axes=3,
      kernel_init=lecun_uniform,
      bias_init=_uniform((3 * sizes.PATCH_SIZE**2) ** -0.5),
      dtype=self.dtype,
    )
    self.embedding_norm = LayerNorm(self.dtype)
    self.norm = LayerNorm(self.dtype)
    if self.num_classes:
      self.head = head(self.num_classes, self.dtype, kernel_init=INIT)

  def __call__(
    self, images: Images, key: Key[Array, ''] | None = None
  ) -> Float[Array, 'n k']:
    """Logits of images in [-1, 1]; float32. A key turns drop path on."""
    return self.predict(images, key)['logits']

  def predict(
    self,
    images: Images,
    key: Key[Array, ''] | None = None,
    want: tuple[str, ...] = (),
  ) -> dict[str, Float[Array, 'n ...']]:
    """Features (the mean of the last map) and logits of images.

    Args:
      images: `[n, height, width, 3]`, in [-1, 1].
      key: for drop path; None (evaluation) turns it off.
      want: `tokens` `[n, t, d]`, the last map after the norm, in rows.

    Returns:
      `features` `[n, d]` and `logits` `[n, num_classes]`, float32 (the logits
      are the features where `num_classes` is 0), and what `want` names.

    Raises:
      UserError: other things are wanted; the image has no such size.
    """
    refuse_others(want, ('tokens',), 'a Swin', 'stages')
    tokens, _ = self._transform(images, key, want_layers=False)
    features = tokens.mean(axis=1)
    logits = self.head(features) if self.num_classes else features
    found = {'features': features, 'logits': logits}
    found |= {name: tokens for name in want}
    return {name: leaf.astype(jnp.float32) for name, leaf in found.items()}

  def stages(
    self, images: Images, key: Key[Array, ''] | None = None
  ) -> list[Float[Array, 'n _ _ _']]:
    """Of each stage `[n, depth, t, d]` after its blocks, float32."""
    _, after = self._transform(images, key, want_layers=True)
    return [
      x.swapaxes(0, 1).astype(jnp.float32) for x in after if x is not None
    ]

  @nn.compact
  def _transform(
    self, images: Images, key: Key[Array, ''] | None, want_layers: bool
  ) -> tuple[Float[Array, 'n t d'], list[Array | None]]:
    """The last map's tokens, normed, and by stages those after every block."""
    _, height, width, _ = images.shape
    grids = self.grids((height, width))
    x, after, first = self._embed(images), [], 0
    per_layer = self._per_layer(key)
    for i, (depth, grid) in enumerate(zip(self.depths, grids, strict=True)):
      stage = Stage(
        depth=depth,
        num_heads=self.num_heads * 2**i,
        grid=grid,
        window_size=self.window_size,
        dtype=self.dtype,
        remat=self.remat,
        unroll=self.unroll,
        name=f'stage{i + 1}',
      )
      own = {k: leaf[first : first + depth] for k, leaf in per_layer.items()}
      x, layers = stage(x, own, want_layers)
      after.append(layers)
      first += depth
      if i + 1 < len(grids):
        x = Merge(grid, self.dtype, name=f'merge{i + 1}')(x)
    return self.norm(x), after

  def _embed(self, images: Images) -> Float[Array, 'n t d']:
    """Normed tokens of patches: a convolution whose stride is its size."""
    x = jnp.asarray(images, self.dtype)
    n, height, width, channels = x.shape
    p = sizes.PATCH_SIZE
    x = x.reshape(n, height // p, p, width // p, p, channels)
    x = x.swapaxes(2, 3).reshape(n, -1, p, p, channels)
    return self.embedding_norm(self.embedding(x))

  def _per_layer(self, key: Key[Array, ''] | None) -> dict[str, Array]:
    """Keys and drop-path rates of all blocks; {} at evaluation."""
    if key is None or not self.drop_path:
      return {}
    depth = sum(self.depths)
    rates = jnp.linspace(0.0, self.drop_path, depth)  # through all stages
    return {'key': jax.random.split(key, depth), 'rate': rates}

  @nn.nowrap
  def grids(self, image_size: Grid) -> list[Grid]:
    """Rows and columns of the map of each stage, for (height, width) pixels.

    Raises:
      UserError: the patch does not divide the image.
    """
    p = sizes.PATCH_SIZE
    if any(side % p or side < p for side in image_size):
      height, width = image_size
      raise UserError(
        f'an image of {height}x{width} pixels is not divisible by the patch '
        f'size {p} of a Swin: take multiples of {p}.'
      )
    grids = [(image_size[0] // p, image_size[1] // p)]
    for _ in self.depths[1:]:
      grids.append(halved(grids[-1]))
    return grids

  @nn.nowrap
  def check(self, image_size: Grid) -> None:
    """Raises UserError if images cannot have that size; see `grids`."""
    self.grids(image_size)

  @property
  def sized(self) -> tuple[str, ...]:
    """The bias tables: a window is no larger than its map."""
    kinds = itertools.product(range(len(self.depths)), ('plain', 'shifted'))
    return tuple(f'stage{i + 1}/layers/{kind}/{_TABLE}' for i, kind in kinds)

  @nn.nowrap
  def adapt(
    self,
    leaves: dict[str, np.ndarray],
    old_size: Grid,
    new_size: Grid,
    method: str,
  ) -> dict[str, np.ndarray]:
    """Interpolates bias tables to this model's windows; `relative.resize`.

    A table shows which windows it was for, so `old_size` says nothing new.

    Raises:
      UserError: a table changes and the method is not 'bicubic', the only one.
    """
    del old_size
    grids, adapted = self.grids(new_size), {}
    for path, table in leaves.items():
      grid = grids[int(path[len('stage') : path.index('/')]) - 1]
      size = Windows.of(grid, self.window_size, shifted=False).size
      if relative.window_of(table.shape[1]) != size and method != 'bicubic':
        raise UserError(
          f"a Swin's biases are made for windows of "
          f'{relative.window_of(table.shape[1])} tokens and have to be resized '
          f'to {size}, by bicubic interpolation only; got {method!r}: set '
          "position_resize='bicubic'."
        )
      adapted[path] = relative.resize(table, size)
    return adapted

  @property
  def architecture(self) -> dict[str, Any]:
    """Sizes but the windows': a fine-tuning may take larger ones."""
    return {name: getattr(self, name) for name in sizes.NAMES}

  @property
  def reference(self) -> 'Swin':
    """Without rematerialisation or unrolling."""
    return self.clone(remat='none', unroll=1)


def _uniform(bound: float) -> nn.initializers.Initializer:
  """Uniform in ±bound."""

  def init(key: Array, shape: Any, dtype: Any = jnp.float32) -> Array:
    return jax.random.uniform(key, shape, dtype, -bound, bound)

  return init
