"""The MLP of a Transformer layer, and its GELU."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Key

from vit_jax.arrays import sharding
from vit_jax.models.layers.linear import Initializer, Linear
from vit_jax.models.layers.noise import dropout

SAVED = 'hidden'  # name of the hidden units, for rematerialization policies
# Coefficients of x² in `_centered_cdf`, the highest power first.
_COEFFICIENTS = (8.656e-7, -3.99648e-4, 3.7281171e-2, 0.79713306)
_MIN_CHANNELS = 1_024  # with fewer, erf is faster (benchmarks/RESULTS.md)


class Mlp(nn.Module):
  """Two dense layers with an activation and dropout between them.

  With 'swiglu' (arXiv 2002.05202) the first layer has two outputs for each
  hidden unit, `[d, 2, mlp_dim]`. The activation is the product of one output
  and the SiLU of the other.

  Attributes:
    mlp_dim: number of hidden units.
    dropout: dropout rate of the hidden units.
    activation: a kind of `gelu` ('tanh', 'exact' or 'quick') or 'swiglu'.
    dtype: dtype of the computation.
    kernel_init: initializer of both matrices.
    bias_init: initializer of both biases.
  """

  mlp_dim: int
  dropout: float
  activation: str
  dtype: jnp.dtype
  kernel_init: Initializer = nn.initializers.xavier_uniform()
  bias_init: Initializer = nn.initializers.normal(1e-6)

  @nn.compact
  def __call__(
    self, x: Float[Array, 'n t d'], key: Key[Array, ''] | None
  ) -> Float[Array, 'n t d']:
    dense = functools.partial(
      Linear,
      kernel_init=self.kernel_init,
      bias_init=self.bias_init,
      dtype=self.dtype,
    )
    has_gate = self.activation == 'swiglu'
    units = (2, self.mlp_dim) if has_gate else (self.mlp_dim,)
    # The hidden units are split over the mesh axis `model`: only the second
    # product needs communication, for a single sum.
    y = dense(features=units, model_dim=-1, name='fc1')(x)
    y = checkpoint_name(y, SAVED)
    if has_gate:
      y = jax.nn.silu(y[:, :, 0]) * y[:, :, 1]
    else:
      y = gelu(y, self.activation)
    y = dropout(y, self.dropout, key)
    if sharding.on_tpu():
      y = _stored_without_gradient(y)
    return dense(features=(x.shape[-1],), model_dim=-2, name='fc2')(y)


@jax.custom_jvp
def _stored_without_gradient(y: Float[Array, '...']) -> Float[Array, '...']:
  """Returns `y`, and has XLA store it unless `y` is differentiated.

  Without a backward pass, only fc2 uses the activations, and XLA on TPUs would
  compute them again for each block of its outputs.
  """
  return jax.lax.optimization_barrier(y)


@_stored_without_gradient.defjvp
def _identity(
  primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
  return primals[0], tangents[0]


def gelu(x: Float[Array, '...'], kind: str) -> Float[Array, '...']:
  """Computes GELU: 'exact', or approximated by 'tanh' or a sigmoid ('quick').

  In bfloat16 on TPUs, 'exact' is computed to the precision of bfloat16.

  On a GPU, the backward pass recomputes GELU from `x`, which is kept in any
  case. Otherwise XLA would write a second array of this size to memory in the
  forward pass and read it in the backward pass.
  """
  if sharding.on_gpu():
    return _gelu_of_input(x, kind)
  return _gelu(x, kind)


def _gelu(x: Float[Array, '...'], kind: str) -> Float[Array, '...']:
  if kind == 'quick':
    return x * jax.nn.sigmoid(1.702 * x)
  if kind == 'exact' and x.dtype == jnp.bfloat16:
    # `jax.nn.gelu` rounds intermediate results, with errors of up to 5 % for
    # negative values, and uses erfc, which is slower than erf on a TPU.
    wide = x.astype(jnp.float32)
    return (wide * (0.5 + 0.5 * _centered_cdf(wide))).astype(x.dtype)
  return jax.nn.gelu(x, approximate=kind == 'tanh')


def _centered_cdf(x: Float[Array, '...']) -> Float[Array, '...']:
  """Computes 2 Φ(x) - 1 = erf(x / √2), where Φ is the normal distribution.

  On a TPU, fewer operations compute it to the precision of bfloat16: for
  |x| < 4, the error of Φ is less than 0.3 %, and that of the derivative of GELU
  less than 2e-4. The coefficients were fitted to both. XLA also keeps less for
  the backward pass than with erf. This is faster, except with few channels.
  """
  if not sharding.on_tpu() or x.shape[-1] < _MIN_CHANNELS:
    return jax.lax.erf(x * 0.5**0.5)
  square = jnp.minimum(x * x, 36)  # no overflow
  polynomial = functools.reduce(lambda y, c: y * square + c, _COEFFICIENTS)
  return jnp.tanh(x * polynomial)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gelu_of_input(x: Float[Array, '...'], kind: str) -> Float[Array, '...']:
  return _gelu(x, kind)


def _gelu_forward(x: Array, kind: str) -> tuple[Array, Array]:
  return _gelu(x, kind), x


def _gelu_backward(kind: str, x: Array, dy: Array) -> tuple[Array]:
  # Without the barrier, XLA would recognize that both passes contain the same
  # expression, and not recompute it.
  wide = jax.lax.optimization_barrier(x).astype(jnp.float32)
  _, pull = jax.vjp(functools.partial(_gelu, kind=kind), wide)
  (dx,) = pull(dy.astype(jnp.float32))
  return (dx.astype(x.dtype),)


_gelu_of_input.defvjp(_gelu_forward, _gelu_backward)
