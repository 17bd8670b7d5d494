"""Stem of the hybrids: root and first stages of a ResNet (section 3.1).

The paper does not specify the details. As in the official code, the activation
follows each unit, and there are GroupNorm, weight standardization and SAME
padding.
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.errors import check_range
from vit_jax.models.layers import residual
from vit_jax.models.layers.convolution import max_pool

_WIDTH = 64  # inner channels of the units of the first stage at width factor 1
_MAX_WIDTH_FACTOR = 1024


def stride_of(depths: Sequence[int]) -> int:
  """Returns the number of pixels per position of the map.

  Root and first stage have a stride of 4; each further stage doubles it.

  Args:
    depths: number of units in each stage.
  """
  return 4 * 2 ** max(len(depths) - 1, 0)


class ResNetStem(nn.Module):
  """A stem that computes maps of images; satisfies `models.contract.Stem`.

  Parameters: `conv_root/kernel`, `gn_root/{scale,bias}`, and `block{1…}` as in
  `residual.Stage`.

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

  sharding_rules = residual.SHARDING_RULES

  def setup(self):
    layers = residual.code('after', self.dtype)
    width = _WIDTH * self.width_factor
    self.conv_root = layers.conv(width, size=7, stride=2)
    self.gn_root = layers.norm()
    self.stages = residual.stages(
      self.depths,
      width,
      residual.Unit,
      'after',
      dtype=self.dtype,
      remat=self.remat,
      unroll=self.unroll,
    )

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

  @property
  def reference(self) -> 'ResNetStem':
    """The same stem without rematerialization or unrolling."""
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
  residual.check_depths('model.stem.depths', depths, at_least=0)
  key = 'model.stem.width_factor'
  check_range(key, width_factor, at_least=1, at_most=_MAX_WIDTH_FACTOR)
  return ResNetStem(tuple(depths), width_factor, dtype, remat, unroll)
