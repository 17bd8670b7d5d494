"""Group normalisation (arXiv 1803.08494)."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

GROUPS = 32  # BiT's, and the paper's


class GroupNorm(nn.Module):
  """Normalisation over all places and one of 32 groups of channels each.

  Statistics are float32: of float32 inputs in two passes, of others in one, for
  the reason that `transformer.LayerNorm` gives. Sums are taken over places
  first, then over the few channels of a group, so that no map is reshaped.
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
    mean = checkpoint_name(_of_groups(wide), 'statistics')
    if x.dtype == jnp.float32:
      variance = _of_groups(jnp.square(wide - mean))
    else:
      variance = _of_groups(jnp.square(wide)) - jnp.square(mean)
    variance = checkpoint_name(jnp.maximum(variance, 0), 'statistics')
    factor = jax.lax.rsqrt(variance + self.epsilon)
    return ((wide - mean) * (factor * scale) + bias).astype(self.dtype)


def _of_groups(x: Float[Array, 'n y x c']) -> Float[Array, 'n 1 1 c']:
  """The mean over places and a group, said for each of its channels."""
  n, *_, channels = x.shape
  means = x.mean((1, 2)).reshape(n, GROUPS, -1).mean(-1, keepdims=True)
  spread = jnp.broadcast_to(means, (n, GROUPS, channels // GROUPS))
  return spread.reshape(n, 1, 1, channels)
