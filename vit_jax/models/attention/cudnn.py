"""Attention on NVIDIA GPUs by cuDNN, which does not store the weights.

XLA writes logits and weights `[n, h, q, k]` to memory and reads them several
times. cuDNN computes the logits, the softmax and the product with the values in
one kernel, and all gradients in another (`jax.nn.dot_product_attention`).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.arrays import sharding

_MULTIPLE = 8  # divisor of the number of channels of a head
_MAX_CHANNELS = 128  # maximum number of channels of a head; 256 on some GPUs
# Description of `fits`, for messages.
LIMITS = f'heads of a multiple of 8 up to {_MAX_CHANNELS} channels in bfloat16'


def fits(channels: int, dtype: jnp.dtype) -> bool:
  """Returns whether `attend` supports heads of this size in this dtype."""
  supported = channels % _MULTIPLE == 0 and channels <= _MAX_CHANNELS
  return supported and dtype in (jnp.bfloat16, jnp.float16)


def attend(
  query: Float[Array, 'n q h c'],
  key: Float[Array, 'n k h c'],
  value: Float[Array, 'n k h c'],
  tokens: int | None = None,
) -> Float[Array, 'n q h c']:
  """Computes softmax(q·k / √c) v.

  cuDNN's backward pass does not support an odd number of tokens, such as the
  197 tokens of a ViT. An odd number is therefore padded by one token, which is
  masked by passing the sequence lengths.

  On other devices than GPUs, XLA computes the same function of the padded
  arrays, for tests.

  Args:
    query: queries of all heads.
    key: keys of all heads.
    value: values of all heads.
    tokens: number of queries, and of keys, that are not padding; None if the
      arrays contain no padding. Outputs of padding are zero.

  Returns:
    Output for each query, in the dtype of the queries.

  Reference: equations 5 to 7 of appendix A.
  """
  lengths = [tokens or x.shape[1] for x in (query, key)]
  arrays = [_even(x) for x in (query, key, value)]
  is_padded = any(
    length < x.shape[1] for length, x in zip(lengths, arrays[:2], strict=True)
  )

  def local(query: Array, key: Array, value: Array) -> Array:
    queries, keys = (
      jnp.full(query.shape[:1], length, jnp.int32) for length in lengths
    )
    return jax.nn.dot_product_attention(
      query,
      key,
      value,
      query_seq_lengths=queries if is_padded else None,
      key_value_seq_lengths=keys if is_padded else None,
      implementation='cudnn' if sharding.on_gpu() else 'xla',
    )

  # Each device calls the library with its own examples and heads: cuDNN's call
  # cannot be partitioned over heads.
  y = sharding.per_device(local, arrays, sharding.BATCH, None, 'model', None)
  return y[:, : query.shape[1]]


def _even(x: Float[Array, 'n t h c']) -> Float[Array, 'n s h c']:
  """Pads the tokens to an even number."""
  return jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0)))
