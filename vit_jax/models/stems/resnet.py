"""The hybrids' stem: a ResNet's root and first stages (section 3.1).

As the official code has it, not the paper's text alone: activation after each
unit, GroupNorm, standardised convolutions, SAME padding.
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.errors import check_range
from vit_jax.models.layers import residual
from vit_jax.models.layers.convolution import max_pool

_WIDTH = 64  # channels inside the first stage's units at width factor 1
_MAX_WIDTH_FACTOR = 1024


def stride_of(depths: Sequence[int]) -> int:
  """Pixels for one place of the map: 4 after the root and the first stage."""
  return 4 * 2 ** max(len(depths) - 1, 0)


class ResNetStem(nn.Module):
  """Images to maps; keeps `models.contract.Stem`.

  Parameters: `conv_root/kernel`, `gn_root/{scale,bias}`, and `block{1…}` as in
  `residual.Stage`.
  """

  depths: tuple[int, ...]
  width_factor: int
  dtype: jnp.dtype
  remat: str
  unroll: int

  sharding_rules = residual.SHARDING_RULES

  def setup(self):
    layers = residual.code('after', self.dtype)
    width = _WIDTH * self.width_factor
    self.conv_root = layers.conv(width, size=7, stride=2)
    self.gn_root = layers.norm()
    stages = residual.stages(
      self.depths,
      width,
      activation='after',
      dtype=self.dtype,
      remat=self.remat,
      unroll=self.unroll,
    )
    for name, stage in stages.items():
      setattr(self, name, stage)

  def __call__(
    self, images: Float[Array, 'n y x 3']
  ) -> Float[Array, 'n r s c']:
    x = nn.relu(self.gn_root(self.conv_root(images)))
    x = max_pool(x, 'same')
    for i in range(len(self.depths)):
      x = getattr(self, f'block{i + 1}')(x)
    return x

  @property
  def stride(self) -> int:
    """Pixels for one place of the map."""
    return stride_of(self.depths)

  @property
  def section(self) -> dict[str, Any]:
    """The config section that it is built from."""
    sizes = dict(depths=self.depths, width_factor=self.width_factor)
    return {'name': 'resnet'} | sizes

  @property
  def reference(self) -> 'ResNetStem':
    """Without rematerialisation or unrolling."""
    return self.clone(remat='none', unroll=1)


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
    dtype: of computation.
    remat: the model's: 'none', 'full' or 'dots' (all but convolutions).
    unroll: the model's, of units.
    depths: units in each stage; none at all for the root alone (R+Ti/16).
    width_factor: of all channels.

  Raises:
    UserError: a number outside its range.
  """
  residual.check_depths('model.stem.depths', depths, at_least=0)
  check_range(
    'model.stem.width_factor',
    width_factor,
    at_least=1,
    at_most=_MAX_WIDTH_FACTOR,
  )
  return ResNetStem(tuple(depths), width_factor, dtype, remat, unroll)
