"""Dense layers over any number of axes, with explicit shardings."""

import math

import flax.linen as nn
import jax
from jaxtyping import Array, Float

from vit_jax.arrays import sharding
from vit_jax.models.layers.initializers import Initializer


class Linear(nn.Module):
  """A dense layer from the last axes of its input to the axes `features`.

  The kernel `[*inputs, *features]` is initialized like the flattened matrix. It
  is gathered over the mesh axis `fsdp` where it is used.

  Attributes:
    features: sizes of the new axes.
    inputs: sizes of the axes that are contracted; None for the last
      `input_axes` axes of the input.
    input_axes: number of axes that are contracted, if `inputs` is None.
    flat: whether the new axes are returned as one axis.
    model_dim: negative index of the kernel axis that stays split over the mesh
      axis `model`; None if there is no such axis.
    kernel_init: initializer of the flattened kernel.
    bias_init: initializer of the bias.
    dtype: dtype of the computation.
    out_dtype: dtype of the result; None for `dtype`.
  """

  features: tuple[int, ...]
  inputs: tuple[int, ...] | None = None
  input_axes: int = 1
  flat: bool = False
  model_dim: int | None = None
  kernel_init: Initializer = nn.initializers.xavier_uniform()
  bias_init: Initializer = nn.initializers.zeros_init()
  dtype: jax.typing.DTypeLike = 'float32'
  out_dtype: jax.typing.DTypeLike | None = None

  def __call__(self, x: Float[Array, '...']) -> Float[Array, '...']:
    """Applies the layer.

    Args:
      x: array whose last axes are `inputs`, or one axis of their product.
    """
    y, bias = self.product(x)
    if sharding.on_gpu() and len(self.features) > 1:
      # The sum is one of matrices, so that cuBLAS adds the bias in the kernel
      # of the product.
      flat = y.reshape(*y.shape[: -len(self.features)], -1) + bias.reshape(-1)
      return flat.reshape(y.shape)
    return y + bias

  @nn.compact
  def product(
    self, x: Float[Array, '...']
  ) -> tuple[Float[Array, '...'], Float[Array, '...']]:
    """Returns the product with the kernel and the bias, without adding them."""
    inputs = self.inputs or x.shape[-self.input_axes :]
    matrix = math.prod(inputs), math.prod(self.features)

    def init(key: Array) -> Array:
      return self.kernel_init(key, matrix).reshape(*inputs, *self.features)

    kernel = self.param('kernel', init)
    bias = self.param('bias', self.bias_init, self.features)
    spec: list[str | None] = [None] * kernel.ndim
    if self.model_dim is not None:
      spec[self.model_dim] = 'model'
    # The cast comes first, so that `fsdp` gathers half as many bytes.
    kernel = sharding.constrain(kernel.astype(self.dtype), *spec)
    out_spec = spec[len(inputs) :]
    out_dtype = self.out_dtype or self.dtype
    bias = sharding.constrain(bias.astype(out_dtype), *out_spec)
    if self.flat:
      kernel = _reshaped(kernel, *inputs, matrix[1])
      bias, out_spec = bias.reshape(-1), out_spec[:1]
    x, in_dims = x.astype(self.dtype), len(inputs)
    if x.shape[-in_dims:] != inputs:
      kernel = _reshaped(kernel, matrix[0], *kernel.shape[in_dims:])
      in_dims = 1
    leading, features = x.shape[: x.ndim - in_dims], kernel.shape[in_dims:]
    if not sharding.on_tpu():
      # A CPU's backward pass is up to twice as fast for two dimensions. On a
      # TPU 197 tokens do not fill tiles, and flattening would move them all.
      x, kernel, in_dims = x.reshape(-1, matrix[0]), kernel.reshape(matrix), 1
    last = tuple(range(x.ndim - in_dims, x.ndim))
    y = jax.lax.dot_general(
      x,
      kernel,
      ((last, tuple(range(in_dims))), ((), ())),
      preferred_element_type=out_dtype,
    ).reshape(*leading, *features)
    batch = [sharding.BATCH] + [None] * (y.ndim - len(out_spec) - 1)
    return sharding.constrain(y, *batch, *out_spec), bias


def _reshaped(kernel: Array, *shape: int) -> Array:
  """Reshapes a kernel.

  The barrier makes XLA compute the gradient in the new shape, too.
  """
  return jax.lax.optimization_barrier(kernel.reshape(shape))
