"""The projection head of self-distillation (arXiv 2104.14294, section 3.1)."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.arrays import sharding
from vit_jax.errors import UserError, check_range
from vit_jax.models.layers.linear import Initializer, Linear
from vit_jax.models.layers.transformer import gelu

_DTYPES = ('bfloat16', 'float32')
_EPSILON = 1e-12  # smallest length that is divided by


class Projection(nn.Module):
  """From features to logits of prototypes.

  Dense layers with GELU (the exact one) between them, the last of which is the
  bottleneck; its output scaled to length 1; and its products with prototypes
  of length 1, the columns of `last/kernel`, or of length `last/gain`.

  Parameters: `fc1/{kernel,bias}`, …, `last/kernel` `[bottleneck, outputs]` and,
  unless `norm_last_layer`, `last/gain` `[1, outputs]`.
  """

  outputs: int
  layers: int
  hidden: int
  bottleneck: int
  norm_last_layer: bool
  dtype: jnp.dtype

  sharding_rules = ((r'last/(kernel|gain)', -1),)

  @nn.compact
  def __call__(self, features: Float[Array, 'n d']) -> Float[Array, 'n k']:
    """Logits, float32; within [-1, 1] where prototypes have length 1."""
    x = features
    widths = [self.hidden] * (self.layers - 1) + [self.bottleneck]
    for number, width in enumerate(widths, 1):
      if number > 1:
        x = gelu(x, 'exact')
      x = Linear(
        (width,),
        # The authors' normal distribution is cut off at 100 deviations.
        kernel_init=nn.initializers.normal(0.02),
        dtype=self.dtype,
        name=f'fc{number}',
      )(x)
    return Prototypes(
      self.outputs, self.norm_last_layer, self.dtype, name='last'
    )(unit(x, axis=-1))


class Prototypes(nn.Module):
  """A dense layer without bias whose columns have length 1, or a learnt one.

  Weight normalisation (arXiv 1602.07868): the length of `kernel`'s columns
  does not matter, and their gradients are at right angles to them.
  """

  outputs: int
  fixed_length: bool
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x: Float[Array, 'n d']) -> Float[Array, 'n k']:
    shape = x.shape[-1], self.outputs
    # As torch starts every dense layer: uniform within 1 / √inputs.
    start = _within(shape[0] ** -0.5)
    kernel = unit(self.param('kernel', start, shape), axis=0)
    if not self.fixed_length:
      # Two axes, as in the authors' code, by which it decays.
      ones = nn.initializers.ones
      kernel *= self.param('gain', ones, (1, self.outputs))
    kernel = sharding.constrain(kernel.astype(self.dtype), None, 'model')
    logits = jax.lax.dot_general(
      *(x.astype(self.dtype), kernel, (((1,), (0,)), ((), ()))),
      preferred_element_type=jnp.float32,
    )
    return sharding.constrain(logits, sharding.BATCH, 'model')


def unit(x: Float[Array, '...'], axis: int) -> Float[Array, '...']:
  """Scaled to length 1 along an axis; float32."""
  x = x.astype(jnp.float32)
  square = jnp.sum(jnp.square(x), axis=axis, keepdims=True)
  return x * jax.lax.rsqrt(jnp.maximum(square, _EPSILON**2))


def _within(limit: float) -> Initializer:
  return lambda key, shape: jax.random.uniform(
    key, shape, minval=-limit, maxval=limit
  )


def Head(  # noqa: N802 (the fixed symbol that a section resolves to)
  *,
  outputs: int = 65_536,
  layers: int = 3,
  hidden: int = 2048,
  bottleneck: int = 256,
  norm_last_layer: bool = True,
  dtype: str = 'bfloat16',
) -> Projection:
  """Builds the head from the keys of a section.

  Args:
    outputs: prototypes, K in the paper.
    layers: dense layers up to the bottleneck, 1 or more.
    hidden: units of those before the last of them.
    bottleneck: units of the last.
    norm_last_layer: prototypes keep length 1. Learnt lengths are better for a
      small model and unstable for a large one, by the authors.
    dtype: of products; parameters, lengths and logits are float32.

  Raises:
    UserError: a value outside its range.
  """
  for key, value in (
    *(('outputs', outputs), ('layers', layers)),
    *(('hidden', hidden), ('bottleneck', bottleneck)),
  ):
    check_range(f'objective.head.{key}', value, at_least=1)
  if dtype not in _DTYPES:
    raise UserError(
      f'objective.head.dtype is {dtype!r}; allowed: {", ".join(_DTYPES)}.'
    )
  return Projection(
    outputs=outputs,
    layers=layers,
    hidden=hidden,
    bottleneck=bottleneck,
    norm_last_layer=norm_last_layer,
    dtype=jnp.dtype(dtype),
  )
