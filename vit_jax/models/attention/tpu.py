"""Attention on TPUs by two Pallas kernels, forward and backward.

XLA writes logits `[n, h, q, k]` to memory and reads them in every pass. In
these kernels, the logits and weights of a few heads of an example stay in the
memory of the core. Inputs and results are `[n, t, d]`, with the heads side by
side in the last axis, so that no array has to be transposed.

The backward pass recomputes the weights from queries and keys.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from vit_jax.arrays import sharding
from vit_jax.models.attention.tpu_kernels import (
  LANES,
  SUBLANES,
  Part,
  Ref,
  backward,
  forward,
  padded,
)

_BLOCK_ROWS = 256  # maximum tokens per block of several examples
# The following limits fit into the 16 MiB of memory of a core of v2 and v3.
_MAX_TOKENS = {2: 1100, 4: 700}  # {bytes per value: tokens}
_MAX_BLOCK = 450_000  # tokens times (lanes of a block + 300), of two bytes
_MAX_SCORES = 750_000  # scores of the heads of a part, for a tile of queries
_LONG_TOKENS = 512  # see `cost`
SAVED = ('query', 'key', 'value', 'attended')


def applies(tokens: int, width: int, num_heads: int, dtype: jnp.dtype) -> bool:
  """Returns whether `attend` supports these sizes on the mesh in use.

  Args:
    tokens: number of tokens.
    width: channels of all heads together.
    num_heads: number of heads.
    dtype: dtype of queries, keys and values.
  """
  head = width // num_heads
  supported = head % SUBLANES == 0 and 32 <= head <= LANES
  blocks = width % (block_lanes(head) * sharding.axis_size('model')) == 0
  return supported and blocks and tokens <= max_tokens(head, dtype)


def max_tokens(head: int, dtype: jnp.dtype) -> int:
  """Returns the largest number of tokens for heads of `head` channels."""
  lanes, itemsize = block_lanes(head), jnp.dtype(dtype).itemsize
  most = _MAX_TOKENS[itemsize]
  if lanes > LANES:  # scores take as much memory as 300 lanes of the blocks
    most = min(most, _MAX_BLOCK * 2 // itemsize // (lanes + 300))
  return most


def block_lanes(head: int) -> int:
  """Returns the fewest lanes that consist of whole heads and registers."""
  return math.lcm(head, LANES)


def heads_together(head: int) -> int:
  """Returns the number of heads that are computed together.

  These are the heads that share 128 lanes, such as two of 64 channels. Heads
  that do not divide 128 lanes, such as those of 80 channels, are computed one
  by one.
  """
  return LANES // head if LANES % head == 0 else 1


def attend(
  projections: tuple[Float[Array, 'n t d'], ...],
  biases: tuple[Float[Array, ' d'], ...],
  num_heads: int,
) -> Float[Array, 'n t d']:
  """Computes softmax(q·k / √c) v of every head, with a float32 softmax.

  Exponentials are rounded to the dtype of the values before the product with
  the values; the result is divided by the sum of the exponentials afterwards.
  The function is differentiable once, in reverse mode.

  Args:
    projections: queries, keys and values without biases.
    biases: biases of queries, keys and values. The kernel adds them, and sums
      their gradients over blocks that are already in the memory of the core.
    num_heads: number of heads, side by side in the last axis; c = d / num_heads
      divides 128.

  Returns:
    Output tokens, in the dtype of the projections.

  Reference: equations 5 to 7 of appendix A.
  """
  return _attend(projections, biases, num_heads)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _attend(
  projections: tuple[Array, ...], biases: tuple[Array, ...], num_heads: int
) -> Any:
  return _attend_forward(projections, biases, num_heads)[0]


def _attend_forward(
  projections: tuple[Array, ...], biases: tuple[Array, ...], num_heads: int
) -> tuple[Array, tuple[Any, ...]]:
  named = tuple(map(checkpoint_name, projections, SAVED[:3]))
  bias = jnp.stack(biases)[None]  # [1, 3, d]
  (y,) = _run(forward, [*named, bias], num_heads)
  return checkpoint_name(y, SAVED[3]), (named, bias)


def _attend_backward(
  num_heads: int, residuals: tuple[Any, ...], dy: Float[Array, 'n t d']
) -> tuple[Any, ...]:
  projections, bias = residuals
  *gradients, d_bias = _run(backward, [*projections, dy, bias], num_heads)
  d_bias = d_bias.sum(axis=0).astype(bias.dtype)  # [n, 3, d] -> [3, d]
  return tuple(gradients), tuple(d_bias)


_attend.defvjp(_attend_forward, _attend_backward)


def _run(
  kernel: Callable[..., None], operands: list[Array], num_heads: int
) -> tuple[Array, ...]:
  """Runs a kernel on each device, for a block of examples and heads at a time.

  Args:
    kernel: `forward` or `backward`.
    operands: arrays `[n, t, d]`, and the stacked biases `[1, 3, d]`.
    num_heads: number of heads.
  """
  head = operands[0].shape[-1] // num_heads
  dtype = operands[0].dtype
  # TPU v2 and v3 only multiply float32 values, which they round to bfloat16.
  old = sharding.device().device_kind in ('TPU v2', 'TPU v3')
  operand = jnp.dtype(jnp.float32) if old else dtype

  def local(*arrays: Array) -> tuple[Array, ...]:
    n, tokens, width = arrays[0].shape
    lanes, together = block_lanes(head), heads_together(head)
    tile = tile_size(tokens, together)
    examples = examples_at_once(n, tokens, lanes)
    # Blocks consist of whole registers; rows after the last token are padding.
    shape = (examples, padded(tokens, tile), lanes)
    block = pl.BlockSpec(shape, lambda i, j, _: (i, 0, j))
    bias = pl.BlockSpec((1, 3, lanes), lambda i, j, _: (0, 0, j))
    d_bias = pl.BlockSpec((examples, 3, lanes), lambda i, j, _: (i, 0, j))
    like = jax.ShapeDtypeStruct(arrays[0].shape, dtype)
    out_shape, out_specs, scratch = (like,), (block,), []
    if kernel is backward:
      # The results are three gradients like the inputs, and the gradients of
      # the biases for each example.
      d_biases = jax.ShapeDtypeStruct((n, 3, width), jnp.float32)
      out_shape, out_specs = (like,) * 3 + (d_biases,), (block,) * 3 + (d_bias,)
      rows = padded(tokens, SUBLANES) if tile < shape[1] else SUBLANES
      scratch = [pltpu.VMEM((2, rows, LANES), jnp.float32)]
    parts = [
      Part(slice(i, i + head * together), together, tokens, tile, operand)
      for i in range(0, lanes, head * together)
    ]

    def run_part(part: Part, refs: tuple[Ref, ...], sums: tuple[Ref, ...]):
      for i in range(examples):
        # The biases have one row for all examples.
        own = [ref.at[min(i, ref.shape[0] - 1)] for ref in refs]
        kernel(*own, *sums, part)

    def run_block(*refs: Ref) -> None:
      count = len(refs) - len(scratch)
      for i, part in enumerate(parts):
        # Parts are steps of the grid, so that their memory is shared.
        compute = functools.partial(run_part, part, refs[:count], refs[count:])
        compute() if len(parts) == 1 else pl.when(pl.program_id(2) == i)(
          compute
        )

    return pl.pallas_call(
      run_block,
      out_shape=out_shape,
      grid=(n // examples, width // lanes, len(parts)),
      in_specs=[block] * (len(arrays) - 1) + [bias],
      out_specs=out_specs,
      scratch_shapes=scratch,
      cost_estimate=cost(
        kernel is backward, arrays[0].shape, dtype.itemsize, head
      ),
      compiler_params=pltpu.CompilerParams(
        dimension_semantics=('parallel', 'parallel', 'arbitrary')
      ),
      interpret=not sharding.on_tpu(),
      name=f'attention_{kernel.__name__}',
    )(*arrays)

  return sharding.per_device(local, operands, sharding.BATCH, None, 'model')


def tile_size(tokens: int, heads: int) -> int:
  """Returns the number of queries per iteration of the kernels' loop.

  Args:
    tokens: number of tokens of an example.
    heads: number of heads that are computed together.
  """
  rows, columns = padded(tokens, SUBLANES), padded(tokens, LANES)
  most = _MAX_SCORES // (heads * rows) // LANES * LANES
  if columns <= most:
    return rows
  # With more than 384 queries, other intermediate results do not fit either.
  tiles = math.ceil(columns / min(most, 384))
  return padded(math.ceil(tokens / tiles), LANES)


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
