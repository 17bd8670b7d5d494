"""Workarounds for XLA, each with its reason and its measurement.

None of these functions changes what a model computes. Without them, XLA would
store, recompute or transpose more than necessary on one kind of device.
"""

import functools
import math
import os
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.arrays import sharding

T = TypeVar('T')
_DEFAULT_ALL_REDUCE, _ALL_REDUCE_PER_DEVICE = 120 * 2**20, 128 * 2**10  # bytes


def barrier(x: T) -> T:
  """Keeps XLA from merging the users of an array with other computations.

  Without it, XLA recognizes that an expression was computed before, stores the
  first result, and does not recompute it.
  """
  return jax.lax.optimization_barrier(x)


def stored(x: Float[Array, '...']) -> Float[Array, '...']:
  """Returns the residual stream before a branch.

  The gradient of the stream is a sum over all later branches. On a CPU, it is
  stored before each branch. XLA's CPU compiler would otherwise compute the sum
  again for each branch of unrolled layers, in a time that grows with the square
  of their number. (This requires an option, see `training.compiling`.)
  """
  return x if sharding.on_tpu() or sharding.on_gpu() else barrier(x)


def stored_without_gradient(y: Float[Array, '...']) -> Float[Array, '...']:
  """Has XLA on TPUs store an activation unless it is differentiated.

  Without a backward pass, only the next product uses the activations of an MLP,
  and XLA on TPUs would compute them again for each block of its outputs.
  """
  return _stored(y) if sharding.on_tpu() else y


@jax.custom_jvp
def _stored(y: Float[Array, '...']) -> Float[Array, '...']:
  return barrier(y)


@_stored.defjvp
def _identity(
  primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
  return primals[0], tangents[0]


def recomputed(
  function: Callable[[Array], Array], x: Float[Array, '...']
) -> Float[Array, '...']:
  """Applies a function that the backward pass recomputes on GPUs.

  `x` is kept for the backward pass in any case. XLA on GPUs would write a
  second array of this size to memory in the forward pass and read it in the
  backward pass.

  Args:
    function: function of each entry, such as GELU.
    x: its argument.
  """
  return _recomputed(function, x) if sharding.on_gpu() else function(x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recomputed(function: Callable[[Array], Array], x: Array) -> Array:
  return function(x)


def _recomputed_forward(
  function: Callable[[Array], Array], x: Array
) -> tuple[Array, Array]:
  return function(x), x


def _recomputed_backward(
  function: Callable[[Array], Array], x: Array, dy: Array
) -> tuple[Array]:
  _, pull = jax.vjp(function, barrier(x).astype(jnp.float32))
  (dx,) = pull(dy.astype(jnp.float32))
  return (dx.astype(x.dtype),)


_recomputed.defvjp(_recomputed_forward, _recomputed_backward)


def as_rows(x: Float[Array, '...']) -> Float[Array, '...']:
  """Merges all axes but the last on GPUs.

  With several leading axes, XLA on GPUs transposes tokens and examples: around
  dropout, whose step of B/16 takes 9 % longer, and around the reductions of a
  LayerNorm's backward pass, which takes 9 ms of B/16's step.
  """
  return x.reshape(-1, x.shape[-1]) if sharding.on_gpu() else x


def reshaped(kernel: Float[Array, '...'], *shape: int) -> Float[Array, '...']:
  """Reshapes a kernel, and makes XLA compute its gradient in the new shape."""
  return barrier(kernel.reshape(shape))


def product(
  x: Float[Array, '...'],
  kernel: Float[Array, '...'],
  axes: int,
  dtype: jax.typing.DTypeLike,
) -> Float[Array, '...']:
  """Computes the product over the last axes of `x` and the first of `kernel`.

  Args:
    x: activations.
    kernel: parameters.
    axes: number of axes that are contracted.
    dtype: dtype of the result.
  """
  shape = (*x.shape[: x.ndim - axes], *kernel.shape[axes:])
  if not sharding.on_tpu():
    # A CPU's backward pass is up to twice as fast for two dimensions. On a
    # TPU 197 tokens do not fill tiles, and flattening would move them all.
    inputs = math.prod(kernel.shape[:axes])
    x, kernel, axes = x.reshape(-1, inputs), kernel.reshape(inputs, -1), 1
  last = tuple(range(x.ndim - axes, x.ndim))
  return jax.lax.dot_general(
    x,
    kernel,
    ((last, tuple(range(axes))), ((), ())),
    preferred_element_type=dtype,
  ).reshape(shape)


def plus_bias(
  y: Float[Array, '...'], bias: Float[Array, '...']
) -> Float[Array, '...']:
  """Adds a bias of any number of axes to a product.

  On a GPU, the sum is one of matrices, so that cuBLAS adds the bias in the
  kernel of the product.
  """
  if sharding.on_gpu() and bias.ndim > 1:
    flat = y.reshape(*y.shape[: -bias.ndim], -1) + bias.reshape(-1)
    return flat.reshape(y.shape)
  return y + bias


def options_for_unrolled(
  platform: str, num_devices: int
) -> dict[str, str | int]:
  """Returns compiler options that halve the compile time of unrolled layers.

  All unrolled layers have the same code. With these options XLA compiles it
  once and calls it. This requires that gradients are all-reduced in parts
  that are the same for each layer: 128 KiB per device, which is large enough
  to make the latency negligible.

  Args:
    platform: JAX platform; only 'tpu' has such options.
    num_devices: number of devices that exchange gradients.

  Returns:
    XLA options; options that the user sets in $LIBTPU_INIT_ARGS are left out.
  """
  if platform != 'tpu':
    return {}
  part = min(num_devices * _ALL_REDUCE_PER_DEVICE, _DEFAULT_ALL_REDUCE)
  chosen: dict[str, Any] = {
    'xla_tpu_enable_deduplicated_calls': 'ENABLED',
    'xla_jf_crs_combiner_threshold_in_bytes': part,
  }
  users = os.environ.get('LIBTPU_INIT_ARGS', '')
  return {k: v for k, v in chosen.items() if k not in users}
