"""Builds a Vision Transformer from the keys of a config's `model` section."""

from typing import Any

import jax.numpy as jnp

from vit_jax.config import plugins
from vit_jax.errors import UserError, check_range
from vit_jax.models.attention.multi_head import IMPLEMENTATIONS
from vit_jax.models.layers import transformer
from vit_jax.models.vit import sizes as sizes_lib
from vit_jax.models.vit.module import ViT

_CHOICES = {
  'pool': ('token', 'gap', 'map'),
  'gelu': ('tanh', 'exact'),
  'remainder': ('error', 'drop'),
  'dtype': ('bfloat16', 'float32'),
  'attention': IMPLEMENTATIONS,
  'remat': tuple(transformer.REMAT_POLICIES),
}
_MAX_SIZE = 2**31 - 1  # XLA's dimensions


@plugins.operational('remat', 'unroll', 'attention')
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
  pool: str = 'token',
  pre_logits: bool = False,
  head_bias: float = 0.0,
  dropout: float = 0.0,
  drop_path: float = 0.0,
  gelu: str = 'tanh',
  remainder: str = 'error',
  dtype: str = 'bfloat16',
  attention: str = 'auto',
  remat: str = 'none',
  unroll: int = 1,
) -> ViT:
  """Builds a Vision Transformer.

  Args:
    num_classes: outputs of the head; 0 for none.
    variant: 'Ti|S|B|L|H|g / 8|14|16|32', for example 'L/16' (Table 1); sizes
      given explicitly take precedence over it.
    patch_size: side of a patch in pixels; with it `width` of the residual
      stream, `depth` (layers), `mlp_dim` (hidden units) and `num_heads`.
    pool: 'token' (class token), 'gap' (mean of all) or 'map' (attention).
    pre_logits: a dense layer of `width` with tanh before the head.
    head_bias: start value of the head's bias (-10 with a sigmoid loss).
    dropout: rate, where the paper puts it (section 4.1 and appendix B.1).
    drop_path: rate at the last layer; grows linearly from 0 at the first.
    gelu: 'tanh' (the official JAX models) or 'exact' (timm, Hugging Face).
    remainder: pixels beyond the last whole patch: 'error', or 'drop' (H/14 at
      384 px is 27x27 patches with 6 pixels dropped).
    dtype: of computation; parameters are float32 always.
    attention: by kernels 'auto' (on TPUs, where they apply), 'kernel' or 'xla'.
    remat: what the backward pass recomputes: 'none' (but attention weights,
      always), 'full' (all), or 'dots' (all but products of weight matrices).
    unroll: layers unrolled in each step of the scan, all if there are fewer.

  Raises:
    UserError: unknown variant or choice, a size that is missing, or a number
      outside its range.
  """
  explicit = (patch_size, width, depth, mlp_dim, num_heads)
  return _checked(
    sizes=sizes_lib.of(variant, explicit),
    choices=dict(pool=pool, gelu=gelu, remainder=remainder)
    | dict(dtype=dtype, attention=attention, remat=remat),
    rates=dict(dropout=dropout, drop_path=drop_path),
    num_classes=num_classes,
    has_pre_logits=pre_logits,
    head_bias=head_bias,
    unroll=unroll,
  )


def _checked(
  sizes: dict[str, Any],
  choices: dict[str, str],
  rates: dict[str, float],
  unroll: int,
  **others: Any,
) -> ViT:
  """The model, if everything about it is possible."""
  missing = [name for name in sizes_lib.NAMES if name not in sizes]
  if missing:
    raise UserError(
      f'the model lacks {", ".join(missing)}: set model.variant (for '
      "example 'B/16') or give these sizes."
    )
  for key, size in (sizes | dict(unroll=unroll)).items():
    check_range(f'model.{key}', size, at_least=1, at_most=_MAX_SIZE)
  if sizes['width'] % sizes['num_heads']:
    raise UserError(
      f'model sizes {sizes} are impossible: num_heads must divide width.'
    )
  for key, value in choices.items():
    if value not in _CHOICES[key]:
      raise UserError(f'model.{key} is {value!r}; allowed: {_CHOICES[key]}.')
  for key, rate in rates.items():
    check_range(f'model.{key}', rate, at_least=0, below=1)
  check_range('model.head_bias', others['head_bias'])
  unroll = min(unroll, sizes['depth'])
  typed: dict[str, Any] = choices | {'dtype': jnp.dtype(choices['dtype'])}
  return ViT(**sizes, **typed, **rates, unroll=unroll, **others)
