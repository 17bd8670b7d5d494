"""Bottleneck units of ResNets, and stages of them.

Two official codes, which differ in more than the place of the activation:

| | before (BiT, arXiv 1912.11370) | after (the hybrids' stem) |
|---|---|---|
| GroupNorm's ε | 1e-5 | 1e-6 |
| standardised by | √(variance + 1e-10) | deviation + 1e-5 |
| padding | the same on all sides | SAME |
| starts as the identity | no | yes: gn3's scale is 0 |
"""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.arrays import sharding
from vit_jax.errors import check_range
from vit_jax.models.layers import convolution
from vit_jax.models.layers.convolution import StdConv
from vit_jax.models.layers.group_norm import GroupNorm

Maps = Float[Array, 'n y x c']
Results = Float[Array, 'n r s o']
EXPANSION = 4  # channels of a unit for each channel inside it
# The pair conv1, conv2 is split by channels inside; gn2's statistics are of
# groups that stay whole.
SHARDING_RULES = (
  (r'unit1/conv1/kernel', -1),
  (r'unit1/conv2/kernel', -2),
  (r'layers/conv1/kernel', -1),
  (r'layers/conv2/kernel', -2),
)
SAVED = ('convolution', 'statistics')
REMAT = ('none', 'full', 'dots')


class Code(NamedTuple):
  """What differs between the official codes, see above.

  Attributes:
    norm: GroupNorm with its ε.
    conv: a standardised convolution with its padding.
  """

  norm: Any
  conv: Any


def code(activation: str, dtype: jnp.dtype) -> Code:
  """The layers of one official code, 'before' or 'after'."""
  before = activation == 'before'
  padding = 'fixed' if before else 'same'
  standardize = convolution.by_variance if before else convolution.by_deviation
  return Code(
    functools.partial(GroupNorm, 1e-5 if before else 1e-6, dtype),
    functools.partial(
      StdConv, standardize=standardize, padding=padding, dtype=dtype
    ),
  )


class Unit(nn.Module):
  """One bottleneck: 1x1, 3x3 (which takes the stride) and 1x1; as a scan's.

  Parameters: `conv{1,2,3}/kernel`, `gn{1,2,3}/{scale,bias}`, where the shape
  changes `conv_proj/kernel` and, with activation after, `gn_proj/…`.

  Attributes:
    channels: inside; four times as many come out.
    activation: 'before' or 'after'.
    stride: of the unit.
    dtype: of computation.
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
    x = sharding.constrain(x, sharding.BATCH, None, None, None)
    if self.activation == 'before':
      y = nn.relu(layers.norm(name='gn1')(x))
      x = project()(y) if changes else x
      y = nn.relu(layers.norm(name='gn2')(convs[0](y)))
      y = nn.relu(layers.norm(name='gn3')(convs[1](y)))
      return x + convs[2](y), None
    y = nn.relu(layers.norm(name='gn1')(convs[0](x)))
    y = nn.relu(layers.norm(name='gn2')(convs[1](y)))
    zeros = nn.initializers.zeros_init()
    y = layers.norm(scale_init=zeros, name='gn3')(convs[2](y))
    x = layers.norm(name='gn_proj')(project()(x)) if changes else x
    return nn.relu(x + y), None


class Stage(nn.Module):
  """`depth` units; the first, `unit1`, may halve the map.

  The others are alike, and under one scan: `layers/conv1/kernel` is
  `[depth - 1, 1, 1, 4 · channels, channels]`.

  Attributes:
    unit: its class; built with the settings, a stride and the dtype.
    settings: of every unit.
    depth: number of units.
    stride: of the first unit.
    dtype: of computation.
    remat: of `REMAT`.
    unroll: units unrolled in each step of the scan.
    saved: names of what `remat='dots'` keeps.
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
    first = rest = self.unit
    if self.remat != 'none':
      policies = jax.checkpoint_policies
      policy = policies.nothing_saveable
      if self.remat == 'dots':
        policy = policies.save_only_these_names(*self.saved)
      first = nn.remat(self.unit, policy=policy)
      rest = nn.remat(self.unit, prevent_cse=False, policy=policy)
    x, _ = first(*self.settings, self.stride, self.dtype, name='unit1')(x)
    if self.depth == 1:
      return x
    scanned = nn.scan(
      rest,
      variable_axes={'params': 0},
      split_rngs={'params': True},
      length=self.depth - 1,
      unroll=min(self.unroll, self.depth - 1),
    )
    return scanned(*self.settings, 1, self.dtype, name='layers')(x, None)[0]


def stages(
  depths: tuple[int, ...], width: int, *, activation: str, **others: Any
) -> dict[str, Stage]:
  """Stages by name: each but the first halves the map and doubles the width.

  Args:
    depths: units in each.
    width: channels inside the first stage's units.
    activation: 'before' or 'after'.
    **others: dtype, remat and unroll of `Stage`.

  Returns:
    `{'block1': …}`, for attributes of a module's `setup`.
  """
  return {
    f'block{i + 1}': Stage(
      Unit,
      (width * 2**i, activation),
      depth=depth,
      stride=min(i + 1, 2),
      **others,
    )
    for i, depth in enumerate(depths)
  }


def check_depths(key: str, depths: tuple[int, ...], *, at_least: int) -> None:
  """Raises UserError unless each of some stages has units.

  Args:
    key: as the user writes it.
    depths: units in each stage.
    at_least: stages.
  """
  check_range(f'the number of {key}', len(depths), at_least=at_least, at_most=8)
  for i, depth in enumerate(depths):
    check_range(f'{key}[{i}]', depth, at_least=1)
