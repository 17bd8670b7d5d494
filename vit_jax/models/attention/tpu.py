"""Attention on TPUs by two Pallas kernels, forward and backward.

XLA writes logits `[n, h, q, k]` to memory and reads them in every pass. In
these kernels, the logits and weights of a few heads of an example stay in the
memory of the core. Inputs and results are `[n, t, d]`, with the heads side by
side in the last axis, so that no array has to be transposed.

The backward pass recomputes the weights from queries and keys.
"""

import functools
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
  Offsets,
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
_CROWDED = 1400  # tokens that leave memory for 128 queries at a time only
_ONE_BUFFER = 4000  # bytes of a column of tokens; more are not buffered twice
_MAX_BLOCK = 450_000  # tokens times (lanes of a block + 300), of two bytes
_MAX_BLOCK_OF_COLUMNS = 1_320_000  # the same if operands are loaded by columns
_MAX_SCORES = 750_000  # scores of the heads of a part, for a tile of queries
_LONG_TOKENS = 512  # see `cost`
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
    max_queries = _MAX_SCORES // (self.together * keys) // LANES * LANES
    if queries <= max_queries and self.columns == 1:
      return keys  # a single tile, whose queries have the same rows as the keys
    # With more queries, other intermediate results do not fit either.
    crowded = self.columns > 1 or tokens > _CROWDED
    tiles = math.ceil(queries / min(max_queries, LANES if crowded else 384))
    return padded(math.ceil(tokens / tiles), LANES)


