"""Attention pooling: one feature vector from many tokens."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.models.attention.multi_head import Attention
from vit_jax.models.layers import initializers
from vit_jax.models.layers.mlp import Mlp
from vit_jax.models.layers.norm import LayerNorm


class MapHead(nn.Module):
  """Multi-head attention of a learned query to all tokens, then an MLP.

  Reference: "Scaling Vision Transformers" (arXiv 2106.04560), section 3.2.

  Attributes:
    config: `vit.Config` of the model.
  """

  config: Any

  @nn.compact
  def __call__(self, x: Float[Array, 'n t d']) -> Float[Array, 'n d']:
    config, dtype, (n, _, d) = self.config, self.config.compute_dtype, x.shape
    # MAE has no attention pooling, so 'mae' is the same as 'authors' here.
    start = config.start_values
    start = 'authors' if start == 'mae' else start
    init = initializers.matrix(start)
    probe = self.param('probe', init, (1, 1, d))
    probe = jnp.broadcast_to(probe.astype(dtype), (n, 1, d))
    attention = Attention(
      config.num_heads, dtype, start_values=start, name='attention'
    )
    pooled, _ = attention(probe, x)
    y = LayerNorm(dtype, config.norm_eps, name='norm')(pooled)
    mlp = Mlp(
      config.mlp_dim,
      0.0,
      config.gelu,
      dtype,
      init,
      initializers.mlp_bias(start),
      name='mlp',
    )
    return (pooled + mlp(y, None))[:, 0]
