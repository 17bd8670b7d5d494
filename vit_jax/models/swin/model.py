"""Builds a Swin Transformer from the keys of a config's `model` section."""

from typing import Any

import jax.numpy as jnp

from vit_jax.config import plugins
from vit_jax.errors import UserError, check_range
from vit_jax.models.layers import transformer
from vit_jax.models.swin import sizes as sizes_lib
from vit_jax.models.swin.module import Swin

_CHOICES = {
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
  width: int | None = None,
  depths: tuple[int, ...] | None = None,
  num_heads: int | None = None,
  window_size: int = 7,
  drop_path: float = 0.0,
  dtype: str = 'bfloat16',
  remat: str = 'none',
  unroll: int = 1,
) -> Swin:
  """Builds a Swin Transformer.

  Args:
    num_classes: outputs of the head; 0 for none.
    variant: 'T', 'S', 'B' or 'L' (section 3.3); sizes given explicitly take
      precedence over it.
    width: of the first stage; it doubles from stage to stage.
    depths: blocks of each stage, even numbers: plain and shifted windows take
      turns.
    num_heads: of the first stage; doubles likewise.
    window_size: side of a window in tokens; less where the map is smaller.
    drop_path: rate at the last block; grows linearly from 0 at the first.
    dtype: of computation; parameters are float32 always.
    remat: what the backward pass recomputes: 'none' (but attention weights,
      always), 'full' (all), or 'dots' (all but products of weight matrices).
    unroll: pairs of blocks unrolled in each step of a stage's scan, all if
      there are fewer.

  Raises:
    UserError: unknown variant or choice, a size that is missing, or a number
      outside its range.
  """
  return _checked(
    sizes=sizes_lib.of(variant, (width, depths, num_heads)),
    choices=dict(dtype=dtype, remat=remat),
    num_classes=num_classes,
    window_size=window_size,
    drop_path=drop_path,
    unroll=unroll,
  )


def _checked(
  sizes: dict[str, Any], choices: dict[str, str], **others: Any
) -> Swin:
  """The model, if everything about it is possible."""
  missing = [name for name in sizes_lib.NAMES if name not in sizes]
  if missing:
    raise UserError(
      f'the model lacks {", ".join(missing)}: set model.variant (for '
      "example 'T') or give these sizes. A fine-tuning "
      'takes them from its weights: python -m vit_jax.finetune.'
    )
  sizes = sizes | dict(depths=tuple(sizes['depths']))
  for key, number in (sizes | others).items():
    if key not in ('depths', 'num_classes', 'drop_path'):
      check_range(f'model.{key}', number, at_least=1, at_most=_MAX_SIZE)
  check_range('model.drop_path', others['drop_path'], at_least=0, below=1)
  if sizes['width'] % sizes['num_heads']:
    raise UserError(
      f'model sizes {sizes} are impossible: num_heads must divide width.'
    )
  if not sizes['depths'] or any(d < 2 or d % 2 for d in sizes['depths']):
    raise UserError(
      f'model.depths is {sizes["depths"]}; each stage needs an even number of '
      'blocks, 2 or more: one with plain windows, one with shifted ones.'
    )
  for key, value in choices.items():
    if value not in _CHOICES[key]:
      raise UserError(f'model.{key} is {value!r}; allowed: {_CHOICES[key]}.')
  typed: dict[str, Any] = choices | {'dtype': jnp.dtype(choices['dtype'])}
  return Swin(**sizes, **typed, **others)
