"""The Swin Transformer (arXiv 2103.14030)."""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from vit_jax.errors import UserError
from vit_jax.models import backbone
from vit_jax.models.backbone import Backbone, Images, UncheckedImages
from vit_jax.models.contract import Kernels, Leaves
from vit_jax.models.layers import initializers, patches
from vit_jax.models.layers.linear import Linear
from vit_jax.models.swin import attention, relative, sizes
from vit_jax.models.swin.config import Config
from vit_jax.models.swin.stage import (
  LN_EPSILON,
  LayerNorm,
  Merge,
  Stage,
  halved,
)
from vit_jax.models.swin.windows import Windows
from vit_jax.models.vit import encoder

Grid = tuple[int, int]
_TABLE = 'attention/bias_table'


class Swin(Backbone):
  """A Swin Transformer.

  There are no methods `embed` and `encode`, because tokens of a map cannot be
  left out. Parameters: `embedding/{kernel,bias}`, `embedding_norm/…`,
  `stage{1…}/layers/{plain,shifted}/…` (pairs of blocks stacked),
  `merge{1…}/{norm/…,kernel}`, `norm/…`, `head/{kernel,bias}`.
  """

  config: Config

  stages_method = 'stages'
  title = 'A Swin'
  determined = (*sizes.NAMES, 'window_rule')
  adopted = ('window_size',)  # fine-tuning may enlarge it
  gelu, norm_eps = 'exact', LN_EPSILON  # as published; not options
  sharding_rules = (
    *encoder.SHARDING_RULES,
    (r'attention/bias_table', -1),
    (r'head/(kernel|bias)', -1),
  )

  def setup(self):
    dtype = self.config.compute_dtype
    # In the authors' code, this layer is initialized by PyTorch's default.
    kernel_init, bias_init = initializers.torch_convolution(
      3 * sizes.PATCH_SIZE**2
    )
    self.embedding = Linear(
      (self.config.width,),
      input_axes=3,
      kernel_init=kernel_init,
      bias_init=bias_init,
      dtype=dtype,
    )
    self.embedding_norm = LayerNorm(dtype)
    self.norm = LayerNorm(dtype)
    self.head = self._new_head(initializers.NORMAL)

  def _predict(
    self, images: Images, key: Key[Array, ''] | None, want: tuple[str, ...]
  ) -> dict[str, Array]:
    del want
    tokens, _ = self._transform(images, key, want_layers=False)
    return self._results(tokens.mean(axis=1), tokens)

  def stages(
    self, images: UncheckedImages, key: Key[Array, ''] | None = None
  ) -> list[Float[Array, 'n _ _ _']]:
    """Computes the tokens after every block, grouped by stage.

    Args:
      images: float images in [-1, 1], `[n, height, width, channels]`.
      key: random key of drop path; None for evaluation.

    Returns:
      Array `[n, blocks, tokens, channels]` for each stage, float32.
    """
    _, after = self._transform(self._input(images), key, want_layers=True)
    return [
      x.swapaxes(0, 1).astype(jnp.float32) for x in after if x is not None
    ]

  @nn.compact
  def _transform(
    self, images: Images, key: Key[Array, ''] | None, want_layers: bool
  ) -> tuple[Float[Array, 'n t d'], list[Array | None]]:
    """Applies all stages.

    Returns:
      Normalized tokens of the last map, and tokens after every block for each
      stage, or None for each stage without `want_layers`.
    """
    config = self.config
    _, height, width, _ = images.shape
    grids = self.grids((height, width))
    x, after, first = self._embed(images), [], 0
    per_layer = self._per_layer(key)
    for i, (depth, grid) in enumerate(zip(config.depths, grids, strict=True)):
      stage = Stage(config, i, grid, name=f'stage{i + 1}')
      # Keys and rates of the blocks of this stage.
      own = {k: leaf[first : first + depth] for k, leaf in per_layer.items()}
      x, layers = stage(x, own, want_layers)
      after.append(layers)
      first += depth
      if i + 1 < len(grids):
        x = Merge(grid, config.compute_dtype, name=f'merge{i + 1}')(x)
    return self.norm(x), after

  def _embed(self, images: Images) -> Float[Array, 'n t d']:
    """Returns the normalized tokens of patches."""
    _, height, width, _ = images.shape
    grid, *_ = self.grids((height, width))
    x = patches.cut(images, grid, (sizes.PATCH_SIZE, sizes.PATCH_SIZE))
    return self.embedding_norm(self.embedding(x))

  def _per_layer(self, key: Key[Array, ''] | None) -> dict[str, Array]:
    """Returns keys and drop-path rates of all blocks; {} for evaluation."""
    if key is None or not self.config.drop_path:
      return {}
    depth = sum(self.config.depths)
    # Rates grow over the blocks of all stages, not within each stage.
    rates = jnp.linspace(0.0, self.config.drop_path, depth)
    return {'key': jax.random.split(key, depth), 'rate': rates}

  @nn.nowrap
  def grids(self, image_size: Grid) -> list[Grid]:
    """Returns rows and columns of the map of each stage.

    Args:
      image_size: (height, width), pixels.

    Raises:
      UserError: the patch size does not divide the image.
    """
    grids = [backbone.whole_patches(image_size, sizes.PATCH_SIZE)]
    for _ in self.config.depths[1:]:
      grids.append(halved(grids[-1]))
    return grids

  @nn.nowrap
  def check(self, image_size: Grid) -> None:
    """Checks that images can have this size.

    Raises:
      UserError: see `grids` and `Windows.of`.
    """
    for grid in self.grids(image_size):
      Windows.of(grid, self.config.window_size, True, self.config.window_rule)

  @property
  def reference(self) -> 'Swin':
    """The same model without kernels, rematerialization or unrolling."""
    return self.replace(attention='xla', remat='none', unroll=1)

  @property
  def kernels(self) -> Kernels | None:
    """The models for the comparison of kernels; None if XLA is used."""
    # Windows are reduced to small maps, so kernels may apply to them only.
    if not any(self._stages_by_kernels(1)):
      return None
    depths = (2,) * len(self.config.depths)
    probe = self.replace(depths=depths, unroll=1)
    return Kernels(probe, self.replace(attention='xla'))

  def _stages_by_kernels(self, *sides: int) -> list[bool]:
    """Returns for each stage whether kernels compute its attention.

    Args:
      *sides: side of the windows of each stage, or of all stages.
    """
    config, stages = self.config, range(len(self.config.depths))
    return [
      attention.takes_kernels(
        config.attention,
        side**2,
        config.width * 2**i,
        config.num_heads * 2**i,
        config.compute_dtype,
      )
      for i, side in zip(stages, itertools.cycle(sides))
    ]

  @nn.nowrap
  def computed_by(self, image_size: Grid) -> str:
    """Describes how attention within windows is computed.

    Args:
      image_size: (height, width), pixels.
    """
    size = self.config.window_size
    sides = [min(size, *grid) for grid in self.grids(image_size)]
    stages = [
      str(i) for i, by in enumerate(self._stages_by_kernels(*sides), 1) if by
    ]
    if not stages:
      return 'attention by XLA'
    return f'attention by kernels in stages {", ".join(stages)}'

  @property
  def sized(self) -> tuple[str, ...]:
    """Path prefixes of the bias tables.

    A window is never larger than its map, so the shapes of the tables depend on
    the image size.
    """
    kinds = itertools.product(
      range(len(self.config.depths)), ('plain', 'shifted')
    )
    return tuple(f'stage{i + 1}/layers/{kind}/{_TABLE}' for i, kind in kinds)

  @nn.nowrap
  def adapt(
    self,
    leaves: Leaves,
    old_size: Grid,
    new_size: Grid,
    method: str | None,
  ) -> Leaves:
    """Interpolates bias tables to this model's windows; see `relative.resize`.

    Raises:
      UserError: a table changes, and the method is 'aligned' or 'dino'.
    """
    del old_size  # the shape of a table determines its windows
    grids, adapted = self.grids(new_size), {}
    for path, table in leaves.items():
      grid = grids[int(path[len('stage') : path.index('/')]) - 1]
      size = min(self.config.window_size, *grid)
      refused = method in ('aligned', 'dino')
      if refused and relative.window_of(table.shape[1]) != size:
        raise UserError(
          f'position_resize is {method!r}, and the relative position biases of '
          'this Swin have to be resized from windows of '
          f'{relative.window_of(table.shape[1])} to {size} tokens: leave '
          "position_resize out, or set it to 'bicubic', the method for Swin."
        )
      adapted[path] = relative.resize(table, size)
    return adapted


Model = backbone.constructor(Swin, Config)
