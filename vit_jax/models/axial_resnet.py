"""The ResNet with axial attention (appendix D.6 of the ViT paper)."""

import dataclasses
import functools
import itertools

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from vit_jax.arrays import sharding
from vit_jax.config import schema
from vit_jax.errors import UserError
from vit_jax.models import backbone
from vit_jax.models.backbone import (
  Backbone,
  BackboneConfig,
  Images,
  UncheckedImages,
)
from vit_jax.models.contract import Leaves
from vit_jax.models.layers import axial, residual
from vit_jax.models.layers.convolution import StdConv, by_std, max_pool
from vit_jax.models.layers.group_norm import GroupNorm
from vit_jax.models.layers.positions import resize_axis
from vit_jax.models.layers.stream import stored

Size = tuple[int, int]
Maps = Float[Array, 'n y x c']
DEPTHS = {'R50': (3, 4, 6, 3)}  # units of each stage; the size of appendix D.6
WIDTH = 64  # inner channels of the units of the first stage
SAVED = (*residual.SAVED, *axial.SAVED)  # arrays that `remat='dots'` keeps


@schema.operational('remat', 'unroll')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(BackboneConfig):
  """Keys of the config's `model` section for an AxialResNet.

  `remat='dots'` recomputes everything but convolutions, statistics, and inputs
  and outputs of attention.

  Attributes:
    variant: 'R50'. Depths that are set explicitly take precedence.
    depths: number of units in each stage.
    num_heads: number of attention heads in every stage; 8 in "Axial-DeepLab".

  Raises:
    UserError: a variant or choice is unknown, neither `variant` nor `depths` is
      set, or a number is out of range.
  """

  variant: str | None = None
  depths: backbone.Sizes = backbone.OF_VARIANT
  num_heads: int = 8

  def __post_init__(self):
    super().__post_init__()
    if self.variant is not None and self.variant not in DEPTHS:
      raise UserError(
        f'model.variant is {self.variant!r}; allowed: {", ".join(DEPTHS)}.'
      )
    sizes = {'depths': DEPTHS[self.variant]} if self.variant else {}
    self.complete(('depths',), sizes, 'R50')
    object.__setattr__(self, 'depths', tuple(self.depths))
    residual.check_depths('model.depths', self.depths, at_least=1)
    self.check_range('num_heads', at_least=1, at_most=WIDTH // 2)
    if WIDTH % (2 * self.num_heads):
      raise UserError(
        f'model.num_heads is {self.num_heads}; twice this number must divide '
        f'{WIDTH}.'
      )


class Unit(nn.Module):
  """A bottleneck unit with axial attention instead of the 3x3 convolution.

  It has a 1x1 convolution, attention along rows, attention along columns,
  average pooling if there is a stride, and a 1x1 convolution. Activations
  follow the norms; the scale of the last norm is initialized by 0. Parameters:
  `conv{1,3}/kernel`, `gn{1,3}/…`, `{row,column}/…` (see `layers.axial`); if the
  unit changes the shape, also `conv_proj/kernel` and `gn_proj/…`.

  Attributes:
    channels: inner channels; the unit has four times as many output channels.
    num_heads: number of attention heads.
    stride: stride of the unit.
    dtype: dtype of the computation.
  """

  channels: int
  num_heads: int
  stride: int
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x: Maps, _: None = None) -> tuple[Array, None]:
    outer = residual.EXPANSION * self.channels
    conv = functools.partial(StdConv, standardize=by_std, dtype=self.dtype)
    norm = functools.partial(GroupNorm, axial.EPSILON, self.dtype)
    x = stored(sharding.constrain(x, sharding.BATCH, None, None, None))
    y = nn.relu(norm(name='gn1')(conv(self.channels, name='conv1')(x)))
    for axis in ('row', 'column'):
      attend = axial.AxialAttention(axis, self.num_heads, self.dtype, name=axis)
      y = attend(y)
    if self.stride > 1:
      strides = (self.stride, self.stride)
      y = nn.avg_pool(y, strides, strides, 'SAME')
    y = conv(outer, name='conv3')(nn.relu(y))
    # With a scale of 0 the unit is initialized as the identity.
    zeros = nn.initializers.zeros_init()
    y = norm(scale_init=zeros, name='gn3')(y)
    if x.shape[-1] != outer or self.stride > 1:
      x = conv(outer, stride=self.stride, name='conv_proj')(x)
      x = norm(name='gn_proj')(x)
    return nn.relu(x + y), None


