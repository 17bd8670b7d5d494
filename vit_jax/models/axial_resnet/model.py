"""Builds an AxialResNet from the keys of a config's `model` section."""

import jax.numpy as jnp

from vit_jax.config import plugins
from vit_jax.errors import UserError, check_range
from vit_jax.models.axial_resnet.module import WIDTH, AxialResNet
from vit_jax.models.layers import residual

DEPTHS = {'R50': (3, 4, 6, 3)}  # appendix D.6 has this one
_CHOICES = {
  'dtype': ('bfloat16', 'float32'),
  'remat': residual.REMAT,
}


@plugins.operational('remat', 'unroll')
def Model(  # noqa: N802 (the fixed symbol that a config's name resolves to)
  num_classes: int,
  /,
  *,
  variant: str | None = None,
  depths: tuple[int, ...] | None = None,
  num_heads: int = 8,
  head_bias: float = 0.0,
  dtype: str = 'bfloat16',
  remat: str = 'none',
  unroll: int = 1,
) -> AxialResNet:
  """Builds an AxialResNet.

  Args:
    num_classes: outputs of the head; 0 for none.
    variant: 'R50'; `depths` given explicitly take precedence over it.
    depths: units in each stage.
    num_heads: of attention in all stages, as in "Axial-DeepLab".
    head_bias: start value of the head's bias (-10 with a sigmoid loss).
    dtype: of computation; parameters are float32 always.
    remat: what the backward pass recomputes: 'none' (but attention weights,
      always), 'full' (all of a unit), or 'dots' (all but convolutions, what
      attention takes and gives, and statistics).
    unroll: units unrolled in each step of a stage's scan, all if there are
      fewer.

  Raises:
    UserError: unknown variant or choice, no depths, or a number outside its
      range.
  """
  if variant is not None and variant not in DEPTHS:
    raise UserError(
      f'no AxialResNet is called {variant!r}; allowed: {", ".join(DEPTHS)}.'
    )
  if depths is None and variant is None:
    raise UserError(
      "the model lacks depths: set model.variant (to 'R50') or give them."
    )
  depths = tuple(depths or DEPTHS[variant or ''])
  residual.check_depths('model.depths', depths, at_least=1)
  check_range('model.num_heads', num_heads, at_least=1, at_most=WIDTH // 2)
  if WIDTH % (2 * num_heads):
    raise UserError(
      f'model.num_heads is {num_heads}; twice that must divide {WIDTH}.'
    )
  check_range('model.unroll', unroll, at_least=1)
  check_range('model.head_bias', head_bias)
  for key, value in dict(dtype=dtype, remat=remat).items():
    if value not in _CHOICES[key]:
      raise UserError(f'model.{key} is {value!r}; allowed: {_CHOICES[key]}.')
  return AxialResNet(
    num_classes,
    depths,
    num_heads,
    head_bias=head_bias,
    dtype=jnp.dtype(dtype),
    remat=remat,
    unroll=unroll,
  )
