"""Config of the Vision Transformer."""

import dataclasses
from typing import Annotated

from vit_jax.config import schema
from vit_jax.config.schema import Nested, Section
from vit_jax.errors import UserError, check_choice
from vit_jax.models import backbone
from vit_jax.models.attention.multi_head import IMPLEMENTATIONS
from vit_jax.models.backbone import BackboneConfig
from vit_jax.models.layers.norm import EPSILON
from vit_jax.models.layers.pixels import STATISTICS
from vit_jax.models.layers.positions import KINDS
from vit_jax.models.vit import sizes as sizes_lib

STEM = Nested('vit_jax.models.stems.{name}:Stem')


@schema.operational('remat', 'unroll', 'attention')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(BackboneConfig):
  """Keys of the config's `model` section for a Vision Transformer.

  Attributes:
    variant: name such as 'L/16' (Table 1): Ti, S, B, L, H or g, and a patch
      size of 8, 14, 16 or 32. Hybrids (Table 3): 'R50+…/16', 'R50+…/32',
      'R26+…/32' and 'R+…/16', for example 'R50+B/16'. Sizes that are set
      explicitly take precedence.
    stem: config section of the layers between the images and the patches; None
      for the stem of the variant, if it is a hybrid, or else no stem.
    patch_size: side of a patch, in pixels or, with a stem, in positions of the
      stem's map.
    width: channels of the residual stream; a multiple of `num_heads`.
    depth: number of layers.
    mlp_dim: hidden units of an MLP.
    num_heads: number of attention heads.
    pool: source of the features: 'token' (class token), 'gap' (mean of the
      patch tokens) or 'map' (attention pooling).
    fc_norm: whether features are the mean of the patch tokens (even for the
      pool 'token'), and the last LayerNorm is applied to this mean instead of
      the tokens (fine-tuning in MAE and BEiT). With the pool 'token' there is
      still a class token, but it is not used for features. Fine-tuning does not
      take the value of this key from the weights, and initializes this
      LayerNorm from scratch.
    pre_logits: whether a dense layer of `width` units with tanh precedes the
      head.
    dropout: dropout rate, applied as in section 4.1 and appendix B.1.
    drop_path: drop-path rate of the last layer. The rate changes linearly with
      depth.
    drop_path_first: drop-path rate of the first layer; equal to `drop_path` for
      one rate in all layers (DeiT-III).
    gelu: 'tanh' (official JAX models), 'exact' (timm, Hugging Face) or 'quick'
      (x·σ(1.702 x), the first CLIP models).
    gated: whether SwiGLU with `mlp_dim` hidden units replaces GELU (the largest
      model of DINOv2).
    norm_eps: epsilon of all LayerNorms.
    pre_norm: whether a LayerNorm precedes the first layer (CLIP).
    qk_norm: whether a LayerNorm is applied to queries and keys of each head.
    layer_scale: initial value of a factor per channel of each residual branch
      (1e-4 in DeiT-III, 1e-5 in DINOv2); None for no such factors.
    registers: number of extra tokens whose outputs are not used.
    distilled: whether the model has a distillation token with a head of its
      own, which learns from teacher targets (DeiT). Logits are the mean of both
      heads; `want=('heads',)` returns each.
    position: 'learned' (1-D), '2d' (learned, half of the channels for the row
      and half for the column), 'relative' (learned 1-D offsets, in attention),
      'sincos2d' (fixed, as in big_vision), 'sincos2d_mae' (fixed, as in MAE),
      'rope2d' (rotations, as in DINOv3) or 'none'. Appendix D.4 compares
      'learned', '2d', 'relative' and 'none'.
    position_at: 'stem' (added once, before the first layer), 'layers' (every
      layer has its own) or 'shared' (all layers use the same); None for 'stem',
      or 'layers' if `position` is 'relative'.
    prefix_positions: whether class token, distillation token and registers also
      have learned positions; `no_embed_class` in timm is the opposite. These
      tokens have no positions of other kinds, except that relative offsets
      count all tokens.
    remainder: treatment of pixels after the last whole patch: 'error' or 'drop'
      (H/14 at 384 pixels then has 27x27 patches and drops 6 pixels).
    start_values: initialization: 'authors' (official JAX models), 'mae' or
      'trunc_normal'. 'mae' draws the class token from N(0, .02) and the patch
      embedding from Xavier's uniform distribution; query, key and value are
      initialized as one matrix [d, 3 d]. (The MLP biases are 0 in the code of
      MAE, and N(0, 1e-6) here.) 'trunc_normal' is the initialization of DeiT
      and DeiT-III: N(0, .02) for all matrices, including the heads, and for all
      tokens; biases are 0; the patch embedding is uniform, as PyTorch
      initializes a convolution.
    pixels: units of the pixels that are cut into patches: 'symmetric' ([-1, 1],
      as a model receives them) or 'imagenet' (the model normalizes them by
      ImageNet's mean and standard deviation, like recipes from PyTorch code).
    attention: implementation of attention: 'auto' (kernels where they apply, on
      TPUs and GPUs), 'kernel' (kernels or an error) or 'xla'.

  Raises:
    UserError: a variant or choice is unknown, a size is missing, a number is
      out of range, or options exclude each other.
  """

  variant: str | None = None
  # A section is a dict, which cannot be hashed.
  stem: Annotated[Section | None, STEM] = dataclasses.field(
    default=None, hash=False
  )
  patch_size: backbone.Size = backbone.OF_VARIANT
  width: backbone.Size = backbone.OF_VARIANT
  depth: backbone.Size = backbone.OF_VARIANT
  mlp_dim: backbone.Size = backbone.OF_VARIANT
  num_heads: backbone.Size = backbone.OF_VARIANT
  pool: str = 'token'
  fc_norm: bool = False
  pre_logits: bool = False
  dropout: float = 0.0
  drop_path: float = 0.0
  drop_path_first: float = 0.0
  gelu: str = 'tanh'
  gated: bool = False
  norm_eps: float = EPSILON
  pre_norm: bool = False
  qk_norm: bool = False
  layer_scale: float | None = None
  registers: int = 0
  distilled: bool = False
  position: str = 'learned'
  position_at: str | None = None
  prefix_positions: bool = True
  remainder: str = 'error'
  start_values: str = 'authors'
  pixels: str = 'symmetric'
  attention: str = 'auto'

  def __post_init__(self):
    super().__post_init__()
    sizes = sizes_lib.of_variant(self.variant)
    self.complete(sizes_lib.NAMES, sizes, 'B/16')
    if self.stem is None:
      object.__setattr__(self, 'stem', sizes_lib.stem_of(self.variant))
    self.check_choices(
      pool=('token', 'gap', 'map'),
      gelu=('tanh', 'exact', 'quick'),
      remainder=('error', 'drop'),
      start_values=('authors', 'mae', 'trunc_normal'),
      pixels=STATISTICS,
      attention=IMPLEMENTATIONS,
    )
    self.check_sizes(*sizes_lib.NAMES)
    rates = 'dropout', 'drop_path', 'drop_path_first'
    self.check_range(*rates, at_least=0, below=1)
    self.check_range('norm_eps', above=0)
    self.check_range('layer_scale', 'registers', at_least=0)
    self._check_combinations()
    self._check_positions()
    if self.position_at is None and KINDS[self.position]:
      object.__setattr__(self, 'position_at', KINDS[self.position][0])
    # With a depth of 1, nothing is unrolled; see ViT's compiler options.
    object.__setattr__(self, 'unroll', min(self.unroll, self.depth))

  @property
  def prefix(self) -> int:
    """Number of tokens that precede the patch tokens."""
    return (self.pool == 'token') + self.distilled + self.registers

  @property
  def activation(self) -> str:
    """Activation of the MLPs of the layers."""
    return 'swiglu' if self.gated else self.gelu

  @property
  def head_dim(self) -> int:
    """Channels of an attention head."""
    return self.width // self.num_heads

  def _check_combinations(self) -> None:
    self.check_heads(self.width, self.num_heads)
    if self.drop_path_first and not self.drop_path:
      raise UserError(
        f'model.drop_path_first is {self.drop_path_first} and model.drop_path '
        'is 0: set both.'
      )
    if self.distilled and (self.pool != 'token' or self.pre_logits):
      raise UserError(
        'model.distilled uses a class token and a distillation token: set '
        "model.pool='token' and model.pre_logits=False."
      )
    if self.fc_norm and (self.pool == 'map' or self.distilled):
      raise UserError(
        'model.fc_norm uses the mean of the patch tokens: set '
        "model.pool='token' or 'gap', and model.distilled=False."
      )

    if self.stem is not None and self.pixels != 'symmetric':
      # Such weights could not be converted to pixels in [-1, 1]: a stem pads
      # its input with zeros, which mean another color in other units.
      raise UserError(
        f'model.pixels is {self.pixels!r}, but a stem receives pixels in '
        "[-1, 1]: set model.pixels='symmetric'."
      )

  def _check_positions(self) -> None:
    kind, at = self.position, self.position_at
    check_choice('model.position', kind, KINDS)
    if at is not None and at not in KINDS[kind]:
      allowed = f'allowed: {", ".join(KINDS[kind])}'
      raise UserError(
        f'model.position_at is {at!r} and model.position is {kind!r}; '
        f'{allowed if KINDS[kind] else "leave position_at out"}.'
      )
    if not self.prefix_positions and kind != 'learned':
      raise UserError(
        'model.prefix_positions=False requires learned positions; '
        f'model.position is {kind!r}.'
      )
    # '2d' has two halves; the others have sines and cosines of two coordinates.
    for name, kinds, size, divisor in (
      ('width', ('2d',), self.width, 2),
      ('width', ('sincos2d', 'sincos2d_mae'), self.width, 4),
      ('width of a head', ('rope2d',), self.head_dim, 4),
    ):
      if kind in kinds and size % divisor:
        raise UserError(
          f'model.position={kind!r} needs a {name} that is a multiple of '
          f'{divisor}; it is {size}.'
        )