class AxialResNet(Backbone):
  """A ResNet with axial attention, without dropout and drop path.

  Parameters: `conv_root/kernel`, `gn_root/…`, `block{1…}/{unit1,layers}/…`,
  `head/{kernel,bias}`.
  """

  config: Config

  stages_method = 'maps'
  title = 'An AxialResNet'
  determined = ('depths', 'num_heads')
  sharding_rules = ((r'head/(kernel|bias)', -1),)

  def setup(self):
    config, dtype = self.config, self.config.compute_dtype
    self.conv_root = StdConv(WIDTH, by_std, size=7, stride=2, dtype=dtype)
    self.gn_root = GroupNorm(axial.EPSILON, dtype)
    self.stages = residual.stages(
      config.depths,
      WIDTH,
      Unit,
      config.num_heads,
      dtype=dtype,
      remat=config.remat,
      saved=SAVED,
      unroll=config.unroll,
    )
    self.head = self._new_head()

  def _maps(self, images: Images) -> list[Float[Array, 'n _ _ _']]:
    x = nn.relu(self.gn_root(self.conv_root(images)))
    x, maps = max_pool(x, 'same'), []
    for stage in self.stages:
      x = stage(x)
      maps.append(x)
    return maps

  def _predict(
    self, images: Images, key: Key[Array, ''] | None, want: tuple[str, ...]
  ) -> dict[str, Array]:
    del key, want
    x = self._maps(images)[-1].astype(jnp.float32)
    return self._results(x.mean((1, 2)), x.reshape(x.shape[0], -1, x.shape[-1]))

  def maps(self, images: UncheckedImages) -> list[Float[Array, 'n _ _ _']]:
    """Computes the map of each stage, `[n, rows, columns, channels]`, float32.

    Args:
      images: float images in [-1, 1], `[n, height, width, channels]`.
    """
    maps = self._maps(self._input(images))
    return [x.astype(jnp.float32) for x in maps]

  @property
  def sized(self) -> tuple[str, ...]:
    """Path prefixes of the relative position embeddings of rows and columns."""
    parts = itertools.product(
      range(1, len(self.config.depths) + 1),
      ('unit1', 'layers'),
      ('row', 'column'),
    )
    return tuple(f'block{i}/{unit}/{a}/relative' for i, unit, a in parts)

  @nn.nowrap
  def adapt(
    self,
    leaves: Leaves,
    old_size: Size,
    new_size: Size,
    method: str | None,
  ) -> Leaves:
    """Interpolates relative positions; see `positions.resize_axis`."""
    del old_size  # the shape of a parameter determines it
    adapted = {}
    for path, leaf in leaves.items():
      block, unit, axis, _ = path.split('/')
      # Root and pooling halve the image twice, and each further stage halves it
      # once more. In the first unit of a stage, attention precedes pooling, so
      # the map has the size of the previous stage.
      halvings = int(block.removeprefix('block')) + 1
      halvings -= unit == 'unit1' and halvings > 2
      side = -(-new_size[axis == 'row'] // 2**halvings)
      offsets = leaf.swapaxes(-1, -2)  # [..., offsets, channels]
      offsets = resize_axis(offsets, 2 * side - 1, method or 'aligned')
      adapted[path] = offsets.swapaxes(-1, -2)
    return adapted


Model = backbone.constructor(AxialResNet, Config)
