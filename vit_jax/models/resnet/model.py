"""Builds a ResNet from the keys of a config's `model` section."""

from typing import Any

import jax.numpy as jnp

from vit_jax.config import plugins
from vit_jax.errors import UserError, check_range
from vit_jax.models.layers import residual
from vit_jax.models.resnet import sizes
from vit_jax.models.resnet.module import ResNet

_CHOICES = {
  'dtype': ('bfloat16', 'float32'),
  'remat': residual.REMAT,
}
_MAX_WIDTH_FACTOR = 1024


@plugins.operational('remat', 'unroll')
def Model(  # noqa: N802 (the fixed symbol that a config's name resolves to)
  num_classes: int,
  /,
  *,
  variant: str | None = None,
  depths: tuple[int, ...] | None = None,
  width_factor: int | None = None,
  head_bias: float = 0.0,
  dtype: str = 'bfloat16',
  remat: str = 'none',
  unroll: int = 1,
) -> ResNet:
  """Builds a ResNet, as BiT has it.

  Args:
    num_classes: outputs of the head; 0 for none.
    variant: 'R50|R101|R152|R200 x width', for example 'R50x1' (Table 3); sizes
      given explicitly take precedence over it.
    depths: units in each stage.
    width_factor: of all channels; 1 is 64 to 2048.
    head_bias: start value of the head's bias (-10 with a sigmoid loss).
    dtype: of computation; parameters are float32 always.
    remat: what the backward pass recomputes: 'none', 'full' (all of a unit), or
      'dots' (all but convolutions and statistics: norms and rectifiers).
    unroll: units unrolled in each step of a stage's scan, all if there are
      fewer.

  Raises:
    UserError: unknown variant or choice, a size that is missing, or a number
      outside its range.
  """
  explicit = dict(depths=depths, width_factor=width_factor)
  given = {key: size for key, size in explicit.items() if size is not None}
  chosen: dict[str, Any] = sizes.of_variant(variant) | given
  missing = [name for name in explicit if name not in chosen]
  if missing:
    raise UserError(
      f'the model lacks {", ".join(missing)}: set model.variant (for example '
      "'R50x1') or give these sizes. A fine-tuning "
      'takes them from its weights: python -m vit_jax.finetune.'
    )
  residual.check_depths('model.depths', chosen['depths'], at_least=1)
  factor, most = chosen['width_factor'], _MAX_WIDTH_FACTOR
  check_range('model.width_factor', factor, at_least=1, at_most=most)
  check_range('model.unroll', unroll, at_least=1)
  check_range('model.head_bias', head_bias)
  for key, value in dict(dtype=dtype, remat=remat).items():
    if value not in _CHOICES[key]:
      raise UserError(f'model.{key} is {value!r}; allowed: {_CHOICES[key]}.')
  return ResNet(
    num_classes,
    tuple(chosen['depths']),
    chosen['width_factor'],
    head_bias=head_bias,
    dtype=jnp.dtype(dtype),
    remat=remat,
    unroll=unroll,
  )
