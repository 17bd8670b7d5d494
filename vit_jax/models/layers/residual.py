"""Bottleneck units of ResNets, and stages of units.

The official implementations of BiT and of the hybrids differ in several ways:

| | BiT (arXiv 1912.11370) | stem of the hybrids |
|---|---|---|
| activation and norm | before a convolution | after a convolution |
| epsilon of GroupNorm | 1e-5 | 1e-6 |
| kernels are divided by | √(variance + 1e-10) | std + 1e-5 |
| padding | the same on all sides | SAME |
| initialized as the identity | no | yes: the scale of gn3 is 0 |
"""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.arrays import sharding
from vit_jax.errors import check_range
from vit_jax.models.layers import convolution
from vit_jax.models.layers.convolution import StdConv
from vit_jax.models.layers.group_norm import GroupNorm
from vit_jax.models.layers.scan import rematerialized, scanned
from vit_jax.models.layers.stream import stored

Maps = Float[Array, 'n y x c']
Results = Float[Array, 'n r s o']
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


class Code(NamedTuple):
  """Layers of an official implementation; see the docstring of the module.

  Attributes:
    norm: constructor of a GroupNorm.
    conv: constructor of a convolution.
  """

  norm: Any
  conv: Any


def code(activation: str, dtype: jnp.dtype) -> Code:
  """Returns the GroupNorm and convolution of an official implementation.

  Args:
    activation: 'before' (norm and activation before each convolution, as in the
      code of BiT) or 'after' (as in the hybrids of the ViT paper's code).
    dtype: dtype of the computation.
  """
  before = activation == 'before'
  padding = 'fixed' if before else 'same'
  standardize = convolution.by_variance if before else convolution.by_std
  return Code(
    functools.partial(GroupNorm, 1e-5 if before else 1e-6, dtype),
    functools.partial(
      StdConv, standardize=standardize, padding=padding, dtype=dtype
    ),
  )


class Unit(nn.Module):
  """One bottleneck unit, to be scanned.

  It has a 1x1, a 3x3 (with the stride) and a 1x1 convolution. Parameters:
  `conv{1,2,3}/kernel`, `gn{1,2,3}/{scale,bias}`; if the unit changes the shape,
  also `conv_proj/kernel` and, with the activation 'after', `gn_proj/…`.

  Attributes:
    channels: inner channels; the unit has four times as many output channels.
    activation: 'before' or 'after', see `code`.
    stride: stride of the unit.
    dtype: dtype of the computation.
  """

  channels: int
  activation: str
  stride: int
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x: Maps, _: None = None) -> tuple[Results, None]:
    layers = code(self.activation, self.dtype)
    outer = EXPANSION * self.channels
    changes = x.shape[-1] != outer or self.stride != 1
    project = functools.partial(
      layers.conv, outer, stride=self.stride, name='conv_proj'
    )
    convs = [
      layers.conv(self.channels, model_dim=-1, name='conv1'),
      layers.conv(
        self.channels, size=3, stride=self.stride, model_dim=-2, name='conv2'
      ),
      layers.conv(outer, name='conv3'),
    ]
    x = stored(sharding.constrain(x, sharding.BATCH, None, None, None))
    # ResNet v2 (before) normalizes the inputs of each convolution, and projects
    # the normalized input; v1 (after) normalizes the outputs.
    if self.activation == 'before':
      y = nn.relu(layers.norm(name='gn1')(x))
      x = project()(y) if changes else x
      y = nn.relu(layers.norm(name='gn2')(convs[0](y)))
      y = nn.relu(layers.norm(name='gn3')(convs[1](y)))
      return x + convs[2](y), None
    y = nn.relu(layers.norm(name='gn1')(convs[0](x)))
    y = nn.relu(layers.norm(name='gn2')(convs[1](y)))
    # With a scale of 0 the unit is initialized as the identity.
    zeros = nn.initializers.zeros_init()
    y = layers.norm(scale_init=zeros, name='gn3')(convs[2](y))
    x = layers.norm(name='gn_proj')(project()(x)) if changes else x
    return nn.relu(x + y), None


class Stage(nn.Module):
  """A stage of `depth` units; the first unit, `unit1`, may halve the map.

  The other units have equal shapes and are scanned: `layers/conv1/kernel` is
  `[depth - 1, 1, 1, 4 · channels, channels]`.

  Attributes:
    unit: class of the units; its arguments are the settings, a stride and the
      dtype.
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
    setting: second argument of every unit, after its inner channels.
    **others: other attributes of each `Stage`.
  """
  return [
    Stage(
      unit,
      (width * 2**i, setting),
      depth=depth,
      stride=min(i + 1, 2),
      name=f'block{i + 1}',
      **others,
    )
    for i, depth in enumerate(depths)
  ]


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
