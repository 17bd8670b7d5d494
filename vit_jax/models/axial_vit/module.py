"""The Vision Transformer with axial attention (the paper's appendix D.6)."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from vit_jax.errors import UserError
from vit_jax.models.axial_vit.encoder import Encoder
from vit_jax.models.contract import Defaults, refuse_others
from vit_jax.models.layers import transformer
from vit_jax.models.layers.head import head
from vit_jax.models.layers.linear import Linear
from vit_jax.models.layers.positions import resize
from vit_jax.models.vit import sizes

Images = Float[Array | np.ndarray, 'n y x c']
Size = tuple[int, int]


class Positions(nn.Module):
  """Learned, of rows and of columns, each half of the width (N(0, 0.02)).

  The authors' later public code has them so; the paper does not say. Parameters
  `rows` `[rows, d / 2]` and `columns` `[columns, d / 2]`.
  """

  @nn.compact
  def __call__(self, grid: Size, width: int) -> Float[Array, '1 t d']:
    init = nn.initializers.normal(0.02)
    rows, columns = (
      jnp.asarray(self.param(name, init, (count, width // 2)))
      for name, count in zip(('rows', 'columns'), grid, strict=True)
    )
    shape = (*grid, width // 2)
    rows = jnp.broadcast_to(rows[:, None], shape)
    columns = jnp.broadcast_to(columns[None], shape)
    return jnp.concatenate([rows, columns], axis=-1).reshape(1, -1, width)


class AxialViT(nn.Module, Defaults):
  """An Axial-ViT; build it with `Model`, which knows the sizes.

  There is no class token, which has no place on the map: features are the mean
  of the tokens. It keeps `models.contract.Model`, but for `embed` and `encode`:
  no token can be left out. Parameters: `embedding/{kernel,bias}`,
  `position/{rows,columns}`, `encoder/{layers/{row,column}/…,norm}`,
  `head/{kernel,bias}`.
  """

  num_classes: int
  patch_size: int
  width: int
  depth: int
  mlp_dim: int
  num_heads: int
  head_bias: float
  dropout: float
  gelu: str
  dtype: jnp.dtype
  remat: str
  unroll: int

  sized = ('position/',)
  sharding_rules = (
    (r'attention/(query|key|value)/kernel', -2),
    (r'attention/(query|key|value)/bias', -2),
    (r'attention/out/kernel', -3),
    (r'mlp/fc1/(kernel|bias)', -1),
    (r'mlp/fc2/kernel', -2),
    (r'head/(kernel|bias)', -1),
  )

  def setup(self):
    self.embedding = Linear(
      (self.width,),
      input_axes=3,
      kernel_init=nn.initializers.lecun_normal(),
      dtype=self.dtype,
    )
    self.position = Positions()
    self.encoder = Encoder(
      depth=self.depth,
      num_heads=self.num_heads,
      mlp_dim=self.mlp_dim,
      dropout=self.dropout,
      gelu=self.gelu,
      dtype=self.dtype,
      remat=self.remat,
      unroll=self.unroll,
    )
    if self.num_classes:
      self.head = head(self.num_classes, self.dtype, bias=self.head_bias)

  def __call__(
    self, images: Images, key: Key[Array, ''] | None = None
  ) -> Float[Array, 'n k']:
    """Logits of images in [-1, 1]; float32. A key turns dropout on."""
    return self.predict(images, key)['logits']

  def predict(
    self,
    images: Images,
    key: Key[Array, ''] | None = None,
    want: tuple[str, ...] = (),
  ) -> dict[str, Float[Array, 'n ...']]:
    """Features (the mean of all tokens) and logits of images.

    Args:
      images: `[n, height, width, 3]`, in [-1, 1].
      key: for dropout; None (evaluation) turns it off.
      want: `tokens` `[n, t, d]` after the last norm, in rows; `layers`
        `[n, 2 · depth, t, d]` after every block.

    Returns:
      `features` `[n, width]` and `logits` `[n, num_classes]`, float32 (the
      logits are the features where `num_classes` is 0), and what `want` names.

    Raises:
      UserError: other things are wanted; the image has no such size.
    """
    refuse_others(want, ('tokens', 'layers'), 'an Axial-ViT')
    keys = (None, None) if key is None else jax.random.split(key)
    x, grid = self._tokens(images)
    x = transformer.dropout(x, self.dropout, keys[0])
    tokens, layers = self.encoder(x, grid, keys[1], 'layers' in want)
    features = tokens.mean(axis=1)
    logits = self.head(features) if self.num_classes else features
    inner = {'tokens': tokens, 'layers': layers}
    found = {'features': features, 'logits': logits}
    found |= {name: inner[name] for name in want}
    return {name: leaf.astype(jnp.float32) for name, leaf in found.items()}

  def _tokens(self, images: Images) -> tuple[Float[Array, 'n t d'], Size]:
    """Tokens of patches with their positions, and rows and columns of them."""
    x = jnp.asarray(images, self.dtype)
    n, height, width, channels = x.shape
    (rows, columns), p = self.grid((height, width)), self.patch_size
    x = x.reshape(n, rows, p, columns, p, channels).swapaxes(2, 3)
    x = self.embedding(x.reshape(n, rows * columns, p, p, channels))
    position = self.position((rows, columns), self.width)
    return x + position.astype(x.dtype), (rows, columns)

  @nn.nowrap
  def grid(self, image_size: Size) -> Size:
    """Rows and columns of patches of an image of (height, width) pixels.

    Raises:
      UserError: the patch does not divide it.
    """
    height, width = image_size
    p = self.patch_size
    if height % p or width % p or min(height, width) < p:
      raise UserError(
        f'an image of {height}x{width} pixels is not divisible by the patch '
        f'size {p}: take multiples of {p}.'
      )
    return height // p, width // p

  @nn.nowrap
  def check(self, image_size: Size) -> None:
    """Raises UserError if images cannot have that size; see `grid`."""
    self.grid(image_size)

  @nn.nowrap
  def adapt(
    self,
    leaves: dict[str, np.ndarray],
    old_size: Size,
    new_size: Size,
    method: str,
  ) -> dict[str, np.ndarray]:
    """Interpolates positions of rows and columns; see `positions.resize`."""
    old, new = self.grid(old_size), self.grid(new_size)
    counts: dict[str, tuple[int, int]] = {
      'position/rows': (old[0], new[0]),
      'position/columns': (old[1], new[1]),
    }

    def resized(leaf: np.ndarray, old: int, new: int) -> np.ndarray:
      return resize(leaf[None], (old, 1), (new, 1), method)[0]

    return {path: resized(leaf, *counts[path]) for path, leaf in leaves.items()}

  @property
  def architecture(self) -> dict[str, Any]:
    """Sizes, and the kind of GELU, which no shape shows."""
    return {name: getattr(self, name) for name in (*sizes.NAMES, 'gelu')}

  @property
  def reference(self) -> 'AxialViT':
    """Without rematerialisation or unrolling."""
    return self.clone(remat='none', unroll=1)
