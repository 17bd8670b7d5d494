"""Bottleneck units with axial attention in place of the 3x3 convolution."""

import functools

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.arrays import sharding
from vit_jax.models.layers import axial, residual
from vit_jax.models.layers.convolution import StdConv, by_deviation
from vit_jax.models.layers.group_norm import GroupNorm

Maps = Float[Array, 'n y x c']
Out = Float[Array, 'n r s o']
SAVED = (*residual.SAVED, *axial.SAVED)


class Unit(nn.Module):
  """1x1, attention along rows, then columns, pooling for a stride, and 1x1.

  Activation comes after the norms; the last norm's scale starts at 0.
  Parameters: `conv{1,3}/kernel`, `gn{1,3}/…`, `{row,column}/…` (see
  `layers.axial`), where the shape changes `conv_proj/kernel` and `gn_proj/…`.
  """

  channels: int
  num_heads: int
  stride: int
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x: Maps, _: None = None) -> tuple[Out, None]:
    outer = residual.EXPANSION * self.channels
    conv = functools.partial(
      StdConv, standardize=by_deviation, dtype=self.dtype
    )
    norm = functools.partial(GroupNorm, axial.EPSILON, self.dtype)
    x = sharding.constrain(x, sharding.BATCH, None, None, None)
    y = nn.relu(norm(name='gn1')(conv(self.channels, name='conv1')(x)))
    for axis in ('row', 'column'):
      attend = axial.AxialAttention(axis, self.num_heads, self.dtype, name=axis)
      y = attend(y)
    if self.stride > 1:
      strides = (self.stride, self.stride)
      y = nn.avg_pool(y, strides, strides, 'SAME')
    y = conv(outer, name='conv3')(nn.relu(y))
    zeros = nn.initializers.zeros_init()
    y = norm(scale_init=zeros, name='gn3')(y)
    if x.shape[-1] != outer or self.stride > 1:
      x = conv(outer, stride=self.stride, name='conv_proj')(x)
      x = norm(name='gn_proj')(x)
    return nn.relu(x + y), None
