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

import functools
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


class Operands(NamedTuple):
  """What a kernel reads: arrays, their blocks, or their rows of an example.

  Gradients are stored in another object of this class. None is an operand that
  a kernel does not have.

  Attributes:
    query: queries without bias, `[n, t, d]`.
    key: keys without bias.
    value: values without bias.
    vectors: biases of queries, keys and values, `[3 or more, d]`; with norms
      also the scales of queries and of keys and, if there are any, the biases
      of these norms.
    sines: sines of the rotations of queries and keys, `[t, d]` or `[n, t, d]`.
    cosines: cosines of the rotations.
    relative: offsets of the scores of each head, with the heads side by side,
      `[keys, heads · lanes of the queries]`. The queries of each head are
      padded to whole registers, and must be in one tile.
    mask: offsets of the scores of all heads, `[w, keys, lanes of the queries]`.
    dy: gradient of the output, for `backward`.
  """

  query: Any = None
  key: Any = None
  value: Any = None
  vectors: Any = None
  sines: Any = None
  cosines: Any = None
  relative: Any = None
  mask: Any = None
  dy: Any = None

  def map(
    self,
    of_tokens: Callable[[Any], Any],
    of_heads: Callable[[Any], Any],
    of_windows: Callable[[Any], Any] = lambda x: x,
  ) -> 'Operands':
    """Applies functions to operands with a row for each token, and to others.

    Args:
      of_tokens: function of queries, keys, values, sines, cosines and `dy`.
      of_heads: function of vectors and of offsets of each head.
      of_windows: function of the mask; by default, it is not changed.
    """
    others = dict(vectors=of_heads, relative=of_heads, mask=of_windows)
    results = {
      name: others.get(name, of_tokens)(x)
      for name, x in self._asdict().items()
      if x is not None
    }
    return Operands(**results)


