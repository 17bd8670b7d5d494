"""The ResNet with axial attention (appendix D.6 of the ViT paper).

Attention along one axis of a map replaces a convolution, as in "Axial-DeepLab"
(arXiv 2003.07853), section 3.2, with GroupNorm instead of BatchNorm as in the
public code of the ViT paper's authors. `model.name='examples.axial_resnet'` in
a config selects this plug-in.
"""

import dataclasses
import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Key

from vit_jax.arrays import sharding
from vit_jax.config import schema
from vit_jax.errors import UserError
from vit_jax.models import backbone, resnet, xla
from vit_jax.models.backbone import (
  Backbone,
  BackboneConfig,
  Images,
  UncheckedImages,
)
from vit_jax.models.contract import Leaves
from vit_jax.models.init import ZEROS
from vit_jax.models.layers import sized_parameter
from vit_jax.models.positions import Axes, interpolate
from vit_jax.models.resnet import GroupNorm, StdConv, by_std, max_pool

Size = tuple[int, int]
Maps = Float[Array, 'n y x c']
# Units of each stage, in appendix D.6
VARIANTS = {'R50': dict(depths=(3, 4, 6, 3))}
WIDTH = 64  # inner channels of the units of the first stage
EPSILON = 1e-4  # epsilon of all GroupNorms of an AxialResNet
# Arrays that `remat='dots'` keeps.
SAVED = (*resnet.SAVED, 'qkv', 'attended')


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
    self.complete(('depths',), VARIANTS)
    object.__setattr__(self, 'depths', tuple(self.depths))
    resnet.check_depths('model.depths', self.depths, at_least=1)
    self.check_range('num_heads', at_least=1, at_most=WIDTH // 2)
    if WIDTH % (2 * self.num_heads):
      raise UserError(
        f'model.num_heads is {self.num_heads}; twice this number must divide '
        f'{WIDTH}.'
      )


class AxialAttention(nn.Module):
  """Position-sensitive attention within each row or each column of a map.

  The map keeps its shape; its number of channels is a multiple of 32 and of
  twice the number of heads. Queries and keys have half as many channels as
  values.

  Parameters: `qkv` `[c, heads, 2 c / heads]`, `relative`
  `[2 c / heads, 2 L − 1]` (one column per offset in a line of L positions,
  shared by the heads), `gn_qkv` and `gn_out`. The norms take their statistics
  over one line.

  Attributes:
    axis: 'row' or 'column', the lines within which positions attend.
    num_heads: number of attention heads.
    dtype: dtype of the computation.
  """

  axis: str
  num_heads: int
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x: Maps) -> Maps:
    # Columns become rows, so that axis 1 numbers the lines in both cases.
    if self.axis == 'column':
      x = x.swapaxes(1, 2)
    n, lines, length, channels = x.shape
    each = 2 * channels // self.num_heads
    init = nn.initializers.normal
    shape = (channels, self.num_heads, each)
    kernel = jnp.asarray(self.param('qkv', init(1 / channels), shape))
    shape = (each, 2 * length - 1)
    relative = jnp.asarray(
      sized_parameter(self, 'relative', init(2 / each), shape)
    )
    kernel = sharding.constrain(kernel.astype(self.dtype), None, None, None)
    relative = sharding.constrain(relative.astype(self.dtype), None, None)
    y = x.reshape(n * lines, length, 1, channels).astype(self.dtype)
    y = jnp.dot(y, kernel.reshape(channels, -1))  # [n · lines, L, 1, 2 c]
    y = GroupNorm(EPSILON, self.dtype, name='gn_qkv')(y)
    y = checkpoint_name(y, 'qkv').reshape(n * lines, length, *kernel.shape[1:])
    y = _attend(y, relative[:, offsets(length)])
    y = checkpoint_name(y, 'attended').reshape(n * lines, length, 1, channels)
    y = GroupNorm(EPSILON, self.dtype, name='gn_out')(y)
    y = y.reshape(x.shape)
    y = y.swapaxes(1, 2) if self.axis == 'column' else y
    return sharding.constrain(y, sharding.BATCH, None, None, None)


