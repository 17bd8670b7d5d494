"""Attention along one axis of a map, in the place of a convolution.

Reference: "Axial-DeepLab" (arXiv 2003.07853), section 3.2, with GroupNorm in
place of BatchNorm as in the public code of the ViT paper's authors.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from vit_jax.arrays import sharding
from vit_jax.models.layers.group_norm import GroupNorm

EPSILON = 1e-4  # of all GroupNorms of an AxialResNet
SAVED = ('qkv', 'attended')
Maps = Float[Array, 'n y x c']


class AxialAttention(nn.Module):
  """Position-sensitive attention of each place to those of its row or column.

  The map keeps its shape; its channels are a multiple of 32 and of twice the
  heads. Queries and keys have half as many channels as values. Parameters:
  `qkv` `[c, heads, 2 c / heads]`, `relative` `[2 c / heads, 2 L − 1]` (of the
  offsets in a line of L places, shared by the heads), `gn_qkv`, `gn_out`; the
  norms' statistics are of a line each.
  """

  axis: str  # 'row' or 'column': what attends to each other
  num_heads: int
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x: Maps) -> Maps:
    if self.axis == 'column':
      x = x.swapaxes(1, 2)
    n, lines, length, channels = x.shape
    each = 2 * channels // self.num_heads
    init = nn.initializers.normal
    shape = (channels, self.num_heads, each)
    kernel = jnp.asarray(self.param('qkv', init(1 / channels), shape))
    shape = (each, 2 * length - 1)
    relative = jnp.asarray(self.param('relative', init(2 / each), shape))
    kernel = sharding.constrain(kernel.astype(self.dtype), None, None, None)
    relative = sharding.constrain(relative.astype(self.dtype), None, None)
    y = x.reshape(n * lines, length, 1, channels).astype(self.dtype)
    y = jnp.dot(y, kernel.reshape(channels, -1))  # [n · lines, L, 1, 2 c]
    y = GroupNorm(EPSILON, self.dtype, name='gn_qkv')(y)
    y = checkpoint_name(y, SAVED[0]).reshape(
      n * lines, length, *kernel.shape[1:]
    )
    y = _attend(y, relative[:, offsets(length)])
    y = checkpoint_name(y, SAVED[1]).reshape(n * lines, length, 1, channels)
    y = GroupNorm(EPSILON, self.dtype, name='gn_out')(y)
    y = y.reshape(x.shape)
    y = y.swapaxes(1, 2) if self.axis == 'column' else y
    return sharding.constrain(y, sharding.BATCH, None, None, None)


def offsets(length: int) -> Int[np.ndarray, 'q k']:
  """Columns of `relative`, L − 1 + place of the key − place of the query."""
  places = np.arange(length)
  return places[None, :] - places[:, None] + length - 1


@jax.checkpoint  # the weights are made again
def _attend(
  qkv: Float[Array, 'n t h _'], relative: Float[Array, '_ t t']
) -> Float[Array, 'n t h _']:
  """Equation 4: softmax(q·k + q·r_q + k·r_k) (v + r_v); r is of k's offset."""
  each = qkv.shape[-1]
  parts = each // 4, each // 2
  query, key, value = jnp.split(qkv, parts, axis=-1)
  of_query, of_key, of_value = jnp.split(relative, parts, axis=0)
  wide = dict(preferred_element_type=jnp.float32)
  logits = jnp.einsum('nqhc,nkhc->nhqk', query, key, **wide)
  logits += jnp.einsum('nqhc,cqk->nhqk', query, of_query, **wide)
  logits += jnp.einsum('nkhc,cqk->nhqk', key, of_key, **wide)
  weights = jax.nn.softmax(logits).astype(value.dtype)
  y = jnp.einsum('nhqk,nkhc->nqhc', weights, value, **wide)
  y += jnp.einsum('nhqk,cqk->nqhc', weights, of_value, **wide)
  return y.astype(value.dtype)
