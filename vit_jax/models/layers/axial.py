"""Attention along one axis of a map, used instead of a convolution.

Reference: "Axial-DeepLab" (arXiv 2003.07853), section 3.2, with GroupNorm
instead of BatchNorm as in the public code of the ViT paper's authors.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from vit_jax.arrays import sharding
from vit_jax.models.layers.group_norm import GroupNorm
from vit_jax.models.layers.sized_parameter import sized_parameter

EPSILON = 1e-4  # epsilon of all GroupNorms of an AxialResNet
SAVED = ('qkv', 'attended')  # arrays that `remat='dots'` keeps
Maps = Float[Array, 'n y x c']


class AxialAttention(nn.Module):
  """Position-sensitive attention within each row or each column of a map.

  The map keeps its shape; its number of channels is a multiple of 32 and of
  twice the number of heads. Queries and keys have half as many channels as
  values.

  Parameters: `qkv` `[c, heads, 2 c / heads]`, `relative`
  `[2 c / heads, 2 L − 1]` (one column per offset in a line of L positions,
  shared by the heads), `gn_qkv` and `gn_out`. The norms take their statistics
  over one line.

  Attributes:
    axis: 'row' or 'column', the lines within which positions attend.
    num_heads: number of attention heads.
    dtype: dtype of the computation.
  """

  axis: str
  num_heads: int
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x: Maps) -> Maps:
    # Columns become rows, so that axis 1 numbers the lines in both cases.
    if self.axis == 'column':
      x = x.swapaxes(1, 2)
    n, lines, length, channels = x.shape
    each = 2 * channels // self.num_heads
    init = nn.initializers.normal
    shape = (channels, self.num_heads, each)
    kernel = jnp.asarray(self.param('qkv', init(1 / channels), shape))
    shape = (each, 2 * length - 1)
    relative = jnp.asarray(
      sized_parameter(self, 'relative', init(2 / each), shape)
    )
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
  """Returns the column of `relative` for each pair of query and key.

  The column is L − 1 + position of the key − position of the query.

  Args:
    length: number of positions L of a line.
  """
  positions = np.arange(length)
  return positions[None, :] - positions[:, None] + length - 1


@jax.checkpoint  # the backward pass recomputes the weights
def _attend(
  qkv: Float[Array, 'n t h _'], relative: Float[Array, '_ t t']
) -> Float[Array, 'n t h _']:
  """Computes softmax(q·k + q·r_q + k·r_k) (v + r_v), equation 4.

  r_q, r_k and r_v are embeddings of the offset between query and key.
  """
  each = qkv.shape[-1]
  parts = each // 4, each // 2
  query, key, value = jnp.split(qkv, parts, axis=-1)
  relative_query, relative_key, relative_value = jnp.split(
    relative, parts, axis=0
  )
  wide = dict(preferred_element_type=jnp.float32)
  logits = jnp.einsum('nqhc,nkhc->nhqk', query, key, **wide)
  # Unlike in ViT, logits are not divided by √c: the GroupNorm of q, k and v
  # determines their scale.
  logits += jnp.einsum('nqhc,cqk->nhqk', query, relative_query, **wide)
  logits += jnp.einsum('nkhc,cqk->nhqk', key, relative_key, **wide)
  weights = jax.nn.softmax(logits).astype(value.dtype)
  y = jnp.einsum('nhqk,nkhc->nqhc', weights, value, **wide)
  y += jnp.einsum('nhqk,cqk->nqhc', weights, relative_value, **wide)
  return y.astype(value.dtype)
