"""Dense layers over any axes, with explicit shardings."""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax import sharding

Initializer = Callable[..., Array]


class Linear(nn.Module):
  """A dense layer over the last `in_dims` axes, making `features` new ones.

  Kernel `[*in, *features]`, initialised as the flattened matrix would be. The
  kernel is gathered over `fsdp` at its use; axis `model_dim` of it (negative)
  stays split over the mesh's `model` axis.
  """

  features: tuple[int, ...]
  in_dims: int = 1
  model_dim: int | None = None
  kernel_init: Initializer = nn.initializers.xavier_uniform()
  bias_init: Initializer = nn.initializers.zeros_init()
  dtype: jnp.dtype = jnp.float32
  out_dtype: jnp.dtype | None = None  # of the result, `dtype` if None

  @nn.compact
  def __call__(self, x: Float[Array, '...']) -> Float[Array, '...']:
    inputs = x.shape[-self.in_dims :]
    flat = (functools.reduce(lambda a, b: a * b, inputs), _size(self.features))

    def init(key: Array) -> Array:
      return self.kernel_init(key, flat).reshape(*inputs, *self.features)

    kernel = self.param('kernel', init)
    bias = self.param('bias', self.bias_init, self.features)
    spec: list[str | None] = [None] * kernel.ndim
    if self.model_dim is not None:
      spec[self.model_dim] = 'model'
    kernel = sharding.constrain(kernel.astype(self.dtype), *spec)
    out_spec = spec[self.in_dims :]
    out_dtype = self.out_dtype or self.dtype
    bias = sharding.constrain(bias.astype(out_dtype), *out_spec)
    x, in_dims = x.astype(self.dtype), self.in_dims
    leading = x.shape[: x.ndim - in_dims]
    if not sharding.on_tpu():
      # A CPU's backward pass is up to twice as fast for two dimensions. On a
      # TPU 197 tokens do not fill tiles, and flattening would move them all.
      x, kernel, in_dims = x.reshape(-1, flat[0]), kernel.reshape(flat), 1
    last = tuple(range(x.ndim - in_dims, x.ndim))
    y = jax.lax.dot_general(
      x,
      kernel,
      ((last, tuple(range(in_dims))), ((), ())),
      preferred_element_type=out_dtype,
    ).reshape(*leading, *self.features)
    batch = [sharding.BATCH] + [None] * (y.ndim - len(out_spec) - 1)
    return sharding.constrain(y + bias, *batch, *out_spec)


def _size(shape: tuple[int, ...]) -> int:
  return functools.reduce(lambda a, b: a * b, shape, 1)
