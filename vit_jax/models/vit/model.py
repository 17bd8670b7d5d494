"""Builds a Vision Transformer from the keys of a config's `model` section.

They are:
  variant: 'Ti|S|B|L|H|g / 8|14|16|32', for example 'L/16' (Table 1); sizes
    given explicitly take precedence over it. Hybrids: 'R50+…/16|32',
    'R26+…/32' and 'R+…/16', for example 'R50+B/16' (Table 3).
  stem: what images go through before they are cut into patches; none but that
    of a hybrid's variant.
  patch_size: side of a patch in pixels, or in places of the stem's map; with
    it `width` of the residual stream, `depth` (layers), `mlp_dim` (hidden
    units) and `num_heads`.
  pool: 'token' (class token), 'gap' (mean of patches) or 'map' (attention).
  fc_norm: features are the mean of the patches' tokens whatever `pool` says,
    and the last norm is that of the mean, not of the tokens before it (MAE's
    and BEiT's fine-tuning; a class token stays, and is not read). Not part of
    the architecture that a fine-tuning takes over; it starts the norm anew.
  pre_logits: a dense layer of `width` with tanh before the head.
  head_bias: start value of the head's bias (-10 with a sigmoid loss).
  dropout: rate, where the paper puts it (section 4.1 and appendix B.1).
  drop_path: rate at the last layer; changes linearly from that at the first.
  drop_path_first: rate at the first layer; that of `drop_path` for one rate in
    all (DeiT-III).
  gelu: 'tanh' (the official JAX models), 'exact' (timm, Hugging Face) or
    'quick' (x·σ(1.702 x), the first CLIP models).
  gated: SwiGLU instead of GELU, with two matrices into `mlp_dim` hidden units
    (DINOv2's largest model).
  norm_eps: ε of all LayerNorms.
  pre_norm: a LayerNorm of the tokens before the first layer (CLIP).
  qk_norm: a LayerNorm of the queries and keys of each head.
  layer_scale: start value of a factor for each channel of every branch (1e-4
    in DeiT-III, 1e-5 in DINOv2); None for no such factors.
  registers: tokens beside the class token that nothing is read from.
  distilled: a second token and head, to be taught by a teacher's labels
    (DeiT); logits are the mean of both, `want=('heads',)` gives each.
  position: 'learned' (1-D), '2d' (half a row's, half a column's), 'relative'
    (of 1-D offsets, in attention), 'sincos2d' (fixed, as in big_vision),
    'sincos2d_mae' (as in MAE), 'rope2d' (rotations, as in DINOv3) or 'none';
    appendix D.4 has the first three and none.
  position_at: 'stem' (added once, before the first layer), 'layers' (in every
    layer its own) or 'shared' (in every layer the same); None for 'stem', but
    'layers' for relative ones, which act in attention alone.
  prefix_positions: whether class token, distillation token and registers have
    learned positions too; timm's `no_embed_class` is the contrary. The other
    kinds give them none, but that relative ones count all tokens.
  remainder: pixels beyond the last whole patch: 'error', or 'drop' (H/14 at
    384 px is 27x27 patches with 6 pixels dropped).
  start_values: 'authors' (the official JAX models) or 'mae': the class token
    N(0, .02), the patch embedding Xavier-uniform, and so query, key and value,
    as one matrix [d, 3 d]; biases of the MLP remain N(0, 1e-6), there 0.
  dtype: of computation; parameters are float32 always.
  attention: by kernels 'auto' (on TPUs, where they apply), 'kernel' or 'xla'.
  remat: what the backward pass recomputes: 'none' (but attention weights,
    always), 'full' (all), or 'dots' (all but products of weight matrices).
  unroll: layers unrolled in each step of the scan, all if there are fewer.
"""

from typing import Annotated, Any

import jax.numpy as jnp

from vit_jax.config import plugins
from vit_jax.config.plugins import Nested, Section
from vit_jax.errors import UserError, check_range
from vit_jax.models.attention.multi_head import IMPLEMENTATIONS
from vit_jax.models.layers import transformer
from vit_jax.models.layers.norm import EPSILON
from vit_jax.models.layers.positions import KINDS
from vit_jax.models.vit import sizes as sizes_lib
from vit_jax.models.vit.vit import ViT

_CHOICES = {
  'pool': ('token', 'gap', 'map'),
  'gelu': ('tanh', 'exact', 'quick'),
  'remainder': ('error', 'drop'),
  'start_values': ('authors', 'mae'),
  'dtype': ('bfloat16', 'float32'),
  'attention': IMPLEMENTATIONS,
  'remat': tuple(transformer.REMAT_POLICIES),
}
_MAX_SIZE = 2**31 - 1  # XLA's dimensions
_STEM = Nested('vit_jax.models.stems.{name}:Stem')


