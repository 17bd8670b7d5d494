"""The bodies of the attention kernels: one example, one group of heads.

Scores are kept transposed, `[keys, queries]`: the soft-max then reduces over
sublanes, which is cheap, and the gradients of keys and values are plain
products. The heads of a group are stacked on the rows of one operand, each with
the other's channels zeroed, so that they share what is latched in the matrix
unit; a head of 64 channels fills half of its 128 rows either way.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

LANES = 128  # of a vector register, and sides of a matrix unit
_HIDDEN = -1e30  # the logit of a row that only fills a register

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
  """A group of heads of one example."""
  q, k, v = _load(query, key, value, bias, heads, tokens, operand)
  outputs = []
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
  """The gradients of a group of heads of one example."""
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
  refs = (d_query, d_key, d_value)
  for i, (ref, gradient) in enumerate(zip(refs, gradients, strict=True)):
    ref[:] = gradient.astype(ref.dtype)
    d_bias[i : i + 1] = gradient.sum(axis=0, keepdims=True)


def _scale(heads: int) -> float:
  """The factor 1/√c of the scores; `heads` of them share 128 channels."""
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
  """Scaled queries, keys and values, biases added."""
  refs, scales = (query, key, value), (_scale(heads), 1.0, 1.0)
  blocks = [ref[:].astype(jnp.float32) + bias[i] for i, ref in enumerate(refs)]
  return [
    _tokens_only(x * scale, tokens).astype(operand)
    for x, scale in zip(blocks, scales, strict=True)
  ]


def _tokens_only(x: Block, tokens: int) -> Block:
  """Zeroes the rows after the last token: that memory is not initialised."""
  return jnp.where(_row(x) < tokens, x, 0)


def _row(x: Block) -> Int[Array, 'rows 1']:
  return jax.lax.broadcasted_iota(jnp.int32, (x.shape[0], 1), 0)


def _per_head(
  a: Block, b: Block, heads: int
) -> list[Float[Array, 'rows rows']]:
  """a bᵀ of every head."""
  stacked = jnp.concatenate([_only(a, i, heads) for i in range(heads)])
  return jnp.split(_dot(stacked, b, 1, 1), heads)


def _side_by_side(weights: list[Float[Array, 'rows rows']], x: Block) -> Block:
  """weights · x of every head."""
  heads = len(weights)
  y, *others = jnp.split(_dot(jnp.concatenate(weights), x, 1, 0), heads)
  for i, other in enumerate(others, start=1):
    y = jnp.where(_owner(heads) == i, other, y)
  return y


def _only(x: Block, i: int, heads: int) -> Block:
  """Zeroes the channels of all heads but one."""
  return jnp.where(_owner(heads) == i, x, 0)


def _owner(heads: int) -> Int[Array, '1 lanes']:
  """The head of each channel."""
  lane = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
  return lane // (LANES // heads)


def _soft_max(
  scores: Float[Array, 'keys queries'], tokens: int
) -> tuple[Float[Array, 'keys queries'], Float[Array, '1 queries']]:
  """Exponentials of the scores of keys, and their sum for each query."""
  scores = jnp.where(_row(scores) < tokens, scores, _HIDDEN)
  weights = jnp.exp(scores - scores.max(axis=0, keepdims=True))
  return weights, weights.sum(axis=0, keepdims=True)


def _dot(a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
  """A product that sums over an axis of each, accumulated in float32."""
  axes = (((a_axis,), (b_axis,)), ((), ()))
  return jax.lax.dot_general(a, b, axes, preferred_element_type=jnp.float32)