def _layouts(head: int) -> list[Layout]:
  """Returns the layouts of heads of `head` channels, the fastest first."""
  if LANES % head:
    return [Layout(head, 1), Layout(head, 1, columns=2)]
  # Heads that share 128 lanes, such as two of 64 channels, share products.
  return [Layout(head, LANES // head), Layout(head, 1)]


def layout(tokens: int, head: int, dtype: jnp.dtype) -> Layout | None:
  """Returns the layout of the kernels, or None if tokens do not fit.

  Args:
    tokens: number of tokens.
    head: channels of a head.
    dtype: dtype of queries, keys and values.
  """
  fitting = (x for x in _layouts(head) if tokens <= x.max_tokens(dtype))
  return next(fitting, None)


def fits(
  tokens: int, head: int, dtype: jnp.dtype, *, one_tile: bool = False
) -> bool:
  """Returns whether `attend` supports these sizes.

  Args:
    tokens: number of tokens.
    head: channels of a head.
    dtype: dtype of queries, keys and values.
    one_tile: whether all queries must be in one tile, which `relative` and
      `mask` of `attend` require.
  """
  if head % SUBLANES or not 32 <= head <= LANES:
    return False
  chosen = layout(tokens, head, dtype)
  if chosen is None:
    return False
  return not one_tile or chosen.tile(tokens) == padded(tokens, SUBLANES)


def limits(head: int, dtype: jnp.dtype) -> str:
  """Describes the sizes that `attend` supports, for messages."""
  most = max(x.max_tokens(dtype) for x in _layouts(head))
  return (
    f'heads of 32 to {LANES} channels, a multiple of 8; for {head} channels at '
    f'most {most} tokens, and a number of heads that is a multiple of the mesh '
    "axis 'model'"
  )


def attend(
  projections: tuple[Float[Array, '*n t d'], ...],
  biases: tuple[Float[Array, ' d'], ...],
  num_heads: int,
  relative: Float[Array, 'h t t'] | None = None,
  mask: Float[Array | np.ndarray, 'w t t'] | None = None,
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

  Returns:
    Output tokens, in the dtype of the projections.

  Reference: arXiv 2010.11929, appendix A, equations 5 to 7.
  """
  if relative is not None:
    by_keys = _by_keys(relative.astype(jnp.float32))  # [h, keys, lanes]
    relative = by_keys.swapaxes(0, 1).reshape(by_keys.shape[1], -1)
  if mask is not None:
    # Masks are 0 or a large number, which bfloat16 represents well enough.
    mask = _by_keys(jnp.asarray(mask, jnp.bfloat16))
  return _attend(projections, biases, relative, mask, num_heads)


def _by_keys(offsets: Float[Array, 'x t t']) -> Float[Array, 'x keys lanes']:
  """Transposes offsets like the kernels' scores, and pads them with zeros."""
  tokens = offsets.shape[-1]
  more = padded(tokens, SUBLANES) - tokens, padded(tokens, LANES) - tokens
  return jnp.pad(offsets.swapaxes(1, 2), ((0, 0), (0, more[0]), (0, more[1])))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(
  projections: tuple[Array, ...],
  biases: tuple[Array, ...],
  relative: Array | None,
  mask: Array | None,
  num_heads: int,
) -> Any:
  """Computes `attend` with offsets that `_by_keys` has padded.

  All heads of `relative` are side by side in its last axis.
  """
  return _attend_forward(projections, biases, relative, mask, num_heads)[0]


def _attend_forward(
  projections: tuple[Array, ...],
  biases: tuple[Array, ...],
  relative: Array | None,
  mask: Array | None,
  num_heads: int,
) -> tuple[Array, tuple[Any, ...]]:
  named = tuple(map(checkpoint_name, projections, SAVED[:3]))
  bias = jnp.stack(biases)  # [3, d]
  [y] = _run(forward, [*named], bias, relative, mask, num_heads)
  return checkpoint_name(y, SAVED[3]), (named, bias, relative, mask)


def _attend_backward(
  num_heads: int, residuals: tuple[Any, ...], dy: Float[Array, '*n t d']
) -> tuple[Any, ...]:
  projections, bias, relative, mask = residuals
  results = _run(backward, [*projections, dy], bias, relative, mask, num_heads)
  gradients, sums = results[:3], results[3:]
  # The biases have a gradient for each example, and `relative` has one for each
  # device: [n, 3, d] -> [3, d], [devices, keys, columns] -> [keys, columns]
  d_bias, *d_relative = (x.sum(axis=tuple(range(x.ndim - 2))) for x in sums)
  d_bias = tuple(d_bias.astype(bias.dtype))
  return tuple(gradients), d_bias, *(d_relative or [None]), None


_attend.defvjp(_attend_forward, _attend_backward)


def _run(
  kernel: Callable[..., None],
  operands: list[Float[Array, '*n t d']],
  bias: Float[Array, '3 d'],
  relative: Float[Array, 'keys columns'] | None,
  mask: Float[Array, 'w keys lanes'] | None,
  num_heads: int,
) -> tuple[Array, ...]:
  """Runs a kernel on each device, for a block of examples and heads at a time.

  Args:
    kernel: `forward` or `backward`.
    operands: queries, keys, values, and the gradient of the output for
      `backward`.
    bias: stacked biases.
    relative: see `_attend`.
    mask: see `_attend`.
    num_heads: number of heads.

  Returns:
    Output, or the gradients of queries, keys and values, those of the biases
    for each example, and that of `relative` for each device.
  """
  shared = [bias] if relative is None else [bias, relative]
  more = operands[0].ndim - 2  # axes in place of `*n`
  shared = [jnp.expand_dims(x, tuple(range(more))) for x in shared]
  head = operands[0].shape[-1] // num_heads
  local = functools.partial(_run_on_device, kernel, mask, head, len(operands))
  spec = (sharding.BATCH, *[None] * more, 'model')
  return sharding.per_device(local, [*operands, *shared], *spec)


def _run_on_device(
  kernel: Callable[..., None],
  mask: Float[Array, 'w keys lanes'] | None,
  head: int,
  num_operands: int,
  *arrays: Array,
) -> tuple[Array, ...]:
  """Runs a kernel on one device, with the heads and examples of the device.

  Args:
    kernel: see `_run`.
    mask: see `_run`.
    head: channels of a head.
    num_operands: number of arrays that have examples. They are followed by the
      biases and the offsets of heads, if any.
    *arrays: the arguments of `_run` with the same number of axes.

  Returns:
    See `_run`.
  """
  leading, (tokens, width) = arrays[0].shape[:-2], arrays[0].shape[-2:]
  dtype = arrays[0].dtype
  is_backward = kernel is backward
  chosen = layout(tokens, head, dtype)
  assert chosen is not None
  lanes, tile = chosen.lanes, chosen.tile(tokens)
  rows = padded(tokens, tile)  # rows after the last token are padding
  whole = padded(width, lanes)  # with heads of zeros after the last head
  inputs = [
    _with_width(x.reshape(-1, *x.shape[-2:]), x.shape[-1] * whole // width)
    for x in arrays
  ]
  n = len(inputs[0])
  windows = n if mask is None else len(mask)
  # The number of examples of a block has to divide that of the windows, too.
  examples = examples_at_once(math.gcd(n, windows), tokens, lanes)
  of_example, of_operand = _blocks(chosen, examples, dtype, tokens)

  def of_all(x: Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
    shape = (1, x.shape[1], x.shape[2] * lanes // whole)
    return pl.BlockSpec(shape, lambda j, i, _: (0, 0, j))

  shared = inputs[num_operands:]  # by all examples: biases and offsets of heads
  in_specs = of_operand * num_operands + [of_all(x) for x in shared]
  inputs = [x for x in inputs[:num_operands] for _ in of_operand] + shared
  # The bias is the last input before the offsets.
  first_offset = num_operands * len(of_operand) + 1
  y_shape = jax.ShapeDtypeStruct((n, tokens, whole), dtype)
  out_shape, out_specs, scratch = [y_shape], [of_example(rows)], []
  if is_backward:
    # The results are three gradients like the inputs, the gradients of the
    # biases for each example, and the gradient of the offsets.
    d_bias = jax.ShapeDtypeStruct((n, 3, whole), jnp.float32)
    d_offsets = [
      jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in inputs[first_offset:]
    ]
    out_shape = [y_shape] * 3 + [d_bias, *d_offsets]
    out_specs = [of_example(rows)] * 3 + [of_example(3)]
    out_specs += map(of_all, d_offsets)
    # Sums over tiles, see `backward`; a single tile does not use them.
    keys = padded(tokens, SUBLANES) if tile < rows else SUBLANES
    scratch = [pltpu.VMEM((2, keys, LANES), jnp.float32)]
  if mask is not None:
    inputs.append(mask)
    blocks = windows // examples
    shape = (examples, *mask.shape[1:])
    in_specs.append(pl.BlockSpec(shape, lambda j, i, _: (i % blocks, 0, 0)))

  parts = _parts(chosen, tokens, dtype)
  results = pl.pallas_call(
    _on_block(
      kernel,
      parts,
      examples=examples,
      first_offset=first_offset,
      num_inputs=len(inputs),
      num_outputs=len(out_shape),
      columns=chosen.columns,
    ),
    out_shape=out_shape,
    # Axes j, i and part of the block indices. Examples vary within a block of
    # heads, because the gradient of its offsets is a sum over all examples.
    grid=(whole // lanes, n // examples, len(parts)),
    in_specs=in_specs,
    out_specs=out_specs,
    scratch_shapes=scratch,
    cost_estimate=cost(is_backward, y_shape.shape, dtype.itemsize, head),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=(
        'parallel',
        'arbitrary' if is_backward and len(shared) > 1 else 'parallel',
        'arbitrary',  # the parts write to the same block
      )
    ),
    interpret=not sharding.on_tpu(),
    name=f'attention_{kernel.__name__}',
  )(*inputs)
  results = [_with_width(x, x.shape[-1] * width // whole) for x in results]
  # The gradient of the offsets is a sum over examples, so its first axis is 1.
  shapes = [leading if len(x) == n else (1,) * len(leading) for x in results]
  return tuple(
    x.reshape(*shape, *x.shape[1:])
    for x, shape in zip(results, shapes, strict=True)
  )


def _parts(chosen: Layout, tokens: int, dtype: jnp.dtype) -> list[Part]:
  """Returns the heads of a block, in the order in which they are computed."""
  # TPU v2 and v3 only multiply float32 values, which they round to bfloat16.
  old = sharding.device().device_kind in ('TPU v2', 'TPU v3')
  operand = jnp.dtype(jnp.float32) if old else dtype
  head, tile = chosen.head, chosen.tile(tokens)
  return [
    Part(
      slice(i, i + head * chosen.together),
      chosen.together,
      tokens,
      tile,
      operand,
    )
    for i in range(0, chosen.lanes, head * chosen.together)
  ]


def _blocks(
  chosen: Layout, examples: int, dtype: jnp.dtype, tokens: int
) -> tuple[Callable[[int], pl.BlockSpec], list[pl.BlockSpec]]:
  """Returns which blocks of arrays with examples are in memory at a time.

  Args:
    chosen: layout of the heads.
    examples: number of examples of a block.
    dtype: dtype of the arrays.
    tokens: number of tokens.

  Returns:
    A function from a number of rows to the block of all heads, and the blocks
    of an operand, of which there are `Layout.columns`.
  """
  # Usually, a block is loaded and another one is stored during a computation.
  one_buffer = chosen.columns > 1 or tokens * dtype.itemsize > _ONE_BUFFER
  buffers = dict(pipeline_mode=pl.Buffered(1)) if one_buffer else {}
  rows = padded(tokens, chosen.tile(tokens))

  def of_example(rows: int) -> pl.BlockSpec:
    shape = (examples, rows, chosen.lanes)
    return pl.BlockSpec(shape, lambda j, i, _: (i, 0, j), **buffers)

  def of_head(column: int) -> pl.BlockSpec:
    """Returns one of the two registers of lanes that contain a head."""
    last = chosen.lanes // LANES - 1

    def index(j: Any, i: Any, part: Any) -> tuple[Any, ...]:
      within = jnp.minimum(part * chosen.head // LANES + column, last)
      return i, 0, j * (last + 1) + within

    return pl.BlockSpec((examples, rows, LANES), index, **buffers)

  if chosen.columns == 1:
    return of_example, [of_example(rows)]
  return of_example, [of_head(column) for column in range(chosen.columns)]


def _with_width(
  x: Float[Array, 'n rows d'], width: int
) -> Float[Array, 'n rows width']:
  """Changes the size of the last axis, by cropping or by adding zeros."""
  more = max(width - x.shape[-1], 0)
  return jnp.pad(x, [(0, 0), (0, 0), (0, more)])[..., :width]


def _on_block(
  kernel: Callable[..., None],
  parts: list[Part],
  *,
  examples: int,
  first_offset: int,
  num_inputs: int,
  num_outputs: int,
  columns: int,
) -> Callable[..., None]:
  """Returns a function that runs a kernel for a block of examples and heads.

  Args:
    kernel: `forward` or `backward`.
    parts: the heads of the block. Each is a step of the grid, so that they
      share their memory.
    examples: number of examples of the block.
    first_offset: index of the first offset in the inputs, after the blocks of
      operands and biases.
    num_inputs: number of all inputs.
    num_outputs: number of outputs, the last of which is the gradient of the
      offsets if there are five.
    columns: number of blocks of each operand, see `Layout`.
  """

  def run_block(*refs: Ref) -> None:
    end = num_inputs + num_outputs
    ins, outs, sums = refs[:num_inputs], refs[num_inputs:end], refs[end:]
    offsets, d_relative = ins[first_offset:], outs[4:]
    if d_relative:  # zero before the first example

      @pl.when((pl.program_id(1) == 0) & (pl.program_id(2) == 0))
      def _():
        d_relative[0][...] = jnp.zeros(d_relative[0].shape, jnp.float32)

    def run_part(part: Part) -> None:
      for i in range(examples):
        # Biases and offsets of heads have one row for all examples.
        def row(refs: Sequence[Ref], i: int = i) -> list[Ref]:
          return [ref.at[min(i, ref.shape[0] - 1)] for ref in refs]

        added = Offsets(*row(offsets)) if offsets else None
        if added and d_relative:
          added = added._replace(d_relative=row(d_relative)[0])
        *blocks, bias = row(ins[:first_offset])
        operands = [
          blocks[start : start + columns]
          for start in range(0, len(blocks), columns)
        ]
        kernel(*operands, bias, *row(outs[:4]), *sums, part, added)

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
  gradients: bool, shape: tuple[int, ...], itemsize: int, head: int
) -> pl.CostEstimate:
  """Returns the cost of a kernel, including that of padding.

  Fewer than 128 rows count as 128, because loading 128 rows into the matrix
  unit takes as long as multiplying 128 rows. Moving a head between lanes, if
  its channels do not divide 128, takes about as long as its exponentials. In
  long sequences, products hide about half of the exponentials
  (benchmarks/kernels.py).

  Args:
    gradients: whether the kernel is that of the backward pass.
    shape: shape of the queries, `[n, t, d]`.
    itemsize: bytes per entry of the queries.
    head: channels of a head.
  """
  # Matrix products, and arrays [n, t, d] that are read or written.
  products, arrays = (5, 7) if gradients else (2, 4)
  n, tokens, width = shape
  heads = n * width // head
  rows, columns = (padded(tokens, side) for side in (SUBLANES, LANES))
  exponentials = heads * rows * columns
  if LANES % head:
    exponentials *= 2
  if tokens > _LONG_TOKENS:
    exponentials //= 2
  return pl.CostEstimate(
    flops=heads * products * 2 * max(rows, LANES) * columns * LANES,
    transcendentals=exponentials,
    bytes_accessed=arrays * math.prod(shape) * itemsize,
  )
