"""Attention pooling: many tokens to one feature."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.models.attention.multi_head import Attention
from vit_jax.models.layers import transformer
from vit_jax.models.layers.norm import EPSILON, LayerNorm


class MapHead(nn.Module):
  """Multi-head attention pooling: a learned probe asks, an MLP refines.

  Reference: "Scaling Vision Transformers" (arXiv 2106.04560), section 3.2.
  """

  num_heads: int
  mlp_dim: int
  gelu: str
  dtype: jnp.dtype
  epsilon: float = EPSILON

  @nn.compact
  def __call__(self, x: Float[Array, 'n t d']) -> Float[Array, 'n d']:
    n, _, d = x.shape
    probe = self.param('probe', nn.initializers.xavier_uniform(), (1, 1, d))
    probe = jnp.broadcast_to(probe.astype(self.dtype), (n, 1, d))
    attention = Attention(self.num_heads, self.dtype, name='attention')
    pooled, _ = attention(probe, x)
    y = LayerNorm(self.dtype, self.epsilon, name='norm')(pooled)
    mlp = transformer.Mlp(self.mlp_dim, 0.0, self.gelu, self.dtype, name='mlp')
    return (pooled + mlp(y, None))[:, 0]
