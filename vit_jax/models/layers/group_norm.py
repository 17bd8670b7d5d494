"""Group normalization (arXiv 1803.08494)."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

GROUPS = 32  # as in BiT and in the paper on GroupNorm


class GroupNorm(nn.Module):
  """Normalization of each of 32 groups of channels, over all positions.

  Statistics are float32, computed in two passes for float32 inputs and in one
  pass for others; see `norm.LayerNorm` for the reason. Sums are taken over
  positions first and then over the few channels of a group, so that no map is
  reshaped.

  Attributes:
    epsilon: value added to the variance.
    dtype: dtype of the result.
    scale_init: initializer of the scale.
  """

  epsilon: float
  dtype: jnp.dtype
  scale_init: Callable[..., Array] = nn.initializers.ones_init()

  @nn.compact
  def __call__(self, x: Float[Array, 'n y x c']) -> Float[Array, 'n y x c']:
    size = (x.shape[-1],)
    scale = self.param('scale', self.scale_init, size)
    bias = self.param('bias', nn.initializers.zeros_init(), size)
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
