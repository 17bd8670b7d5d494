"""The attention kernels for one example and one group of heads.

Scores are transposed, `[keys, queries]`: the softmax then reduces over
sublanes, which is cheap, and the gradients of keys and values are products
without a transposition. The heads of a group are stacked along the rows of one
operand, with the channels of the other heads set to zero, so that they share
the other operand in the matrix unit. A single head of 64 channels would in any
case fill only half of the 128 rows of the matrix unit.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

LANES = 128  # lanes of a vector register, and side of a matrix unit
_MASKED = -1e30  # score of a row of padding

Block = Float[Array, 'rows lanes']
Ref = Any


def forward(
  query: Ref,
  key: Ref,
  value: Ref,
  bias: Ref,
  y: Ref,
  *,
  heads: int,
  tokens: int,
  operand: jnp.dtype,
) -> None:
  """Computes the output for a group of heads of one example.

  Args:
    query: queries without bias, `[rows, lanes]`.
    key: keys without bias.
    value: values without bias.
    bias: biases of queries, keys and values, `[3, lanes]`.
    y: output.
    heads: number of heads that share the lanes.
    tokens: number of tokens; further rows are padding.
    operand: dtype of the operands of products.
  """
  q, k, v = _load(query, key, value, bias, heads, tokens, operand)
  outputs = []
  # Dividing the result by the sum of the exponentials is cheaper than dividing
  # the weights, of which there are more.
  for scores, values in zip(
    _per_head(k, q, heads), jnp.split(v.T, heads), strict=True
  ):
    weights, total = _soft_max(scores, tokens)
    outputs.append(_dot(values, weights.astype(operand), 1, 0) / total)
  y[:] = jnp.concatenate(outputs).T.astype(y.dtype)


def backward(
  query: Ref,
  key: Ref,
  value: Ref,
  dy: Ref,
  bias: Ref,
  d_query: Ref,
  d_key: Ref,
  d_value: Ref,
  d_bias: Ref,
  *,
  heads: int,
  tokens: int,
  operand: jnp.dtype,
) -> None:
  """Computes the gradients for a group of heads of one example.

  Args:
    query: queries without bias, `[rows, lanes]`.
    key: keys without bias.
    value: values without bias.
    dy: gradient of the output.
    bias: biases of queries, keys and values, `[3, lanes]`.
    d_query: gradient of the queries, an output.
    d_key: gradient of the keys, an output.
    d_value: gradient of the values, an output.
    d_bias: gradients of the biases, an output, `[3, lanes]`.
    heads: number of heads that share the lanes.
    tokens: number of tokens; further rows are padding.
    operand: dtype of the operands of products.
  """
  q, k, v = _load(query, key, value, bias, heads, tokens, operand)
  d_out = _tokens_only(dy[:], tokens).astype(operand)
  weights, d_scores, d_queries = [], [], []
  for scores, d_weight, keys in zip(
    _per_head(k, q, heads),
    _per_head(v, d_out, heads),
    jnp.split(k.T, heads),
    strict=True,
  ):
    weight, total = _soft_max(scores, tokens)
    weight /= total
    # In the gradient of softmax, the weighted mean over keys is subtracted.
    mean = (weight * d_weight).sum(axis=0, keepdims=True)
    d_score = (weight * (d_weight - mean)).astype(operand)
    weights.append(weight.astype(operand))
    d_scores.append(d_score)
    d_queries.append(_dot(keys, d_score, 1, 0))
  gradients = (
    jnp.concatenate(d_queries).T * _scale(heads),
    _side_by_side(d_scores, q),
    _side_by_side(weights, d_out),
  )
  # The sums over tokens are the gradients of the biases.
  refs = (d_query, d_key, d_value)
  for i, (ref, gradient) in enumerate(zip(refs, gradients, strict=True)):
    ref[:] = gradient.astype(ref.dtype)
    d_bias[i : i + 1] = gradient.sum(axis=0, keepdims=True)


def _scale(heads: int) -> float:
  """Returns the factor 1/√c of the scores, for `heads` heads in 128 lanes."""
  return (LANES // heads) ** -0.5


def _load(
  query: Ref,
  key: Ref,
  value: Ref,
  bias: Ref,
  heads: int,
  tokens: int,
  operand: jnp.dtype,
) -> list[Block]:
  """Loads scaled queries, keys and values, with their biases added."""
  refs, scales = (query, key, value), (_scale(heads), 1.0, 1.0)
  blocks = [ref[:].astype(jnp.float32) + bias[i] for i, ref in enumerate(refs)]
  return [
    _tokens_only(x * scale, tokens).astype(operand)
    for x, scale in zip(blocks, scales, strict=True)
  ]


def _tokens_only(x: Block, tokens: int) -> Block:
  """Sets the rows of padding to 0, because their memory is not initialized."""
  return jnp.where(_row(x) < tokens, x, 0)


def _row(x: Block) -> Int[Array, 'rows 1']:
  return jax.lax.broadcasted_iota(jnp.int32, (x.shape[0], 1), 0)


def _per_head(
  a: Block, b: Block, heads: int
) -> list[Float[Array, 'rows rows']]:
  """Computes a bᵀ for every head."""
  stacked = jnp.concatenate([_only(a, i, heads) for i in range(heads)])
  return jnp.split(_dot(stacked, b, 1, 1), heads)


def _side_by_side(weights: list[Float[Array, 'rows rows']], x: Block) -> Block:
  """Computes weights · x for every head, with the heads side by side."""
  heads = len(weights)
  y, *others = jnp.split(_dot(jnp.concatenate(weights), x, 1, 0), heads)
  for i, other in enumerate(others, start=1):
    y = jnp.where(_owner(heads) == i, other, y)
  return y


def _only(x: Block, i: int, heads: int) -> Block:
  """Sets the channels of all heads except head `i` to 0."""
  return jnp.where(_owner(heads) == i, x, 0)


def _owner(heads: int) -> Int[Array, '1 lanes']:
  """Returns the index of the head of each channel."""
  lane = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
  return lane // (LANES // heads)


def _soft_max(
  scores: Float[Array, 'keys queries'], tokens: int
) -> tuple[Float[Array, 'keys queries'], Float[Array, '1 queries']]:
  """Computes exponentials of the scores, and their sum for each query."""
  scores = jnp.where(_row(scores) < tokens, scores, _MASKED)
  weights = jnp.exp(scores - scores.max(axis=0, keepdims=True))
  return weights, weights.sum(axis=0, keepdims=True)


def _dot(a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
  """Computes a product over one axis of each operand, in float32."""
  axes = (((a_axis,), (b_axis,)), ((), ()))
  return jax.lax.dot_general(a, b, axes, preferred_element_type=jnp.float32)