class Part(NamedTuple):
  """The heads that a kernel computes together, and their tokens.

  Attributes:
    lanes: lanes of the heads.
    heads: number of heads, side by side in these lanes.
    tokens: number of tokens; further rows are padding.
    tile: number of queries per iteration of the loop; divides the rows.
    operand: dtype of the operands of products.
    epsilon: value added to the variance by the norms of queries and keys.
  """

  lanes: slice
  heads: int
  tokens: int
  tile: int
  operand: jnp.dtype
  epsilon: float

  @property
  def width(self) -> int:
    """Channels of all heads."""
    return self.lanes.stop - self.lanes.start

  @property
  def keys(self) -> slice:
    """Rows of the keys, which are whole registers."""
    return slice(0, padded(self.tokens, SUBLANES))

  def load(self, refs: Refs, rows: Rows, bias: Any = 0.0) -> Block:
    """Loads an operand with a bias added, and with zeros in rows of padding."""
    x = self._lanes(refs, rows).astype(jnp.float32) + bias
    # The memory of rows of padding is not initialized.
    valid = rows.start + _row(x) < self.tokens
    return jnp.where(valid, x, 0)

  def _lanes(self, refs: Refs, rows: Rows) -> Block:
    """Loads the lanes of the heads."""
    if len(refs) == 1:
      return refs[0][rows, self.lanes]
    start = self.lanes.start % LANES
    both = jnp.concatenate([ref[rows, :] for ref in refs], axis=1)
    return both[:, start : start + self.width]

  def load_values(self, x: Operands) -> Block:
    """Loads all values, with their bias added."""
    values = self.load(x.value, self.keys, x.vectors[2, self.lanes])
    return values.astype(self.operand)

  def load_to_multiply(
    self, x: Operands, which: int, rows: Rows
  ) -> tuple[Block, Callable[[Block], tuple[Block, list[Block], list[Block]]]]:
    """Loads queries or keys, and adds the bias, normalizes, rotates and scales.

    Args:
      x: operands.
      which: 0 for queries, 1 for keys.
      rows: rows to load.

    Returns:
      The operand of products, and a function from its gradient to those of the
      projection, of the vectors of the norm (`vectors_of`), and of sines and
      cosines.
    """
    bias, *vectors = (
      x.vectors[i : i + 1, self.lanes] for i in vectors_of(x, which)
    )
    projection = self.load((x.query, x.key)[which], rows, bias)

    def transform(
      y: Block, vectors: Sequence[Any], tables: list[Block]
    ) -> Block:
      if vectors:
        y = _normalized(y, self.heads, self.epsilon, *vectors)
      if tables:
        y = y * tables[1] + _turned(y, self.heads) * tables[0]
      # The factor 1/√c of the scores
      return y if which else y * (self.width // self.heads) ** -0.5

    refs = [] if x.sines is None else [x.sines, x.cosines]
    tables = [self.load(ref, rows) for ref in refs]
    y, pull = jax.vjp(transform, projection, vectors, tables)
    return y.astype(self.operand), pull

  def add_offsets(
    self, x: Operands, scores: Float[Array, 'keys queries'], head: int
  ) -> Float[Array, 'keys queries']:
    """Returns the scores of a head of the part with the offsets added."""
    if x.relative is not None:
      scores += x.relative[:, self.lanes_of_queries(head)]
    if x.mask is not None:
      scores += x.mask[:, : self.tile].astype(jnp.float32)
    return scores

  def lanes_of_queries(self, head: int) -> slice:
    """Returns the lanes in `Operands.relative` of a head of the part."""
    # Index of the head in the block, after those of earlier parts.
    head += self.lanes.start * self.heads // self.width
    start = head * padded(self.tile, LANES)
    return slice(start, start + self.tile)


def vectors_of(x: Operands, which: int) -> list[int]:
  """Returns the rows of the vectors of queries (0) or keys (1), bias first."""
  return [which, *range(3 + which, x.vectors.shape[0], 2)]


def forward(x: Operands, y: Ref, part: Part) -> None:
  """Computes the output of the heads of a part.

  Args:
    x: operands.
    y: output.
    part: heads and tokens.
  """
  if y.shape[0] > part.tile:  # in one tile, this would take longer
    x = x._replace(vectors=x.vectors[...])
  k, _ = part.load_to_multiply(x, 1, part.keys)
  v = part.load_values(x)

  def compute(rows: Rows) -> None:
    q, _ = part.load_to_multiply(x, 0, rows)
    outputs = []
    # Dividing the result by the sum of the exponentials is cheaper than
    # dividing the weights, of which there are more.
    heads = zip(
      _per_head(k, q, part.heads), jnp.split(v.T, part.heads), strict=True
    )
    for i, (scores, values) in enumerate(heads):
      scores = part.add_offsets(x, scores, i)
      weights, total = _soft_max(scores, part.tokens)
      weights = weights.astype(part.operand)
      outputs.append(_dot(values, weights, 1, 0) / total)
    y[rows, part.lanes] = jnp.concatenate(outputs).T.astype(y.dtype)

  _for_each_tile(compute, y.shape[0], part.tile)


def backward(x: Operands, dx: Operands, sums: Ref, part: Part) -> None:
  """Computes the gradients of the heads of a part.

  Args:
    x: operands.
    dx: gradients of the operands, the output. Those of `relative`, `sines` and
      `cosines` are added to what they contain.
    sums: memory for float32 sums over tiles of the gradients of keys and
      values, `[2, keys, 128]`; unused if there is only one tile.
    part: heads and tokens.
  """
  k, pull_key = part.load_to_multiply(x, 1, part.keys)
  v = part.load_values(x)
  rows = dx.query.shape[0]
  one_tile = rows == part.tile

  def write(
    which: int, rows: Rows, gradient: Block, *more: Sequence[Any]
  ) -> None:
    """Writes the gradients of queries (0), keys (1) or values (2).

    Args:
      which: row of the bias, whose gradient is the sum over tokens.
      rows: rows of the gradient.
      gradient: gradient of the projection.
      *more: further gradients of `load_to_multiply`, except for values.
    """
    ref = (dx.query, dx.key, dx.value)[which]
    ref[rows, part.lanes] = gradient.astype(ref.dtype)
    vectors, tables = more or ([], [])
    vectors = [gradient.sum(axis=0, keepdims=True), *vectors]
    for i, vector in zip(vectors_of(x, which), vectors, strict=False):
      if one_tile:
        dx.vectors[i : i + 1, part.lanes] = vector
      else:
        dx.vectors[i : i + 1, part.lanes] += vector
    if dx.sines is not None:
      for ref, table in zip((dx.sines, dx.cosines), tables, strict=False):
        ref[rows, part.lanes] += table

  def compute(rows: Rows) -> list[Array]:
    """Writes the gradients of a tile of queries.

    Returns:
      Contributions of the tile to the gradients of keys and of values.
    """
    q, pull = part.load_to_multiply(x, 0, rows)
    d_out = part.load(x.dy, rows).astype(part.operand)
    weights, d_scores, d_queries = [], [], []
    heads = zip(
      _per_head(k, q, part.heads),
      _per_head(v, d_out, part.heads),
      jnp.split(k.T, part.heads),
      strict=True,
    )
    for i, (scores, d_weight, keys) in enumerate(heads):
      scores = part.add_offsets(x, scores, i)
      weight, total = _soft_max(scores, part.tokens)
      weight /= total
      # In the gradient of softmax, the weighted mean over keys is subtracted.
      mean = (weight * d_weight).sum(axis=0, keepdims=True)
      d_score = weight * (d_weight - mean)
      if dx.relative is not None:
        dx.relative[:, part.lanes_of_queries(i)] += d_score
      d_score = d_score.astype(part.operand)
      weights.append(weight.astype(part.operand))
      d_scores.append(d_score)
      d_queries.append(_dot(keys, d_score, 1, 0))
    write(0, rows, *pull(jnp.concatenate(d_queries).T))
    return [_side_by_side(d_scores, q), _side_by_side(weights, d_out)]

  if one_tile:
    d_key, d_value = compute(slice(0, rows))
  else:
    # All keys, and as many lanes as the part has.
    used = (slice(None), slice(0, part.width))

    def add(rows: Rows) -> None:
      for i, gradient in enumerate(compute(rows)):
        sums[i, *used] += gradient

    dx.vectors[:, part.lanes] = jnp.zeros(
      (dx.vectors.shape[0], part.width), jnp.float32
    )
    sums[:, *used] = jnp.zeros((2, *k.shape), jnp.float32)
    _for_each_tile(add, rows, part.tile)
    d_key, d_value = (sums[i, *used] for i in range(2))
  write(1, part.keys, *pull_key(d_key))
  write(2, part.keys, d_value)


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


def _normalized(
  x: Block,
  heads: int,
  epsilon: float,
  scale: Float[Array, '1 lanes'],
  bias: Float[Array, '1 lanes'] | None = None,
) -> Block:
  """Divides every head by its root mean square.

  With a bias, as of a LayerNorm, the mean is subtracted before.
  """
  if bias is not None:
    x -= _mean(x, heads)
  y: Any = _unit(x, heads, epsilon)
  return y * scale if bias is None else y * scale + bias


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _unit(x: Block, heads: int, epsilon: float) -> Any:
  """Divides every head by its root mean square."""
  return _unit_forward(x, heads, epsilon)[0]


def _unit_forward(
  x: Block, heads: int, epsilon: float
) -> tuple[Block, tuple[Block, Block]]:
  factor = jax.lax.rsqrt(_mean(x * x, heads) + epsilon)
  y = x * factor
  return y, (y, factor)


def _unit_backward(
  heads: int, epsilon: float, residuals: tuple[Block, Block], dy: Block
) -> tuple[Block]:
  del epsilon
  y, factor = residuals
  return ((dy - y * _mean(dy * y, heads)) * factor,)


_unit.defvjp(_unit_forward, _unit_backward)


def _mean(x: Block, heads: int) -> Block:
  """Computes the mean of the channels of every head, for each channel."""
  row, lane = _row_and_lane(x.shape[1])
  head = x.shape[1] // heads
  # The matrix unit sums over lanes faster than the unit for operations on them.
  return _dot(x, jnp.where(row // head == lane // head, 1 / head, 0), 1, 0)


def _turned(x: Block, heads: int) -> Block:
  """Rotates the planes (i, i + c/2) of every head by a right angle."""
  row, lane = _row_and_lane(x.shape[1])
  half = x.shape[1] // heads // 2
  second = lane // half % 2  # 1 in the second half of a head
  other = lane + half - 2 * half * second
  return _dot(x, jnp.where(row == other, 2.0 * second - 1, 0), 1, 0)


def _row_and_lane(size: int) -> list[Int[Array, 'size size']]:
  """Returns the indices of the entries of a square matrix."""
  shape = size, size
  return [jax.lax.broadcasted_iota(jnp.int32, shape, i) for i in range(2)]


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
