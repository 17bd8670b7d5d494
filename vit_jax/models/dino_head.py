"""The projection head of self-distillation (arXiv 2104.14294, section 3.1)."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.arrays import sharding
from vit_jax.config import schema
from vit_jax.errors import UserError, check_choice, check_range
from vit_jax.models.backbone import DTYPES
from vit_jax.models.init import NORMAL, torch_bias
from vit_jax.models.layers import Linear, activate

_EPSILON = 1e-12  # smallest divisor in the normalization of vectors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Keys of the section `objective.head`.

  Attributes:
    outputs: number of prototypes, K in the paper.
    layers: number of dense layers, including the bottleneck, at least 1.
    hidden: units of the dense layers before the bottleneck.
    bottleneck: units of the bottleneck, the last of these layers.
    norm_last_layer: whether prototypes keep length 1. According to the authors,
      learned lengths are better for small models and unstable for large ones.
    weight_norm: whether prototypes have length 1 or learned lengths; False for
      a plain dense layer without bias (DINOv3), drawn from N(0, .02).
    dtype: dtype of products, 'bfloat16' or 'float32'; parameters, lengths and
      logits are float32.

  Raises:
    UserError: a value is not allowed.
  """

  outputs: int = 65_536
  layers: int = 3
  hidden: int = 2048
  bottleneck: int = 256
  norm_last_layer: bool = True
  weight_norm: bool = True
  dtype: str = 'bfloat16'

  def __post_init__(self):
    for key in ('outputs', 'layers', 'hidden', 'bottleneck'):
      check_range(f'objective.head.{key}', getattr(self, key), at_least=1)
    check_choice('objective.head.dtype', self.dtype, DTYPES)
    if self.norm_last_layer and not self.weight_norm:
      raise UserError(
        'objective.head.norm_last_layer=True needs weight_norm=True: set '
        'norm_last_layer=False, or leave out weight_norm=False.'
      )


class Projection(nn.Module):
  """Computes logits of prototypes from features.

  Dense layers with exact GELU between them end in a bottleneck. Its output is
  scaled to length 1 and multiplied with prototypes: the columns of
  `last/kernel`, scaled to length 1, to the learned lengths `last/gain`, or not.

  Parameters: `fc1/{kernel,bias}`, …, `last/kernel` `[bottleneck, outputs]` and,
  with learned lengths, `last/gain` `[1, outputs]`.

  Attributes:
    config: sizes and options.
  """

  config: Config

  sharding_rules = ((r'last/(kernel|gain)', -1),)

  @nn.compact
  def __call__(self, features: Float[Array, 'n d']) -> Float[Array, 'n k']:
    """Computes logits, float32, in [-1, 1] if prototypes have length 1.

    Args:
      features: features of the backbone.
    """
    x, config, dtype = features, self.config, jnp.dtype(self.config.dtype)
    widths = [config.hidden] * (config.layers - 1) + [config.bottleneck]
    for number, width in enumerate(widths, 1):
      if number > 1:  # between layers only, not after the bottleneck
        x = activate(x, 'exact')
      x = Linear(
        (width,),
        kernel_init=NORMAL,
        dtype=dtype,
        name=f'fc{number}',
      )(x)
    last = Prototypes(
      config.outputs,
      config.weight_norm,
      config.weight_norm and not config.norm_last_layer,
      dtype,
      name='last',
    )
    return last(unit(x, axis=-1))


class Prototypes(nn.Module):
  """A dense layer without bias, whose columns are the prototypes.

  With weight normalization (arXiv 1602.07868) columns have length 1 or a
  learned length. The length of the columns of `kernel` then has no effect, and
  their gradients are orthogonal to them.

  Attributes:
    outputs: number of prototypes.
    weight_norm: whether columns are normalized.
    learned_lengths: whether normalized columns have learned lengths.
    dtype: dtype of the product.
  """

  outputs: int
  weight_norm: bool
  learned_lengths: bool
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x: Float[Array, 'n d']) -> Float[Array, 'n k']:
    shape = x.shape[-1], self.outputs
    # PyTorch initializes dense layers like their biases: ±1 / √inputs.
    init = torch_bias(shape[0]) if self.weight_norm else NORMAL
    kernel: Any = self.param('kernel', init, shape)
    if self.weight_norm:
      kernel = unit(kernel, axis=0)
    if self.learned_lengths:
      # `gain` has two axes, as in the authors' code, so that weight
      # decay applies.
      ones = nn.initializers.ones
      kernel *= self.param('gain', ones, (1, self.outputs))
    kernel = sharding.constrain(kernel.astype(self.dtype), None, 'model')
    logits = jax.lax.dot_general(
      x.astype(self.dtype),
      kernel,
      (((1,), (0,)), ((), ())),
      preferred_element_type=jnp.float32,
    )
    return sharding.constrain(logits, sharding.BATCH, 'model')


def unit(x: Float[Array, '...'], axis: int) -> Float[Array, '...']:
  """Scales vectors to length 1, in float32.

  Args:
    x: array of vectors.
    axis: axis along which lengths are computed.
  """
  x = x.astype(jnp.float32)
  square = jnp.sum(jnp.square(x), axis=axis, keepdims=True)
  return x * jax.lax.rsqrt(jnp.maximum(square, _EPSILON**2))


@schema.keyed_by(Config)
def Head(**keys: Any) -> Projection:  # noqa: N802 (the fixed symbol)
  """Builds the projection head from the fields of `Config`."""
  return Projection(Config(**keys))
