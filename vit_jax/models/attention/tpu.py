"""Attention on TPUs by two Pallas kernels, forward and backward.

XLA writes logits `[n, h, q, k]` to memory and reads them in every pass. In
these kernels, the logits and weights of a few heads of an example stay in the
memory of the core. Inputs and results are `[n, t, d]`, with the heads side by
side in the last axis, so that no array has to be transposed.

The backward pass recomputes the weights from queries and keys.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from vit_jax.arrays import sharding
from vit_jax.models.attention.tpu_kernels import (
  LANES,
  SUBLANES,
  Operands,
  Part,
  Ref,
  backward,
  forward,
  padded,
)

_BLOCK_ROWS = 256  # maximum tokens per block of several examples
# The following limits fit into the 16 MiB of memory of a core of v2 and v3.
_MAX_TOKENS = {2: 1100, 4: 700}  # {bytes per value: tokens}
_MAX_TOKENS_ALONE = {2: 2400, 4: 1200}  # the same for one head at a time
_CROWDED = 1400  # with more tokens, only 128 queries at a time fit
_ONE_BUFFER = 4000  # bytes of a column of tokens; more are not buffered twice
_MAX_BLOCK = 450_000  # tokens times (lanes of a block + 300), of two bytes
_MAX_BLOCK_OF_COLUMNS = 1_320_000  # the same if operands are loaded by columns
_MAX_TILE = 384  # queries; with more, other intermediate results do not fit
_MAX_SCORES = 750_000  # scores of the heads of a part, for a tile of queries
_TRANSFORMED = 0.55  # of these tokens, with LayerNorms and learned rotations
_LONG_TOKENS = 512  # see `cost`
# Gradients to which the kernel adds
_SUMS = ('sines', 'cosines', 'relative')
# Names of the arrays that the backward pass needs, for rematerialization.
SAVED = ('query', 'key', 'value', 'attended')


class Layout(NamedTuple):
  """How heads lie side by side in the blocks of the kernels.

  Attributes:
    head: channels of a head.
    together: number of heads that are computed together.
    columns: 1 if operands are loaded for all heads of a block at once; 2 if
      only the two registers of lanes are loaded that contain a head.
  """

  head: int
  together: int
  columns: int = 1

  @property
  def lanes(self) -> int:
    """Lanes of a block: the fewest that make up whole heads and registers."""
    return math.lcm(self.head, LANES)

  def max_tokens(self, dtype: jnp.dtype) -> int:
    """Returns the largest number of tokens that fits."""
    itemsize = jnp.dtype(dtype).itemsize
    if self.lanes == LANES:
      most = _MAX_TOKENS if self.together > 1 else _MAX_TOKENS_ALONE
      return most[itemsize]
    # Scores need as much memory as 300 lanes of the blocks.
    block = _MAX_BLOCK if self.columns == 1 else _MAX_BLOCK_OF_COLUMNS
    return block * 2 // itemsize // (self.lanes + 300)

  def tile(self, tokens: int) -> int:
    """Returns the number of queries per iteration of the kernels' loop."""
    # Scores are `[keys, queries]`, padded to whole sublanes and lanes.
    keys, queries = padded(tokens, SUBLANES), padded(tokens, LANES)
    # The most queries, in whole registers of lanes, whose scores fit
    max_queries = _MAX_SCORES // (self.together * keys) // LANES * LANES
    if queries <= max_queries and self.columns == 1:
      return keys  # a single tile, whose queries have the same rows as the keys
    is_crowded = self.columns > 1 or tokens > _CROWDED
    largest = LANES if is_crowded else _MAX_TILE
    tiles = math.ceil(queries / min(max_queries, largest))
    return padded(math.ceil(tokens / tiles), LANES)

  def rows(self, tokens: int) -> int:
    """Returns the number of rows of all tiles."""
    return padded(tokens, self.tile(tokens))


