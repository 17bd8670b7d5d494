"""The attention kernels for one example and the heads in a range of lanes.

Scores are transposed, `[keys, queries]`: the softmax then reduces over
sublanes, which is cheap, and the gradients of keys and values are products
without a transposition. Heads that share 128 lanes (two of 64 channels) are
stacked along the rows of one operand, with the channels of the other heads set
to zero, so that they share the other operand in the matrix unit. A single head
of 64 channels would in any case fill only half of the 128 rows of the matrix
unit.

If the scores of all queries do not fit into the memory of the core, a loop
computes a tile of queries at a time, with all keys.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

LANES = 128  # lanes of a vector register, and side of a matrix unit
SUBLANES = 8
_MASKED = -1e30  # score of a row of padding

Block = Float[Array, 'rows lanes']
Ref = Any
# An operand: the lanes of all heads of a block, or the two registers of lanes
# that contain the only head of the part.
Refs = Sequence[Ref]
Rows = Any  # slice, or `pl.ds` with an index of a loop


class Part(NamedTuple):
  """The heads that a kernel computes together, and their tokens.

  Attributes:
    lanes: lanes of the heads.
    heads: number of heads, side by side in these lanes.
    tokens: number of tokens; further rows are padding.
    tile: number of queries per iteration of the loop; divides the rows.
    operand: dtype of the operands of products.
  """

  lanes: slice
  heads: int
  tokens: int
  tile: int
  operand: jnp.dtype

  @property
  def width(self) -> int:
    """Channels of all heads."""
    return self.lanes.stop - self.lanes.start

  @property
  def keys(self) -> slice:
    """Rows of the keys, which are whole registers."""
    return slice(0, padded(self.tokens, SUBLANES))

  @property
  def scale(self) -> float:
    """Factor 1/√c of the scores."""
    return (self.width // self.heads) ** -0.5

  def load(
    self, refs: Refs, rows: Rows, bias: Any = 0.0, scale: float = 1.0
  ) -> Block:
    """Loads an operand with a bias added, and with zeros in rows of padding."""
    x = (self._lanes(refs, rows).astype(jnp.float32) + bias) * scale
    # The memory of rows of padding is not initialized.
    valid = rows.start + _row(x) < self.tokens
    return jnp.where(valid, x, 0).astype(self.operand)

  def _lanes(self, refs: Refs, rows: Rows) -> Block:
    """Loads the lanes of the heads."""
    if len(refs) == 1:
      return refs[0][rows, self.lanes]
    start = self.lanes.start % LANES
    both = jnp.concatenate([ref[rows, :] for ref in refs], axis=1)
    return both[:, start : start + self.width]

  def load_all(self, key: Refs, value: Refs, bias: Ref) -> tuple[Block, Block]:
    """Loads all keys and values, with their biases added."""
    return (
      self.load(key, self.keys, bias[1, self.lanes]),
      self.load(value, self.keys, bias[2, self.lanes]),
    )


class Offsets(NamedTuple):
  """Offsets that are added to the scores of an example.

  The queries of each head are padded to whole registers of 128 lanes. All
  queries must be in one tile.

  Attributes:
    relative: offsets of each head, with the heads side by side, `[keys, heads
      of the block · lanes of the queries]`.
    mask: offsets of all heads, `[keys, lanes of the queries]`, or None.
    d_relative: float32 sum of the gradient of `relative`, or None.
  """

  relative: Ref
  mask: Ref | None = None
  d_relative: Ref | None = None

  def add_to(
    self, scores: Float[Array, 'keys queries'], part: Part, head: int
  ) -> Float[Array, 'keys queries']:
    """Returns the scores of a head of the part with the offsets added."""
    scores += self.relative[:, self._lanes(part, head)]
    if self.mask is not None:
      scores += self.mask[:, : part.tile].astype(jnp.float32)
    return scores

  def add_gradient(
    self, d_score: Float[Array, 'keys queries'], part: Part, head: int
  ) -> None:
    """Adds the gradient of the scores of a head to `d_relative`."""
    assert self.d_relative is not None
    self.d_relative[:, self._lanes(part, head)] += d_score

  def _lanes(self, part: Part, head: int) -> slice:
    """Returns the lanes of the queries of a head of the part."""
    # Index of the head in the block, after those of earlier parts.
    head += part.lanes.start * part.heads // part.width
    start = head * padded(part.tile, LANES)
    return slice(start, start + part.tile)


def forward(
  query: Refs,
  key: Refs,
  value: Refs,
  bias: Ref,
  y: Ref,
  part: Part,
  offsets: Offsets | None = None,
) -> None:
  """Computes the output of the heads of a part.

  Args:
    query: queries without bias, `[rows, lanes]`.
    key: keys without bias.
    value: values without bias.
    bias: biases of queries, keys and values, `[3, lanes]`.
    y: output.
    part: heads and tokens.
    offsets: offsets of the scores, or None.
  """
  k, v = part.load_all(key, value, bias)

  def compute(rows: Rows) -> None:
    q = part.load(query, rows, bias[0, part.lanes], part.scale)
    outputs = []
    # Dividing the result by the sum of the exponentials is cheaper than
    # dividing the weights, of which there are more.
    heads = zip(
      _per_head(k, q, part.heads), jnp.split(v.T, part.heads), strict=True
    )
    for i, (scores, values) in enumerate(heads):
      if offsets is not None:
        scores = offsets.add_to(scores, part, i)
      weights, total = _soft_max(scores, part.tokens)
      weights = weights.astype(part.operand)
      outputs.append(_dot(values, weights, 1, 0) / total)
    y[rows, part.lanes] = jnp.concatenate(outputs).T.astype(y.dtype)

  _for_each_tile(compute, y.shape[0], part.tile)


def backward(
  query: Refs,
  key: Refs,
  value: Refs,
  dy: Refs,
  bias: Ref,
  d_query: Ref,
  d_key: Ref,
  d_value: Ref,
  d_bias: Ref,
  sums: Ref,
  part: Part,
  offsets: Offsets | None = None,
) -> None:
  """Computes the gradients of the heads of a part.

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
    sums: memory for float32 sums over tiles of the gradients of keys and
      values, `[2, keys, 128]`; unused if there is only one tile.
    part: heads and tokens.
    offsets: offsets of the scores, with their gradient, or None.
  """
  k, v = part.load_all(key, value, bias)

  def compute(rows: Rows) -> list[Array]:
    """Writes the gradient of a tile of queries.

    Returns:
      Contributions of the tile to the gradients of the bias of queries, of keys
      and of values.
    """
    q = part.load(query, rows, bias[0, part.lanes], part.scale)
    d_out = part.load(dy, rows)
    weights, d_scores, d_queries = [], [], []
    heads = zip(
      _per_head(k, q, part.heads),
      _per_head(v, d_out, part.heads),
      jnp.split(k.T, part.heads),
      strict=True,
    )
    for i, (scores, d_weight, keys) in enumerate(heads):
      if offsets is not None:
        scores = offsets.add_to(scores, part, i)
      weight, total = _soft_max(scores, part.tokens)
      weight /= total
      # In the gradient of softmax, the weighted mean over keys is subtracted.
      mean = (weight * d_weight).sum(axis=0, keepdims=True)
      d_score = weight * (d_weight - mean)
      if offsets is not None:
        offsets.add_gradient(d_score, part, i)
      d_score = d_score.astype(part.operand)
      weights.append(weight.astype(part.operand))
      d_scores.append(d_score)
      d_queries.append(_dot(keys, d_score, 1, 0))
    gradient = jnp.concatenate(d_queries).T * part.scale
    d_query[rows, part.lanes] = gradient.astype(d_query.dtype)
    return [
      gradient.sum(axis=0, keepdims=True),
      _side_by_side(d_scores, q),
      _side_by_side(weights, d_out),
    ]

  rows = d_query.shape[0]
  if rows == part.tile:
    d_bias[0:1, part.lanes], *gradients = compute(slice(0, rows))
  else:
    # All keys, and as many lanes as the part has.
    used = (slice(None), slice(0, part.width))

    def add(rows: Rows) -> None:
      d_query_bias, *gradients = compute(rows)
      d_bias[0:1, part.lanes] += d_query_bias
      for i, gradient in enumerate(gradients):
        sums[i, *used] += gradient

    d_bias[0:1, part.lanes] = jnp.zeros((1, part.width), jnp.float32)
    sums[:, *used] = jnp.zeros((2, *k.shape), jnp.float32)
    _for_each_tile(add, rows, part.tile)
    gradients = [sums[i, *used] for i in range(2)]
  # The sums over tokens are the gradients of the biases.
  refs = (d_key, d_value)
  for i, (ref, gradient) in enumerate(zip(refs, gradients, strict=True), 1):
    ref[part.keys, part.lanes] = gradient.astype(ref.dtype)
    d_bias[i : i + 1, part.lanes] = gradient.sum(axis=0, keepdims=True)


def _for_each_tile(
  compute: Callable[[Rows], Any], rows: int, tile: int
) -> None:
  """Calls a function for each tile of rows, in a loop of the device."""
  if rows == tile:
    compute(slice(0, rows))
    return

  def body(i: Int[Array, ''], _: None) -> None:
    compute(pl.ds(pl.multiple_of(i * tile, tile), tile))

  jax.lax.fori_loop(0, rows // tile, body, None)


def padded(size: int, multiple: int) -> int:
  """Returns the smallest multiple that is at least `size`."""
  return math.ceil(size / multiple) * multiple


def _row(x: Block) -> Int[Array, 'rows 1']:
  """Returns the index of each row."""
  return jax.lax.broadcasted_iota(jnp.int32, (x.shape[0], 1), 0)


def _per_head(
  a: Float[Array, 'keys lanes'], b: Float[Array, 'queries lanes'], heads: int
) -> list[Float[Array, 'keys queries']]:
  """Computes a bᵀ for every head."""
  stacked = jnp.concatenate([_keep_head(a, i, heads) for i in range(heads)])
  return jnp.split(_dot(stacked, b, 1, 1), heads)


def _side_by_side(
  weights: list[Float[Array, 'keys queries']], x: Float[Array, 'queries lanes']
) -> Float[Array, 'keys lanes']:
  """Computes weights · x for every head, with the heads side by side."""
  heads = len(weights)
  y, *others = jnp.split(_dot(jnp.concatenate(weights), x, 1, 0), heads)
  for i, other in enumerate(others, start=1):
    y = jnp.where(_head_of_lane(heads) == i, other, y)
  return y


def _keep_head(x: Block, i: int, heads: int) -> Block:
  """Sets the channels of all heads except head `i` to 0."""
  return x if heads == 1 else jnp.where(_head_of_lane(heads) == i, x, 0)


def _head_of_lane(heads: int) -> Int[Array, '1 lanes']:
  """Returns the index of the head of each channel."""
  lane = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
  return lane // (LANES // heads)


def _soft_max(
  scores: Float[Array, 'keys queries'], tokens: int
) -> tuple[Float[Array, 'keys queries'], Float[Array, '1 queries']]:
  """Computes the softmax over keys, before the division by the sum.

  Returns:
    Exponentials of the scores, and their sum for each query.
  """
  scores = jnp.where(_row(scores) < tokens, scores, _MASKED)
  weights = jnp.exp(scores - scores.max(axis=0, keepdims=True))
  return weights, weights.sum(axis=0, keepdims=True)


def _dot(a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
  """Computes a product over one axis of each operand, in float32."""
  axes = (((a_axis,), (b_axis,)), ((), ()))
  return jax.lax.dot_general(a, b, axes, preferred_element_type=jnp.float32)
