"""Convolutions with weight standardization, and the max-pooling of ResNets.

Reference: "Micro-Batch Training with Batch-Channel Normalization and Weight
Standardization" (arXiv 1903.10520), section 2.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from vit_jax.arrays import sharding

Kernel = Float[Array, 'h w i o']
Padding = str | tuple[tuple[int, int], tuple[int, int]]


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
  dtype: jnp.dtype = jnp.float32

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