def offsets(length: int) -> Int[np.ndarray, 'q k']:
  """Returns the column of `relative` for each pair of query and key.

  The column is L − 1 + position of the key − position of the query.

  Args:
    length: number of positions L of a line.
  """
  positions = np.arange(length)
  return positions[None, :] - positions[:, None] + length - 1


@jax.checkpoint  # the backward pass recomputes the weights
def _attend(
  qkv: Float[Array, 'n t h _'], relative: Float[Array, '_ t t']
) -> Float[Array, 'n t h _']:
  """Computes softmax(q·k + q·r_q + k·r_k) (v + r_v), equation 4.

  r_q, r_k and r_v are embeddings of the offset between query and key.
  """
  each = qkv.shape[-1]
  parts = each // 4, each // 2
  query, key, value = jnp.split(qkv, parts, axis=-1)
  relative_query, relative_key, relative_value = jnp.split(
    relative, parts, axis=0
  )
  wide = dict(preferred_element_type=jnp.float32)
  logits = jnp.einsum('nqhc,nkhc->nhqk', query, key, **wide)
  # Unlike in ViT, logits are not divided by √c: the GroupNorm of q, k and v
  # determines their scale.
  logits += jnp.einsum('nqhc,cqk->nhqk', query, relative_query, **wide)
  logits += jnp.einsum('nkhc,cqk->nhqk', key, relative_key, **wide)
  weights = jax.nn.softmax(logits).astype(value.dtype)
  y = jnp.einsum('nhqk,nkhc->nqhc', weights, value, **wide)
  y += jnp.einsum('nhqk,cqk->nqhc', weights, relative_value, **wide)
  return y.astype(value.dtype)


class Unit(nn.Module):
  """A bottleneck unit with axial attention instead of the 3x3 convolution.

  It has a 1x1 convolution, attention along rows, attention along columns,
  average pooling if there is a stride, and a 1x1 convolution. Activations
  follow the norms; the scale of the last norm is initialized by 0. Parameters:
  `conv{1,3}/kernel`, `gn{1,3}/…`, `{row,column}/…` (see `AxialAttention`); if
  the unit changes the shape, also `conv_proj/kernel` and `gn_proj/…`.

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
    outer = resnet.EXPANSION * self.channels
    conv = functools.partial(StdConv, standardize=by_std, dtype=self.dtype)
    norm = functools.partial(GroupNorm, EPSILON, self.dtype)
    x = xla.stored(sharding.constrain(x, sharding.BATCH, None, None, None))
    y = nn.relu(norm(name='gn1')(conv(self.channels, name='conv1')(x)))
    for axis in ('row', 'column'):
      attend = AxialAttention(axis, self.num_heads, self.dtype, name=axis)
      y = attend(y)
    if self.stride > 1:
      strides = (self.stride, self.stride)
      y = nn.avg_pool(y, strides, strides, 'SAME')
    y = conv(outer, name='conv3')(nn.relu(y))
    # With a scale of 0 the unit is initialized as the identity.
    y = norm(scale_init=ZEROS, name='gn3')(y)
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

  determined = ('depths', 'num_heads')
  sharding_rules = ((r'head/(kernel|bias)', -1),)

  def setup(self):
    config, dtype = self.config, self.config.compute_dtype
    self.conv_root = StdConv(WIDTH, by_std, size=7, stride=2, dtype=dtype)
    self.gn_root = GroupNorm(EPSILON, dtype)
    self.stages = resnet.stages(
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
    """Interpolates relative positions; see `positions.interpolate`."""
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
      axes = Axes((offsets.shape[-2],), (2 * side - 1,))
      offsets = interpolate(offsets, axes, method or 'aligned')
      adapted[path] = offsets.swapaxes(-1, -2)
    return adapted


Model = backbone.constructor(AxialResNet, Config)
