"""Builds an Axial-ViT from the keys of a config's `model` section."""

from typing import Any

import jax.numpy as jnp

from vit_jax.config import plugins
from vit_jax.errors import UserError, check_range
from vit_jax.models.axial_vit.module import AxialViT
from vit_jax.models.layers import transformer
from vit_jax.models.vit import sizes as sizes_lib

_CHOICES = {
  'gelu': ('tanh', 'exact'),
  'dtype': ('bfloat16', 'float32'),
  'remat': tuple(transformer.REMAT_POLICIES),
}
_MAX_SIZE = 2**31 - 1  # XLA's dimensions


@plugins.operational('remat', 'unroll')
def Model(  # noqa: N802 (the fixed symbol that a config's name resolves to)
  num_classes: int,
  /,
  *,
  variant: str | None = None,
  patch_size: int | None = None,
  width: int | None = None,
  depth: int | None = None,
  mlp_dim: int | None = None,
  num_heads: int | None = None,
  head_bias: float = 0.0,
  dropout: float = 0.0,
  gelu: str = 'tanh',
  dtype: str = 'bfloat16',
  remat: str = 'none',
  unroll: int = 1,
) -> AxialViT:
  """Builds an Axial-ViT.

  Args:
    num_classes: outputs of the head; 0 for none.
    variant: of the ViT that it is made from, for example 'B/16' (Table 1);
      sizes given explicitly take precedence over it.
    patch_size: side of a patch in pixels; with it `width`, even, `depth` (pairs
      of blocks), `mlp_dim` and `num_heads`.
    head_bias: start value of the head's bias (-10 with a sigmoid loss).
    dropout: rate, where a ViT has it.
    gelu: 'tanh' or 'exact'.
    dtype: of computation; parameters are float32 always.
    remat: what the backward pass recomputes: 'none' (but attention weights,
      always), 'full' (all), or 'dots' (all but products of weight matrices).
    unroll: pairs unrolled in each step of the scan, all if there are fewer.

  Raises:
    UserError: unknown variant or choice, a size that is missing, or a number
      outside its range.
  """
  explicit = (patch_size, width, depth, mlp_dim, num_heads)
  return _checked(
    sizes=sizes_lib.of(variant, explicit),
    choices=dict(gelu=gelu, dtype=dtype, remat=remat),
    unroll=unroll,
    num_classes=num_classes,
    head_bias=head_bias,
    dropout=dropout,
  )


def _checked(
  sizes: dict[str, int], choices: dict[str, str], unroll: int, **others: Any
) -> AxialViT:
  """The model, if everything about it is possible."""
  missing = [name for name in sizes_lib.NAMES if name not in sizes]
  if missing:
    raise UserError(
      f'the model lacks {", ".join(missing)}: set model.variant (for '
      "example 'B/16') or give these sizes. A fine-tuning "
      'takes them from its weights: python -m vit_jax.finetune.'
    )
  for key, size in (sizes | dict(unroll=unroll)).items():
    check_range(f'model.{key}', size, at_least=1, at_most=_MAX_SIZE)
  if sizes['width'] % sizes['num_heads'] or sizes['width'] % 2:
    raise UserError(
      f'model sizes {sizes} are impossible: num_heads and 2 must divide width.'
    )
  for key, value in choices.items():
    if value not in _CHOICES[key]:
      raise UserError(f'model.{key} is {value!r}; allowed: {_CHOICES[key]}.')
  check_range('model.dropout', others['dropout'], at_least=0, below=1)
  check_range('model.head_bias', others['head_bias'])
  typed: dict[str, Any] = choices | {'dtype': jnp.dtype(choices['dtype'])}
  unroll = min(unroll, sizes['depth'])
  return AxialViT(**sizes, **typed, **others, unroll=unroll)
