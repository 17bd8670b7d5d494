"""ResNets: that of "Big Transfer" (BiT), and the stem of the hybrids.

References: BiT, arXiv 1912.11370, section 3.1; hybrids, section 3.1 of the ViT
paper. It does not specify the details of the stem. As in the official code, the
activation follows each unit, and there are GroupNorm, weight standardization
and SAME padding.

The official implementations differ in several ways:

| | BiT | stem of the hybrids |
|---|---|---|
| activation and norm | before a convolution | after a convolution |
| epsilon of GroupNorm | 1e-5 | 1e-6 |
| kernels are divided by | √(variance + 1e-10) | std + 1e-5 |
| padding | the same on all sides | SAME |
| initialized as the identity | no | yes: the scale of gn3 is 0 |
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Key

from vit_jax.arrays import sharding
from vit_jax.config import schema
from vit_jax.errors import check_range
from vit_jax.models import backbone, xla
from vit_jax.models.backbone import Backbone, Images, UncheckedImages
from vit_jax.models.init import ZEROS, Initializer
from vit_jax.models.layers import rematerialized, scanned

Kernel = Float[Array, 'h w i o']
Maps = Float[Array, 'n y x c']
Results = Float[Array, 'n r s o']
Padding = str | tuple[tuple[int, int], tuple[int, int]]
# Units in each stage ("Deep Residual Learning", arXiv 1512.03385, Table 1).
DEPTHS = {
  50: (3, 4, 6, 3),
  101: (3, 4, 23, 3),
  152: (3, 8, 36, 3),
  200: (3, 24, 36, 3),  # "Identity Mappings", arXiv 1603.05027, appendix
}
VARIANTS = {
  f'R{size}x{factor}': dict(depths=depths, width_factor=factor)
  for size, depths in DEPTHS.items()
  for factor in (1, 2, 3, 4)
}
SIZE_KEYS = ('depths', 'width_factor')  # keys of the sizes
WIDTH = 64  # inner channels of the units of the first stage at width factor 1
MAX_WIDTH_FACTOR = 1024  # 2^25 channels in the last of 8 stages, an int32
GROUPS = 32  # of GroupNorm, as in BiT and in the paper on GroupNorm
EXPANSION = 4  # output channels of a unit per inner channel
# conv1 and conv2 are split by the inner channels. The mesh splits them into
# whole groups, so the statistics of gn2 need no communication.
SHARDING_RULES = (
  (r'unit1/conv1/kernel', -1),
  (r'unit1/conv2/kernel', -2),
  (r'layers/conv1/kernel', -1),
  (r'layers/conv2/kernel', -2),
)
SAVED = ('convolution', 'statistics')  # arrays that `remat='dots'` keeps

# Layers


class GroupNorm(nn.Module):
  """Normalization of each of 32 groups of channels, over all positions.

  Statistics are float32, computed in two passes for float32 inputs and in one
  pass for others; see `layers.LayerNorm` for the reason. Sums are taken over
  positions first and then over the few channels of a group, so that no map is
  reshaped.

  Reference: arXiv 1803.08494.

  Attributes:
    epsilon: value added to the variance.
    dtype: dtype of the result.
    scale_init: initializer of the scale.
  """

  epsilon: float
  dtype: jnp.dtype
  scale_init: Initializer = nn.initializers.ones_init()

  @nn.compact
  def __call__(self, x: Float[Array, 'n y x c']) -> Float[Array, 'n y x c']:
    size = (x.shape[-1],)
    scale = self.param('scale', self.scale_init, size)
    bias = self.param('bias', ZEROS, size)
    wide = x.astype(jnp.float32)
    mean = checkpoint_name(_group_means(wide), 'statistics')
    if x.dtype == jnp.float32:
      variance = _group_means(jnp.square(wide - mean))
    else:
      variance = _group_means(jnp.square(wide)) - jnp.square(mean)
    # In one pass, rounding may turn a variance of zero into a negative number.
    variance = checkpoint_name(jnp.maximum(variance, 0), 'statistics')
    factor = jax.lax.rsqrt(variance + self.epsilon)
    return ((wide - mean) * (factor * scale) + bias).astype(self.dtype)


def _group_means(x: Float[Array, 'n y x c']) -> Float[Array, 'n 1 1 c']:
  """Computes the mean of each group, repeated for each of its channels."""
  n, *_, channels = x.shape
  means = x.mean((1, 2)).reshape(n, GROUPS, -1).mean(-1, keepdims=True)
  means = jnp.broadcast_to(means, (n, GROUPS, channels // GROUPS))
  return means.reshape(n, 1, 1, channels)


def by_std(kernel: Kernel) -> Kernel:
  """Computes (w − mean) / (std + 1e-5) per output channel, as in hybrids."""
  centered = kernel - kernel.mean((0, 1, 2), keepdims=True)
  return centered / (_std(centered, 0.0) + 1e-5)


def by_variance(kernel: Kernel) -> Kernel:
  """Computes (w − mean) / √(variance + 1e-10) per output channel, as in BiT."""
  centered = kernel - kernel.mean((0, 1, 2), keepdims=True)
  return centered / _std(centered, 1e-10)


def _std(centered: Kernel, epsilon: float) -> Float[Array, '1 1 1 o']:
  """Computes √(mean square + ε).

  Where the root is 0 (ε = 0 and a constant kernel), its gradient is 0, not ∞.
  """
  # Both branches of `where` are differentiated, so the inner `where` replaces
  # 0, where the derivative of the root is infinite.
  variance = jnp.square(centered).mean((0, 1, 2), keepdims=True) + epsilon
  positive = variance > 0
  return jnp.where(positive, jnp.sqrt(jnp.where(positive, variance, 1)), 0)


class StdConv(nn.Module):
  """A convolution without bias whose kernel is standardized in float32.

  Reference: "Micro-Batch Training with Batch-Channel Normalization and Weight
  Standardization" (arXiv 1903.10520), section 2.

  The kernel `[size, size, in, features]` is initialized by LeCun's normal
  distribution, as in the official code. It is gathered over the mesh axis
  `fsdp` where it is used.

  Attributes:
    features: output channels.
    standardize: `by_variance` or `by_std`.
    size: side of the kernel.
    stride: stride of the convolution.
    padding: 'same' or 'fixed'; see `pads`.
    model_dim: negative index of the kernel axis that stays split over the mesh
      axis `model`; None if there is no such axis.
    dtype: dtype of the computation.
  """

  features: int
  standardize: Callable[[Kernel], Kernel]
  size: int = 1
  stride: int = 1
  padding: str = 'same'
  model_dim: int | None = None
  dtype: jax.typing.DTypeLike = 'float32'

  @nn.compact
  def __call__(self, x: Float[Array, 'n y x i']) -> Float[Array, 'n r c o']:
    shape = (self.size, self.size, x.shape[-1], self.features)
    kernel = self.param('kernel', nn.initializers.lecun_normal(), shape)
    spec: list[str | None] = [None] * 4
    if self.model_dim is not None:
      spec[self.model_dim] = 'model'
    # Float32 statistics: bfloat16 would lose most of a small kernel's mean.
    kernel = self.standardize(jnp.asarray(kernel)).astype(self.dtype)
    y = jax.lax.conv_general_dilated(
      x.astype(self.dtype),
      sharding.constrain(kernel, *spec),
      (self.stride, self.stride),
      pads(self.size, self.padding),
      dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
    )
    y = sharding.constrain(y, sharding.BATCH, None, None, spec[-1])
    return checkpoint_name(y, 'convolution')


def pads(size: int, padding: str) -> Padding:
  """Returns the padding around a map.

  Args:
    size: side of the kernel.
    padding: 'same' (the hybrids' code) for as little padding as ⌈side / stride⌉
      results need, more of it below and on the right than on the other sides;
      or 'fixed' (BiT's code) for the same padding on all sides, independent of
      the stride.
  """
  if padding == 'same':
    return 'SAME'
  before = (size - 1) // 2
  sides = before, size - 1 - before
  return sides, sides


def max_pool(
  x: Float[Array, 'n y x c'], padding: str
) -> Float[Array, 'n r s c']:
  """Computes the maximum over windows of 3x3 positions with stride 2.

  Args:
    x: activations, positive or negative.
    padding: 'same' or 'fixed'; see `pads`. 'fixed' pads with zeros, as in BiT's
      code. Because no ReLU precedes the pooling there, a zero may be the
      maximum of a window.
  """
  if padding == 'same':
    return nn.max_pool(x, (3, 3), (2, 2), 'SAME')
  sides: Any = ((1, 1), (1, 1))  # the annotation allows strings only
  y = nn.max_pool(x, (3, 3), (2, 2), sides)
  # `nn.max_pool` pads with -inf. A padded map of zeros would be written to
  # memory, so the zeros are added to the windows at the edges instead.
  rows, columns = map(_has_padding, x.shape[1:3])
  return jnp.where(rows[:, None, None] | columns[:, None], nn.relu(y), y)


def _has_padding(side: int) -> Bool[np.ndarray, ' r']:
  """Returns which windows of `max_pool` with 'fixed' contain padding."""
  first = np.arange(0, side, 2) - 1  # first position of each window
  return (first < 0) | (first + 2 >= side)


# Units and stages


def norm_and_conv(activation: str, dtype: jnp.dtype) -> tuple[Any, Any]:
  """Returns the constructors of GroupNorm and convolution of an official code.

  The docstring of the module describes how the official codes differ.

  Args:
    activation: 'before' (norm and activation before each convolution, as in the
      code of BiT) or 'after' (as in the hybrids of the ViT paper's code).
    dtype: dtype of the computation.
  """
  before = activation == 'before'
  padding = 'fixed' if before else 'same'
  standardize = by_variance if before else by_std
  norm = functools.partial(GroupNorm, 1e-5 if before else 1e-6, dtype)
  keys: dict[str, Any] = dict(standardize=standardize, padding=padding)
  return norm, functools.partial(StdConv, **keys, dtype=dtype)


class Unit(nn.Module):
  """One bottleneck unit, to be scanned.

  It has a 1x1, a 3x3 (with the stride) and a 1x1 convolution. Parameters:
  `conv{1,2,3}/kernel`, `gn{1,2,3}/{scale,bias}`; if the unit changes the shape,
  also `conv_proj/kernel` and, with the activation 'after', `gn_proj/…`.

  Attributes:
    channels: inner channels; the unit has four times as many output channels.
    activation: 'before' or 'after', see `norm_and_conv`.
    stride: stride of the unit.
    dtype: dtype of the computation.
  """

  channels: int
  activation: str
  stride: int
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x: Maps, _: None = None) -> tuple[Results, None]:
    norm, conv = norm_and_conv(self.activation, self.dtype)
    outer = EXPANSION * self.channels
    changes = x.shape[-1] != outer or self.stride != 1
    project = functools.partial(
      conv, outer, stride=self.stride, name='conv_proj'
    )
    convs = [
      conv(self.channels, model_dim=-1, name='conv1'),
      conv(
        self.channels, size=3, stride=self.stride, model_dim=-2, name='conv2'
      ),
      conv(outer, name='conv3'),
    ]
    x = xla.stored(sharding.constrain(x, sharding.BATCH, None, None, None))
    # ResNet v2 (before) normalizes the inputs of each convolution, and projects
    # the normalized input; v1 (after) normalizes the outputs.
    if self.activation == 'before':
      y = nn.relu(norm(name='gn1')(x))
      x = project()(y) if changes else x
      y = nn.relu(norm(name='gn2')(convs[0](y)))
      y = nn.relu(norm(name='gn3')(convs[1](y)))
      return x + convs[2](y), None
    y = nn.relu(norm(name='gn1')(convs[0](x)))
    y = nn.relu(norm(name='gn2')(convs[1](y)))
    # With a scale of 0 the unit is initialized as the identity.
    y = norm(scale_init=ZEROS, name='gn3')(convs[2](y))
    x = norm(name='gn_proj')(project()(x)) if changes else x
    return nn.relu(x + y), None


class Stage(nn.Module):
  """A stage of `depth` units; the first unit, `unit1`, may halve the map.

  The other units have equal shapes and are scanned: `layers/conv1/kernel` is
  `[depth - 1, 1, 1, 4 · channels, channels]`.

  Attributes:
    unit: class of the units, called as `unit(*settings, stride, dtype)`.
    settings: first arguments of every unit.
    depth: number of units.
    stride: stride of the first unit.
    dtype: dtype of the computation.
    remat: 'none', 'full' or 'dots'.
    unroll: number of units that are unrolled in each step of the scan.
    saved: names of the arrays that `remat='dots'` keeps.
  """

  unit: type[nn.Module]
  settings: tuple[Any, ...]
  depth: int
  stride: int
  dtype: jnp.dtype
  remat: str
  unroll: int
  saved: tuple[str, ...] = SAVED

  @nn.compact
  def __call__(self, x: Maps) -> Results:
    recomputed: dict[str, Any] = dict(remat=self.remat, saved=self.saved)
    first = rematerialized(self.unit, prevent_cse=True, **recomputed)
    x, _ = first(*self.settings, self.stride, self.dtype, name='unit1')(x)
    if self.depth == 1:
      return x
    rest = scanned(self.unit, self.depth - 1, unroll=self.unroll, **recomputed)
    return rest(*self.settings, 1, self.dtype, name='layers')(x, None)[0]


def stages(
  depths: tuple[int, ...],
  width: int,
  unit: type[nn.Module],
  setting: Any,
  **others: Any,
) -> list[Stage]:
  """Returns the stages `block1`, `block2`, …, to be assigned in `setup`.

  Each stage except the first halves the map and doubles the width.

  Args:
    depths: number of units in each stage.
    width: inner channels of the units of the first stage.
    unit: class of the units.
    setting: second argument of every unit, after its inner channels, such as
      the `activation` of a `Unit`.
    **others: other attributes of each `Stage`.
  """
  return [
    Stage(
      unit,
      (width * 2**i, setting),
      depth=depth,
      stride=1 if i == 0 else 2,
      name=f'block{i + 1}',
      **others,
    )
    for i, depth in enumerate(depths)
  ]


def _layers(
  sizes: Any, dtype: jnp.dtype, activation: str
) -> tuple[Any, list[Stage], Any]:
  """Returns root, stages and the constructor of norms, for use in `setup`.

  Args:
    sizes: config of a ResNet, or another object with its `depths`,
      `width_factor`, `remat` and `unroll`.
    dtype: dtype of the computation.
    activation: 'before' or 'after', see `norm_and_conv`.
  """
  norm, conv = norm_and_conv(activation, dtype)
  width = WIDTH * sizes.width_factor
  blocks = stages(
    sizes.depths,
    width,
    Unit,
    activation,
    dtype=dtype,
    remat=sizes.remat,
    unroll=sizes.unroll,
  )
  return conv(width, size=7, stride=2), blocks, norm


def check_depths(key: str, depths: tuple[int, ...], *, at_least: int) -> None:
  """Checks the number of stages, and that each has at least one unit.

  Args:
    key: path of the config key.
    depths: number of units in each stage.
    at_least: smallest number of stages.

  Raises:
    UserError: there are too few stages or more than 8, or one has no unit.
  """
  check_range(f'the number of {key}', len(depths), at_least=at_least, at_most=8)
  for i, depth in enumerate(depths):
    check_range(f'{key}[{i}]', depth, at_least=1)


# Models


@schema.operational('remat', 'unroll')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(backbone.BackboneConfig):
  """Keys of the config's `model` section for a ResNet.

  `remat='dots'` recomputes everything but convolutions and statistics.

  Attributes:
    variant: name such as 'R50x1': R50, R101, R152 or R200, and a width factor
      of 1 to 4 (Table 3). Sizes that are set explicitly take precedence.
    depths: number of units in each stage.
    width_factor: factor of the number of channels of every layer; with 1, the
      units of the first stage have 64 inner channels.

  Raises:
    UserError: a variant or choice is unknown, a size is missing, or a number is
      out of range.
  """

  variant: str | None = None
  depths: backbone.Sizes = backbone.OF_VARIANT
  width_factor: backbone.Size = backbone.OF_VARIANT

  def __post_init__(self):
    super().__post_init__()
    self.complete(SIZE_KEYS, VARIANTS)
    object.__setattr__(self, 'depths', tuple(self.depths))
    check_depths('model.depths', self.depths, at_least=1)
    self.check_range('width_factor', at_least=1, at_most=MAX_WIDTH_FACTOR)


class ResNet(Backbone):
  """A ResNet v2 (arXiv 1603.05027), with the activation first in each unit.

  It has GroupNorm instead of BatchNorm, and weight standardization, but no
  dropout or drop path. Images may have any size. Parameters:
  `conv_root/kernel`, `block{1…}/unit1/…`, `block{1…}/layers/…` (stacked),
  `norm/{scale,bias}`, `head/{kernel,bias}`.
  """

  config: Config

  determined = SIZE_KEYS
  outputs = ('tokens', 'patches')
  sharding_rules = (*SHARDING_RULES, (r'head/(kernel|bias)', -1))

  def setup(self):
    config, dtype = self.config, self.config.compute_dtype
    self.conv_root, self.stages, norm = _layers(config, dtype, 'before')
    self.norm = norm()
    self.head = self._new_head()

  def _predict(
    self, images: Images, key: Key[Array, ''] | None, want: tuple[str, ...]
  ) -> dict[str, Array]:
    x = nn.relu(self.norm(self._maps(images)[-1])).astype(jnp.float32)
    tokens = x.reshape(x.shape[0], -1, x.shape[-1])
    return self._results(x.mean((1, 2)), tokens) | {'patches': x}

  def maps(self, images: UncheckedImages) -> list[Float[Array, 'n _ _ _']]:
    """Computes the map of each stage, `[n, rows, columns, channels]`.

    Args:
      images: float images in [-1, 1], `[n, height, width, channels]`.
    """
    return self._maps(self._input(images))

  def _maps(self, images: Images) -> list[Float[Array, 'n _ _ _']]:
    # No ReLU: with activation first, each unit begins with one.
    x, maps = max_pool(self.conv_root(images), 'fixed'), []
    for stage in self.stages:
      x = stage(x)
      maps.append(x)
    return maps


def stride_of(depths: Sequence[int]) -> int:
  """Returns the number of pixels per position of the map.

  Root and first stage have a stride of 4; each further stage doubles it.

  Args:
    depths: number of units in each stage.
  """
  return 4 * 2 ** max(len(depths) - 1, 0)


class ResNetStem(nn.Module):
  """A stem that computes maps of images; satisfies `models.contract.Stem`.

  Parameters: `conv_root/kernel`, `gn_root/{scale,bias}`, and `block{1…}` as
  in `Stage`.

  Attributes:
    depths: number of units in each stage.
    width_factor: factor of the number of channels of every layer.
    dtype: dtype of the computation.
    remat: 'none', 'full' or 'dots'.
    unroll: number of units that are unrolled in each step of a scan.
  """

  depths: tuple[int, ...]
  width_factor: int
  dtype: jnp.dtype
  remat: str
  unroll: int

  sharding_rules = SHARDING_RULES

  def setup(self):
    self.conv_root, self.stages, norm = _layers(self, self.dtype, 'after')
    self.gn_root = norm()

  def __call__(
    self, images: Float[Array, 'n y x i']
  ) -> Float[Array, 'n r s c']:
    x = nn.relu(self.gn_root(self.conv_root(images)))
    x = max_pool(x, 'same')  # root and pooling: a stride of 4
    for stage in self.stages:
      x = stage(x)
    return x

  @property
  def stride(self) -> int:
    """Pixels per position of the map."""
    return stride_of(self.depths)

  @property
  def section(self) -> dict[str, Any]:
    """Config section of the stem."""
    sizes = dict(depths=self.depths, width_factor=self.width_factor)
    return {'name': 'resnet'} | sizes


def Stem(  # noqa: N802 (the fixed symbol that a section's name resolves to)
  dtype: jnp.dtype,
  remat: str,
  unroll: int,
  /,
  *,
  depths: tuple[int, ...],
  width_factor: int = 1,
) -> ResNetStem:
  """Builds a stem.

  Args:
    dtype: dtype of the computation, from the model.
    remat: activations that the backward pass recomputes, from the model:
      'none', 'full' or 'dots' (all but convolutions).
    unroll: number of units that are unrolled in each step of a scan, from the
      model.
    depths: number of units in each stage; () for the root only (R+Ti/16).
    width_factor: factor of the number of channels of every layer.

  Raises:
    UserError: a number is out of range.
  """
  check_depths('model.stem.depths', depths, at_least=0)
  key = 'model.stem.width_factor'
  check_range(key, width_factor, at_least=1, at_most=MAX_WIDTH_FACTOR)
  return ResNetStem(tuple(depths), width_factor, dtype, remat, unroll)


Model = backbone.constructor(ResNet, Config)