@plugins.operational('remat', 'unroll', 'attention')
def Model(  # noqa: N802 (the fixed symbol that a config's name resolves to)
  num_classes: int,
  /,
  *,
  variant: str | None = None,
  stem: Annotated[Section | None, _STEM] = None,
  patch_size: int | None = None,
  width: int | None = None,
  depth: int | None = None,
  mlp_dim: int | None = None,
  num_heads: int | None = None,
  pool: str = 'token',
  fc_norm: bool = False,
  pre_logits: bool = False,
  head_bias: float = 0.0,
  dropout: float = 0.0,
  drop_path: float = 0.0,
  drop_path_first: float = 0.0,
  gelu: str = 'tanh',
  gated: bool = False,
  norm_eps: float = EPSILON,
  pre_norm: bool = False,
  qk_norm: bool = False,
  layer_scale: float | None = None,
  registers: int = 0,
  distilled: bool = False,
  position: str = 'learned',
  position_at: str | None = None,
  prefix_positions: bool = True,
  remainder: str = 'error',
  start_values: str = 'authors',
  dtype: str = 'bfloat16',
  attention: str = 'auto',
  remat: str = 'none',
  unroll: int = 1,
) -> ViT:
  """Builds a Vision Transformer; the module's docstring tells of its keys.

  Raises:
    UserError: unknown variant or choice, a size that is missing, a number
      outside its range, or options that exclude each other.
  """
  explicit = (patch_size, width, depth, mlp_dim, num_heads)
  return _checked(
    sizes=sizes_lib.of(variant, explicit),
    choices=dict(pool=pool, gelu=gelu, remainder=remainder)
    | dict(start_values=start_values, dtype=dtype)
    | dict(attention=attention, remat=remat),
    rates=dict(dropout=dropout, drop_path=drop_path)
    | dict(drop_path_first=drop_path_first),
    positions=(position, position_at, prefix_positions),
    options=dict(qk_norm=qk_norm, norm_eps=norm_eps, layer_scale=layer_scale)
    | dict(registers=registers, distilled=distilled, gated=gated)
    | dict(pre_norm=pre_norm, fc_norm=fc_norm),
    num_classes=num_classes,
    stem=stem or sizes_lib.stem_of(variant),
    has_pre_logits=pre_logits,
    head_bias=head_bias,
    unroll=unroll,
  )


def _checked(
  sizes: dict[str, Any],
  choices: dict[str, str],
  rates: dict[str, float],
  stem: Section | None,
  positions: tuple[str, str | None, bool],
  options: dict[str, Any],
  unroll: int,
  **others: Any,
) -> ViT:
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
  if sizes['width'] % sizes['num_heads']:
    raise UserError(
      f'model sizes {sizes} are impossible: num_heads must divide width.'
    )
  for key, value in choices.items():
    if value not in _CHOICES[key]:
      raise UserError(f'model.{key} is {value!r}; allowed: {_CHOICES[key]}.')
  for key, rate in rates.items():
    check_range(f'model.{key}', rate, at_least=0, below=1)
  _check_options(rates, options, choices['pool'], others['has_pre_logits'])
  check_range('model.head_bias', others['head_bias'])
  typed: dict[str, Any] = choices | {'dtype': jnp.dtype(choices['dtype'])}
  typed |= _positions(*positions, sizes)
  if stem is not None:
    settings = typed['dtype'], choices['remat'], unroll
    others['stem'] = plugins.build(
      _STEM.constructor(stem['name']), stem, *settings
    )
  unroll = min(unroll, sizes['depth'])
  model = ViT(**sizes, **typed, **rates, **options, unroll=unroll, **others)
  if model.attention == 'kernel' and model.beyond_kernels:
    raise UserError(
      "model.attention='kernel': kernels know nothing of "
      f"{' and '.join(model.beyond_kernels)}; 'auto' decides."
    )
  return model


def _check_options(
  rates: dict[str, float],
  options: dict[str, Any],
  pool: str,
  has_pre_logits: bool,
) -> None:
  """Raises UserError for numbers out of range, and what excludes itself."""
  if rates['drop_path_first'] and not rates['drop_path']:
    raise UserError(
      f'model.drop_path_first is {rates["drop_path_first"]}, and '
      'model.drop_path 0; give both.'
    )
  check_range('model.norm_eps', options['norm_eps'], above=0)
  check_range('model.layer_scale', options['layer_scale'], at_least=0)
  check_range('model.registers', options['registers'], at_least=0)
  if options['distilled'] and (pool != 'token' or has_pre_logits):
    raise UserError(
      'model.distilled reads a class token and a distillation token: set '
      "model.pool='token' and model.pre_logits=False."
    )
  if options['fc_norm'] and (pool == 'map' or options['distilled']):
    raise UserError(
      'model.fc_norm reads the mean of the patches: set '
      "model.pool='token' or 'gap', and model.distilled=False."
    )


def _positions(
  kind: str, at: str | None, prefix: bool, sizes: dict[str, int]
) -> dict[str, Any]:
  """Their fields, if there are such positions."""
  if kind not in KINDS:
    raise UserError(f'model.position is {kind!r}; allowed: {", ".join(KINDS)}.')
  places = KINDS[kind]
  if at is not None and at not in places:
    allowed = f'allowed: {", ".join(places)}' if places else 'leave it out'
    raise UserError(
      f'model.position_at is {at!r} and model.position {kind!r}; {allowed}.'
    )
  if not prefix and kind != 'learned':
    raise UserError(
      f"model.prefix_positions is for position='learned'; it is {kind!r}."
    )
  # Two halves, or sines and cosines of two coordinates.
  width, head = sizes['width'], sizes['width'] // sizes['num_heads']
  for name, kinds, size, divisor in (
    ('width', ('2d',), width, 2),
    ('width', ('sincos2d', 'sincos2d_mae'), width, 4),
    ('width of a head', ('rope2d',), head, 4),
  ):
    if kind in kinds and size % divisor:
      raise UserError(
        f'model.position={kind!r} needs a {name} that {divisor} divides; it is '
        f'{size}.'
      )
  default = places[0] if places else None
  return dict(position=kind, position_at=at or default, prefix_positions=prefix)
