"""Attention within windows, with relative position biases."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from vit_jax.arrays import sharding
from vit_jax.models.attention import multi_head, tpu
from vit_jax.models.layers.initializers import NORMAL
from vit_jax.models.layers.linear import Linear
from vit_jax.models.layers.sized_parameter import sized_parameter
from vit_jax.models.swin import relative
from vit_jax.models.swin.windows import Windows


class WindowAttention(nn.Module):
  """Multi-head attention of each token to the tokens of its window.

  Parameters: `{query,key,value,out}/{kernel,bias}` and `bias_table`
  `[(2W − 1)², heads]` for windows of W × W tokens; `relative.index` selects its
  rows.

  Reference: section 3.2, equations 3 and 4.

  Attributes:
    num_heads: number of attention heads.
    windows: windows of the block.
    dtype: dtype of the computation.
    implementation: one of `multi_head.IMPLEMENTATIONS`.
  """

  num_heads: int
  windows: Windows
  dtype: jnp.dtype
  implementation: str = 'auto'

  @nn.compact
  def __call__(self, x: Float[Array, 'n t d']) -> Float[Array, 'n t d']:
    width, side = x.shape[-1], self.windows.size
    heads = (self.num_heads, width // self.num_heads)
    x = self.windows.cut(x)  # [n, w, s, d]
    fused = takes_kernels(
      self.implementation, side**2, width, self.num_heads, self.dtype
    )
    dense = functools.partial(Linear, kernel_init=NORMAL, dtype=self.dtype)
    layers = [
      dense(heads, model_dim=-2, flat=fused, name=part)
      for part in ('query', 'key', 'value')
    ]
    shape = (2 * side - 1) ** 2, self.num_heads
    table = jnp.asarray(sized_parameter(self, 'bias_table', NORMAL, shape))
    bias = table[relative.index(side)].transpose(2, 0, 1)  # [h, s, s]
    mask = self.windows.mask()
    if fused:
      y = multi_head.attend_by_kernels(layers, x, self.num_heads, bias, mask)
    else:
      inputs = [checkpoint_name(layer(x), layer.name) for layer in layers]
      bias = bias[None]
      if mask is not None:
        bias = bias + mask[:, None]  # [w, h, s, s]
      y = checkpoint_name(_attend(*inputs, bias), multi_head.SAVED[3])
    y = dense((width,), inputs=heads, model_dim=-3, name='out')(y)
    return self.windows.join(y)


def takes_kernels(
  implementation: str,
  tokens: int,
  width: int,
  num_heads: int,
  dtype: jnp.dtype,
) -> bool:
  """Returns whether attention within windows is done by TPU kernels.

  Args:
    implementation: one of `multi_head.IMPLEMENTATIONS`; also with 'kernel',
      XLA is used for sizes that the kernels do not support.
    tokens: number of tokens of a window.
    width: channels of all heads together.
    num_heads: number of heads.
    dtype: dtype of queries, keys and values.
  """
  wanted = implementation == 'kernel' or (
    implementation == 'auto' and sharding.on_tpu()
  )
  applies = tpu.applies_with_offsets(tokens, width, num_heads, dtype)
  return wanted and applies


@jax.checkpoint  # the weights are the largest arrays; they are recomputed
def _attend(
  query: Float[Array, 'n w q h c'],
  key: Float[Array, 'n w k h c'],
  value: Float[Array, 'n w k h c'],
  bias: Float[Array, '#w h q k'],
) -> Float[Array, 'n w q h c']:
  """Computes softmax(q·k / √c + bias) v, with logits and softmax in float32."""
  query = query * jnp.asarray(query.shape[-1] ** -0.5, query.dtype)
  wide = dict(preferred_element_type=jnp.float32)
  logits = jnp.einsum('nwqhc,nwkhc->nwhqk', query, key, **wide)
  weights = jax.nn.softmax(logits + bias).astype(value.dtype)
  y = jnp.einsum('nwhqk,nwkhc->nwqhc', weights, value, **wide)
  return y.astype(value.dtype)
