"""Attention on NVIDIA GPUs by cuDNN, which does not store the weights.

XLA writes logits and weights `[n, h, q, k]` to memory and reads them several
times. cuDNN computes the logits, the softmax and the product with the values in
one kernel, and all gradients in another (`jax.nn.dot_product_attention`). For
the windows of a Swin Transformer, it adds biases and computes their gradients.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from vit_jax.arrays import sharding
from vit_jax.models.attention.tpu import SAVED

_MULTIPLE = 8  # divisor of the number of channels of a head
_MAX_CHANNELS = 128  # maximum number of channels of a head; 256 on some GPUs
_MASKED = -1e9  # bias of keys that are padding
# Description of `fits`, for messages.
LIMITS = f'heads of a multiple of 8 up to {_MAX_CHANNELS} channels in bfloat16'


def fits(channels: int, dtype: jnp.dtype) -> bool:
  """Returns whether `attend` supports heads of this size in this dtype."""
  supported = channels % _MULTIPLE == 0 and channels <= _MAX_CHANNELS
  return supported and dtype == jnp.bfloat16


def attend(
  query: Float[Array, 'n q *w h c'],
  key: Float[Array, 'n k *w h c'],
  value: Float[Array, 'n k *w h c'],
  tokens: int | None = None,
  bias: Float[Array, '#w h s s'] | None = None,
) -> Float[Array, 'n q *w h c']:
  """Computes softmax(q·k / √c + bias) v.

  cuDNN's backward pass does not support an odd number of tokens, such as the
  197 tokens of a ViT. An odd number is therefore padded by one token, which is
  masked by passing the sequence lengths, or by the bias.

  On other devices than GPUs, XLA computes the same function of the padded
  arrays, for tests.

  Args:
    query: queries of all heads; with a bias, of all heads of all windows.
    key: keys of all heads.
    value: values of all heads.
    tokens: number of queries, and of keys, that are not padding; None if the
      arrays contain no padding. Outputs of padding are zero.
    bias: added to the logits of each head of a window; None without windows.
      It is rounded to the dtype of the queries, and so is its gradient. Tokens
      after those of the bias are padding, which is masked.

  Returns:
    Output for each query, in the dtype of the queries.

  Reference: equations 5 to 7 of appendix A.
  """
  arrays = [*map(checkpoint_name, (query, key, value), SAVED[:3])]
  lengths = [tokens or x.shape[1] for x in arrays[:2]]
  arrays = [even(x) for x in arrays]
  is_padded = bias is None and any(
    length < x.shape[1] for length, x in zip(lengths, arrays[:2], strict=True)
  )
  if bias is not None:
    more = (0, arrays[0].shape[1] - bias.shape[-1])
    bias = jnp.pad(bias, ((0, 0), (0, 0), more, more), constant_values=_MASKED)
    bias = jnp.broadcast_to(bias, (query.shape[2], *bias.shape[1:]))
    # [1, queries, windows, heads, keys], so that queries, windows and heads are
    # the same axes as those of the other arrays
    arrays.append(bias.transpose(2, 0, 1, 3)[None].astype(query.dtype))

  def local(*arrays: Array) -> Array:
    # Examples share the bias, but windows do not: each head of a window is a
    # head of cuDNN.
    query, key, value, *bias = (
      x.reshape(*x.shape[:2], -1, x.shape[-1]) for x in arrays
    )
    queries, keys = (
      jnp.full(query.shape[:1], length, jnp.int32) for length in lengths
    )
    y = jax.nn.dot_product_attention(
      query,
      key,
      value,
      bias=bias[0].swapaxes(1, 2) if bias else None,
      query_seq_lengths=queries if is_padded else None,
      key_value_seq_lengths=keys if is_padded else None,
      implementation='cudnn' if sharding.on_gpu() else 'xla',
    )
    return y.reshape(arrays[0].shape)

  # Each device calls the library with its own examples and heads: cuDNN's call
  # cannot be partitioned over heads.
  axes = [None] * (query.ndim - 3)  # queries and windows
  y = sharding.per_device(local, arrays, sharding.BATCH, *axes, 'model', None)
  return y[:, : query.shape[1]]


def even(x: Float[Array, 'n t *d']) -> Float[Array, 'n s *d']:
  """Pads the tokens to an even number."""
  more = [(0, 0)] * x.ndim
  more[1] = (0, x.shape[1] % 2)
  return jnp.pad(x, more)