def _layouts(head: int) -> list[Layout]:
  """Returns the layouts of heads of `head` channels, the fastest first."""
  if LANES % head:
    return [Layout(head, 1), Layout(head, 1, columns=2)]
  # Heads that share 128 lanes, such as two of 64 channels, share products.
  return [Layout(head, LANES // head), Layout(head, 1)]


def layout(
  tokens: int, head: int, dtype: jnp.dtype, transformed: bool = False
) -> Layout | None:
  """Returns the layout of the kernels, or None if tokens do not fit.

  Args:
    tokens: number of tokens.
    head: channels of a head.
    dtype: dtype of queries, keys and values.
    transformed: whether queries and keys are normalized or rotated.
  """
  # Longer sequences with norms or rotations do not fit in the other layouts.
  layouts = _layouts(head)[:1] if transformed else _layouts(head)
  for chosen in layouts:
    most = chosen.max_tokens(dtype)
    if tokens <= (int(_TRANSFORMED * most) if transformed else most):
      return chosen
  return None


def fits(
  tokens: int,
  head: int,
  dtype: jnp.dtype,
  *,
  one_tile: bool = False,
  transformed: bool = False,
) -> bool:
  """Returns whether `attend` supports these sizes.

  Args:
    tokens: number of tokens.
    head: channels of a head.
    dtype: dtype of queries, keys and values.
    one_tile: whether all queries must be in one tile, which `relative` and
      `mask` of `attend` require.
    transformed: see `layout`.
  """
  if head % SUBLANES or not 32 <= head <= LANES:
    return False
  chosen = layout(tokens, head, dtype, transformed)
  if chosen is None:
    return False
  return not one_tile or chosen.tile(tokens) == padded(tokens, SUBLANES)


def limits(head: int, dtype: jnp.dtype) -> str:
  """Describes the sizes that `attend` supports, for messages."""
  most = max(x.max_tokens(dtype) for x in _layouts(head))
  return (
    f'heads of 32 to {LANES} channels, a multiple of 8; for {head} channels at '
    f'most {most} tokens, fewer with rotations or qk_norm, and a number '
    "of heads that is a multiple of the mesh axis 'model'"
  )


def attend(
  projections: tuple[Float[Array, '*n t d'], ...],
  biases: tuple[Float[Array, ' d'], ...],
  num_heads: int,
  relative: Float[Array, 'h t t'] | None = None,
  mask: Float[Array | np.ndarray, 'w t t'] | None = None,
  *,
  rotation: tuple[Float[Array, '#n t *h c'], ...] | None = None,
  norms: Sequence[Sequence[Float[Array, ' c']]] = (),
  epsilon: float = 0.0,
) -> Float[Array, '*n t d']:
  """Computes softmax(q·k / √c + relative + mask) v, with a float32 softmax.

  Exponentials are rounded to the dtype of the values before the product with
  the values; the result is divided by the sum of the exponentials afterwards.
  The function is differentiable once, in reverse mode.

  Args:
    projections: queries, keys and values without biases.
    biases: biases of queries, keys and values. The kernel adds them, and sums
      their gradients over blocks that are already in the memory of the core.
    num_heads: number of heads, side by side in the last axis.
    relative: added to the logits of each head, `[h, queries, keys]`, or None;
      see `fits`.
    mask: added to the logits of each window, without a gradient; None without
      windows. The axis before the tokens is that of the windows.
    rotation: sines and cosines by which queries and keys are rotated after
      their norms, see `positions.rotate`; None for no rotation.
    norms: scales of the norms of queries and of keys over the channels of a
      head, and biases if they are LayerNorms and not RMSNorms; () for no norms.
    epsilon: value added to the variance by these norms.

  Returns:
    Output tokens, in the dtype of the projections.

  Reference: arXiv 2010.11929, appendix A, equations 5 to 7.
  """
  of_norms = itertools.chain(*zip(*norms, strict=True))
  vectors = [*biases, *(jnp.tile(x, num_heads) for x in of_norms)]
  vectors = jnp.stack([x.astype(jnp.float32) for x in vectors])
  tables = [_of_all_heads(x, num_heads) for x in rotation or ()]
  if relative is not None:
    by_keys = _by_keys(relative.astype(jnp.float32))  # [h, keys, lanes]
    relative = by_keys.swapaxes(0, 1).reshape(by_keys.shape[1], -1)
  if mask is not None:
    # Masks are 0 or a large number, which bfloat16 represents well enough.
    mask = _by_keys(jnp.asarray(mask, jnp.bfloat16))
  query, key, value = projections
  operands = Operands(query, key, value, vectors, *tables)
  operands = operands._replace(relative=relative, mask=mask)
  return _attend(operands, num_heads, epsilon)


def _of_all_heads(
  x: Float[Array, '#n t *h c'], num_heads: int
) -> Float[Array, '*n t d']:
  """Returns sines or cosines with heads side by side, for one or n examples."""
  if x.ndim == 3:
    x = jnp.broadcast_to(x[:, :, None], (*x.shape[:2], num_heads, x.shape[2]))
  x = x.reshape(*x.shape[:2], -1)
  return x[0] if len(x) == 1 else x


def _by_keys(offsets: Float[Array, 'x t t']) -> Float[Array, 'x keys lanes']:
  """Transposes offsets like the kernels' scores, and pads them with zeros."""
  tokens = offsets.shape[-1]
  more = padded(tokens, SUBLANES) - tokens, padded(tokens, LANES) - tokens
  return jnp.pad(offsets.swapaxes(1, 2), ((0, 0), (0, more[0]), (0, more[1])))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _attend(operands: Operands, num_heads: int, epsilon: float) -> Any:
  """Computes `attend` from the operands of the kernel."""
  return _run(forward, operands, num_heads, epsilon)


def _attend_forward(
  operands: Operands, num_heads: int, epsilon: float
) -> tuple[Array, tuple[Any, ...]]:
  # Most angles are constants, whose gradients are not computed. A residual
  # cannot be a bool, so its structure encodes it: () if learned, else None.
  is_learned = operands.sines is not None and operands.sines.perturbed
  operands = jax.tree.map(lambda x: x.value, operands)
  query, key, value = map(checkpoint_name, operands[:3], SAVED[:3])
  operands = operands._replace(query=query, key=key, value=value)
  y = _run(forward, operands, num_heads, epsilon)
  return checkpoint_name(y, SAVED[3]), (operands, () if is_learned else None)


def _attend_backward(
  num_heads: int,
  epsilon: float,
  residuals: tuple[Any, ...],
  dy: Float[Array, '*n t d'],
) -> tuple[Operands]:
  operands, learned = residuals
  inputs = operands._replace(dy=dy)
  gradients = _run(backward, inputs, num_heads, epsilon, learned is not None)

  def summed(gradient: Any, operand: Any) -> Any:
    """Sums over examples or devices, if these share the operand."""
    if gradient is None:
      return None
    more = tuple(range(gradient.ndim - operand.ndim))
    return gradient.sum(axis=more).astype(operand.dtype)

  return (Operands(*map(summed, gradients, operands)),)


_attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)


def _run(
  kernel: Callable[..., None],
  operands: Operands,
  num_heads: int,
  *options: Any,
) -> Any:
  """Runs a kernel on each device, for a block of examples and heads at a time.

  Args:
    kernel: `forward` or `backward`.
    operands: operands of the kernel.
    num_heads: number of heads.
    *options: further arguments of `_run_on_device`.

  Returns:
    Output, or gradients of the operands, float32 for all but the projections.
    The gradient of the vectors has a first axis of examples. Gradients of other
    operands that all examples share have a first axis of devices.
  """
  query = operands.query
  more = query.ndim - 2  # axes in place of `*n` in `attend`
  head = query.shape[-1] // num_heads
  # The mask has an axis of windows, not of examples: it is not split, and each
  # device gets all of it in `local`.
  arrays, structure = jax.tree.flatten(operands._replace(mask=None))
  arrays = [
    jnp.expand_dims(x, tuple(range(query.ndim - x.ndim))) for x in arrays
  ]

  def local(*arrays: Array) -> Any:
    mine = structure.unflatten(arrays)._replace(mask=operands.mask)
    return _run_on_device(kernel, mine, head, *options)

  spec = (sharding.BATCH, *[None] * more, 'model')
  return sharding.per_device(local, arrays, *spec)


def _run_on_device(
  kernel: Callable[..., None],
  operands: Operands,
  head: int,
  epsilon: float,
  is_learned: bool = False,
) -> Any:
  """Runs a kernel on one device, with the heads and examples of the device.

  Args:
    kernel: see `_run`.
    operands: operands with the same number of axes, except for the mask.
    head: channels of a head.
    epsilon: see `attend`.
    is_learned: whether to compute the gradients of sines and cosines.

  Returns:
    See `_run`.
  """
  (*leading, tokens, width), dtype = operands.query.shape, operands.query.dtype
  # There are three biases; with norms, their scales and biases follow.
  transforms = (operands.sines is not None) + (operands.vectors.shape[-2] > 3)
  chosen = layout(tokens, head, dtype, transforms > 0)
  assert chosen is not None
  whole = padded(width, chosen.lanes)  # with heads of zeros after the last head

  def with_whole(x: Array) -> Array:
    columns = x.shape[-1] * whole // width
    return _with_width(x.reshape(-1, *x.shape[-2:]), columns)

  operands, mask = operands.map(with_whole, with_whole), operands.mask
  n = len(operands.query)
  windows = n if mask is None else len(mask)
  # The number of examples of a block has to divide that of the windows, too.
  examples = examples_at_once(math.gcd(n, windows), tokens, chosen.lanes)
  blocks = _Blocks(chosen, examples, tokens, whole)
  in_specs = operands.map(blocks.of_part, blocks.of_heads, blocks.of_windows)
  out_shape = y = jax.ShapeDtypeStruct((n, tokens, whole), dtype)
  out_specs, scratch, sums = blocks.of_tokens(y), [], ()
  if kernel is backward:
    out_shape = _gradients(operands, is_learned)
    out_specs = out_shape.map(blocks.of_tokens, blocks.of_heads)
    sums = [x for x in _SUMS if getattr(out_shape, x) is not None]
    # Sums over tiles, see `backward`; a single tile does not use them.
    one_tile = chosen.tile(tokens) >= tokens
    rows = SUBLANES if one_tile else padded(tokens, SUBLANES)
    scratch = [pltpu.VMEM((2, rows, LANES), jnp.float32)]
  is_shared = any(len(getattr(operands, x)) < n for x in sums)
  parts = _parts(chosen, tokens, dtype, epsilon)
  [results] = pl.pallas_call(
    _on_block(kernel, parts, examples, sums, is_shared),
    out_shape=[out_shape],
    # Axes j, i and part of the block indices. Examples vary within a block of
    # heads, because gradients of shared operands are sums over all examples.
    grid=(whole // chosen.lanes, n // examples, len(parts)),
    in_specs=[in_specs],
    out_specs=[out_specs],
    scratch_shapes=scratch,
    cost_estimate=cost(
      kernel is backward, y.shape, dtype.itemsize, head, transforms
    ),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=(
        'parallel',
        'arbitrary' if is_shared else 'parallel',
        'arbitrary',  # the parts write to the same block
      )
    ),
    interpret=not sharding.on_tpu(),
    name=f'attention_{kernel.__name__}',
  )(operands.map(lambda x: [x] * chosen.columns, lambda x: x))

  def as_given(x: Array) -> Array:
    axes = leading if len(x) == n else [1] * len(leading)
    x = _with_width(x, x.shape[-1] * width // whole)
    return x.reshape(*axes, *x.shape[1:])

  return jax.tree.map(as_given, results)


def _gradients(x: Operands, is_learned: bool) -> Operands:
  """Returns the shapes of the results of `backward` on one device."""
  n = len(x.query)

  def wide(x: Array, n: int = 0) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((n or len(x), *x.shape[1:]), jnp.float32)

  shape = jax.ShapeDtypeStruct(x.query.shape, x.query.dtype)
  gradients = Operands(shape, shape, shape, wide(x.vectors, n))
  if x.relative is not None:
    gradients = gradients._replace(relative=wide(x.relative))
  if is_learned:
    gradients = gradients._replace(sines=wide(x.sines), cosines=wide(x.cosines))
  return gradients


def _parts(
  chosen: Layout, tokens: int, dtype: jnp.dtype, epsilon: float
) -> list[Part]:
  """Returns the heads of a block, in the order in which they are computed."""
  # TPU v2 and v3 only multiply float32 values, which they round to bfloat16.
  old = sharding.device().device_kind in ('TPU v2', 'TPU v3')
  operand = jnp.dtype(jnp.float32) if old else dtype
  tile, width = chosen.tile(tokens), chosen.head * chosen.together
  return [
    Part(slice(i, i + width), chosen.together, tokens, tile, operand, epsilon)
    for i in range(0, chosen.lanes, width)
  ]


class _Blocks(NamedTuple):
  """Which blocks of arrays are in memory in a step of the kernels' grid.

  Attributes:
    chosen: layout of the heads.
    examples: number of examples of a block.
    tokens: number of tokens.
    width: lanes of all blocks of heads.
  """

  chosen: Layout
  examples: int
  tokens: int
  width: int

  def of_heads(
    self, x: Any, rows: int | None = None, **buffers: Any
  ) -> pl.BlockSpec:
    """Returns the block of all heads of a block, with `rows` or all rows."""
    examples, blocks = self._examples(x)
    lanes = x.shape[2] * self.chosen.lanes // self.width
    return pl.BlockSpec(
      (examples, rows or x.shape[1], lanes),
      lambda j, i, _: (i % blocks, 0, j),
      **buffers,
    )

  def of_windows(self, x: Any) -> pl.BlockSpec:
    """Returns the block of an array without heads."""
    examples, blocks = self._examples(x)
    shape = (examples, *x.shape[1:])
    return pl.BlockSpec(shape, lambda j, i, _: (i % blocks, 0, 0))

  def of_tokens(self, x: Any) -> pl.BlockSpec:
    """Returns the block of an array with a row for each token."""
    rows = self.chosen.rows(self.tokens)
    return self.of_heads(x, rows, **self._buffers(x))

  def of_part(self, x: Any) -> list[pl.BlockSpec]:
    """Returns the blocks of an operand, of which there are `Layout.columns`."""
    if self.chosen.columns == 1:
      return [self.of_tokens(x)]
    head, last = self.chosen.head, self.chosen.lanes // LANES - 1
    examples, blocks = self._examples(x)

    def of_head(column: int) -> pl.BlockSpec:
      """Returns one of the two registers of lanes that contain a head."""

      def index(j: Any, i: Any, part: Any) -> tuple[Any, ...]:
        within = jnp.minimum(part * head // LANES + column, last)
        return i % blocks, 0, j * (last + 1) + within

      shape = (examples, self.chosen.rows(self.tokens), LANES)
      return pl.BlockSpec(shape, index, **self._buffers(x))

    return [of_head(column) for column in range(self.chosen.columns)]

  def _examples(self, x: Any) -> tuple[int, int]:
    """Returns the examples of a block and the number of blocks of an array.

    An array for all examples has one block, and masks have one for each block
    of windows.
    """
    examples = min(self.examples, len(x))
    return examples, len(x) // examples

  def _buffers(self, x: Any) -> dict[str, Any]:
    # Usually, a block is loaded and another one is stored during a computation.
    column = self.tokens * x.dtype.itemsize
    one_buffer = self.chosen.columns > 1 or column > _ONE_BUFFER
    # Sines and cosines only change with the block of heads.
    one_buffer |= len(x) == 1
    return dict(pipeline_mode=pl.Buffered(1)) if one_buffer else {}


def _with_width(
  x: Float[Array, 'n rows d'], width: int
) -> Float[Array, 'n rows width']:
  """Changes the size of the last axis, by cropping or by adding zeros."""
  more = max(width - x.shape[-1], 0)
  return jnp.pad(x, [(0, 0), (0, 0), (0, more)])[..., :width]


def _on_block(
  kernel: Callable[..., None],
  parts: list[Part],
  examples: int,
  sums: Sequence[str],
  is_shared: bool,
) -> Callable[..., None]:
  """Returns a function that runs a kernel for a block of examples and heads.

  Args:
    kernel: `forward` or `backward`.
    parts: the heads of the block. Each is a step of the grid, so that they
      share their memory.
    examples: number of examples of the block.
    sums: names of gradients that the kernel adds to.
    is_shared: whether these are sums over all examples.
  """

  def run_block(x: Operands, out: Any, *scratch: Ref) -> None:
    if sums:  # zero before the first example and part
      is_first = pl.program_id(2) == 0
      if is_shared:
        is_first &= pl.program_id(1) == 0

      @pl.when(is_first)
      def _():
        for name in sums:
          ref = getattr(out, name)
          ref[...] = jnp.zeros(ref.shape, jnp.float32)

    def run_part(part: Part) -> None:
      for i in range(examples):
        # Operands that all examples share have one row.
        def row(ref: Ref, i: int = i) -> Ref:
          return ref.at[min(i, ref.shape[0] - 1)]

        kernel(*jax.tree.map(row, (x, out)), *scratch, part)

    # The lanes of a part must be constants, so each part has its own code.
    for i, part in enumerate(parts):
      run = functools.partial(run_part, part)
      run() if len(parts) == 1 else pl.when(pl.program_id(2) == i)(run)

  return run_block


def examples_at_once(n: int, tokens: int, lanes: int) -> int:
  """Returns the number of examples per block.

  A block of 128 lanes contains several short examples, so that their latencies
  overlap; a wider block contains one.

  Args:
    n: number of examples on a device.
    tokens: number of tokens of an example.
    lanes: lanes of a block.
  """
  if lanes > LANES:
    return 1
  return math.gcd(n, max(_BLOCK_ROWS // padded(tokens, SUBLANES), 1))


def cost(
  gradients: bool,
  shape: tuple[int, ...],
  itemsize: int,
  head: int,
  transforms: int = 0,
) -> pl.CostEstimate:
  """Returns the cost of a kernel, including that of padding.

  Fewer than 128 rows count as 128, because loading 128 rows into the matrix
  unit takes as long as multiplying 128 rows. Moving a head between lanes, if
  its channels do not divide 128, takes about as long as its exponentials. In
  long sequences, products hide about half of the exponentials. Rotating or
  normalizing an entry of queries or keys, or of their gradients, takes about as
  long as 2/3 of an exponential (benchmarks/kernels.py).

  Args:
    gradients: whether the kernel is that of the backward pass.
    shape: shape of the queries, `[n, t, d]`.
    itemsize: bytes per entry of the queries.
    head: channels of a head.
    transforms: number of rotations and norms of queries and keys, 0 to 2.
  """
  # Matrix products, and arrays [n, t, d] that are read or written.
  products, arrays = (5, 7) if gradients else (2, 4)
  n, tokens, width = shape
  heads = n * width // head
  rows, columns = (padded(tokens, side) for side in (SUBLANES, LANES))
  exponentials = heads * rows * columns
  if tokens > _LONG_TOKENS:
    exponentials //= 2
  entries = (4 if gradients else 2) * n * rows * width
  exponentials += transforms * entries * 2 // 3
  if LANES % head:
    exponentials *= 2
  return pl.CostEstimate(
    flops=heads * products * 2 * max(rows, LANES) * columns * LANES,
    transcendentals=exponentials,
    bytes_accessed=arrays * math.prod(shape) * itemsize,
  )
