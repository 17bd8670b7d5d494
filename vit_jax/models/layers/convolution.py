"""Convolutions whose weights are standardised, and the ResNet's max-pooling.

Reference: "Micro-Batch Training with Batch-Channel Normalization and Weight
Standardization" (arXiv 1903.10520), section 2.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from vit_jax.arrays import sharding

Kernel = Float[Array, 'h w i o']
Padding = str | tuple[tuple[int, int], tuple[int, int]]
PADDINGS = ('same', 'fixed')


def by_deviation(kernel: Kernel) -> Kernel:
  """(w − mean) / (deviation + 1e-5) of each output: the hybrids' code."""
  centred = kernel - kernel.mean((0, 1, 2), keepdims=True)
  return centred / (_deviation(centred, 0.0) + 1e-5)


def by_variance(kernel: Kernel) -> Kernel:
  """(w − mean) / √(variance + 1e-10) of each output: BiT's code."""
  centred = kernel - kernel.mean((0, 1, 2), keepdims=True)
  return centred / _deviation(centred, 1e-10)


def _deviation(centred: Kernel, epsilon: float) -> Float[Array, '1 1 1 o']:
  """√(mean square + ε); where that is 0 its gradient is 0, not infinite."""
  variance = jnp.square(centred).mean((0, 1, 2), keepdims=True) + epsilon
  positive = variance > 0
  return jnp.where(positive, jnp.sqrt(jnp.where(positive, variance, 1)), 0)


class StdConv(nn.Module):
  """A convolution without bias; its kernel is standardised in float32.

  Kernel `[size, size, in, features]`, LeCun normal as in the official code. It
  is gathered over `fsdp` at its use; `model_dim` of it (negative) stays split
  over the mesh's `model` axis.
  """

  features: int
  standardize: Callable[[Kernel], Kernel]
  size: int = 1
  stride: int = 1
  padding: str = 'same'  # see `pads`
  model_dim: int | None = None
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x: Float[Array, 'n y x i']) -> Float[Array, 'n r c o']:
    shape = (self.size, self.size, x.shape[-1], self.features)
    kernel = self.param('kernel', nn.initializers.lecun_normal(), shape)
    spec: list[str | None] = [None] * 4
    if self.model_dim is not None:
      spec[self.model_dim] = 'model'
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
  """What is added around a map.

  Args:
    size: side of the kernel.
    padding: 'same', as little as needed for ⌈side / stride⌉ results, more of it
      below and to the right (the hybrids' code); or 'fixed', the same on all
      sides, whatever the stride (BiT's code).
  """
  if padding == 'same':
    return 'SAME'
  before = (size - 1) // 2
  sides = before, size - 1 - before
  return sides, sides


def max_pool(
  x: Float[Array, 'n y x c'], padding: str
) -> Float[Array, 'n r s c']:
  """The maximum over 3x3 places at stride 2.

  Args:
    x: activations, of any sign.
    padding: see `pads`. What 'fixed' adds are zeros, and a maximum may be one
      of them: BiT's code has it so, and pools before any rectifier.
  """
  if padding == 'fixed':
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
  around = 'VALID' if padding == 'fixed' else 'SAME'
  return nn.max_pool(x, (3, 3), (2, 2), around)
