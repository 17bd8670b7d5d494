"""The Vision Transformer (arXiv 2010.11929, section 3.1 and Table 1).

The file contains the sizes and the config, a layer (`Block`), the stack of
layers (`Encoder`) and the model (`ViT`), from the images to the logits. A copy
of it is a model of your own: edit the copy, and name its module in the config
(docs/extending.md). A new option is a field of `Config`, described under its
attributes and checked in `__post_init__`, and its use. It is listed in `OF_RUN`
if fine-tuning takes it from its own config, and not from the weights.

Parameters are float32. Matrix products and the residual stream have the dtype
of the config (bfloat16 on accelerators); products accumulate in float32.
LayerNorm statistics and softmax are float32.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Key, Shaped

from vit_jax.arrays import sharding
from vit_jax.config import schema
from vit_jax.config.schema import Nested, Section
from vit_jax.errors import UserError
from vit_jax.models import backbone, layers, positions, xla
from vit_jax.models.attention import attention as attention_lib
from vit_jax.models.attention.attention import Attention, choose
from vit_jax.models.backbone import Backbone, Images, UncheckedImages
from vit_jax.models.contract import WANTED, Leaves, Masked, Patches, Size
from vit_jax.models.init import INIT, NORMAL, Init
from vit_jax.models.layers import Linear, Mlp
from vit_jax.models.positions import NO_POSITION, Position, PositionEmbedding

Tokens = Float[Array, 'n t d']
# Attributes `learned_grid` and `offset` of `PositionEmbedding`
LearnedFor = tuple[tuple[int, int] | None, float]

# B, L, H: Table 1. Ti, S: DeiT (arXiv 2012.12877) and its successors. g:
# "Scaling Vision Transformers" (arXiv 2106.04560), Table 2.
SIZES = {
  'Ti': dict(width=192, depth=12, mlp_dim=768, num_heads=3),
  'S': dict(width=384, depth=12, mlp_dim=1536, num_heads=6),
  'B': dict(width=768, depth=12, mlp_dim=3072, num_heads=12),
  'L': dict(width=1024, depth=24, mlp_dim=4096, num_heads=16),
  'H': dict(width=1280, depth=32, mlp_dim=5120, num_heads=16),
  'g': dict(width=1408, depth=40, mlp_dim=6144, num_heads=16),
}
# Side of a patch and stem, by the parts of a variant's name before and after
# the size. As in the official code, R+Ti/16 has patches of 8x8 on a map of
# stride 4, which makes 32 pixels.
EMBEDDINGS: dict[tuple[str, str], dict[str, Any]] = {
  ('', '/8'): dict(patch_size=8),
  ('', '/14'): dict(patch_size=14),
  ('', '/16'): dict(patch_size=16),
  ('', '/32'): dict(patch_size=32),
  ('R50+', '/16'): dict(patch_size=1, stem=dict(depths=(3, 4, 9))),
  ('R50+', '/32'): dict(patch_size=1, stem=dict(depths=(3, 4, 6, 3))),
  ('R26+', '/32'): dict(patch_size=1, stem=dict(depths=(2, 2, 2, 2))),
  ('R+', '/16'): dict(patch_size=8, stem=dict(depths=())),
}
VARIANTS: dict[str, dict[str, Any]] = {
  f'{stem}{size}{patch}': SIZES[size] | embedding
  for (stem, patch), embedding in EMBEDDINGS.items()
  for size in SIZES
}
# Keys of the sizes, which a variant sets
SIZE_KEYS = ('patch_size', 'width', 'depth', 'mlp_dim', 'num_heads')
# First parts of the paths of parameters after the last layer. In 'encoder',
# this is the last norm.
AFTER_LAYERS = (
  'encoder',
  'map',
  'fc_norm',
  'pre_logits',
  'head',
  'head_distillation',
)
POOLS = ('token', 'token_gap', 'gap', 'max', 'avgmax', 'map')
STEM = Nested('vit_jax.models.{name}:Stem')
# Folded into the key of a layer for its random rotation: 'rope' in ASCII
_ROPE = 0x726F7065
# Names of the arrays that `remat='dots'` keeps.
SAVED = (*attention_lib.SAVED, 'statistics', 'middle', 'hidden')
# Heads and hidden units are split over the mesh axis `model`: pairs as in
# `models.contract.Model.sharding_rules`.
SHARDING_RULES = (
  (r'attention/(query|key|value)/(kernel|bias)', -2),
  (r'attention/out/kernel', -3),
  (r'mlp/fc1/(kernel|bias)', -1),
  (r'mlp/fc2/kernel', -2),
)


@schema.operational('remat', 'unroll', 'attention')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(backbone.BackboneConfig):
  """Keys of the config's `model` section for a Vision Transformer.

  | group | keys |
  |---|---|
  | sizes | `variant`, or `patch_size`, `width`, `depth`, … |
  | stem of a hybrid | `stem` |
  | pooling and head | `pool`, `class_token`, `map_*`, `fc_norm`, `pre_logits` |
  | regularization | `dropout`, `drop_path`, `drop_path_first` |
  | MLPs | `gelu`, `gated` |
  | norms | `norm`, `norm_eps`, `*_norm` for the places of further norms |
  | biases and scales | `qkv_bias`, `bias`, `layer_scale` |
  | further tokens | `registers`, `distilled` |
  | positions | `position`, `position_at`, `prefix_positions` |
  | rotations | `rope`, `rope_*` |
  | images and training | `remainder`, `pixels`, `start_values`, `attention` |

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
      patch tokens), 'token_gap' (both, one after the other, as the classifiers
      of DINOv2), 'max' (maximum of the patch tokens), 'avgmax' (mean of 'gap'
      and 'max') or 'map' (attention pooling).
    class_token: whether there is a class token; None if only the pools 'token'
      and 'token_gap' have one.
    map_heads: number of heads of the attention pooling; None for `num_heads`.
    map_mlp_dim: hidden units of the attention pooling; None for `mlp_dim`.
    map_prefix: whether attention pooling includes the prefix tokens.
    fc_norm: whether features are pooled from the patch tokens (their mean also
      for the pool 'token'), and the last LayerNorm is applied to the features
      instead of the tokens (fine-tuning in MAE and BEiT). With the pool 'token'
      there is still a class token, but it is not used for features. Fine-tuning
      takes the value of this key from the weights if its config has the
      default. It initializes this LayerNorm from scratch if the weights do not
      have it.
    pre_logits: whether a dense layer of `width` units with tanh precedes the
      head.
    dropout: dropout rate, applied as in section 4.1 and appendix B.1.
    drop_path: drop-path rate of the last layer. The rate changes linearly with
      depth.
    drop_path_first: drop-path rate of the first layer; equal to `drop_path` for
      one rate in all layers (DeiT-III).
    gelu: activation of the MLPs: GELU as 'tanh' (official JAX models), 'exact'
      (timm, Hugging Face) or 'quick' (x·σ(1.702 x), the first CLIP models),
      'relu' or 'silu'.
    gated: whether SwiGLU with `mlp_dim` hidden units replaces GELU (the largest
      model of DINOv2).
    norm: 'layer' (LayerNorm) or 'rms' (RMSNorm: without mean and bias), for all
      norms of the model.
    norm_eps: epsilon of all norms.
    patch_norm: whether a norm follows the patch embedding (AIMv2).
    pre_norm: whether a norm precedes the first layer (CLIP).
    post_norm: whether the norms of a layer are applied to the results of
      attention and MLP, and not to their inputs (the largest EVA-02).
    final_norm: whether a norm follows the last layer.
    qk_norm: whether a norm is applied to queries and keys of each head.
    attention_norm: whether a norm is applied to the joined outputs of the heads
      (BEiT-3, EVA-02's CLIP).
    mlp_norm: whether a norm is applied to the hidden units of the MLPs (BEiT-3,
      EVA-02).
    qkv_bias: projections with a bias: 'all' (queries, keys and values),
      'query_value' (EVA; a bias of the keys has no effect without rotations)
      or 'none'.
    bias: whether the output of attention and both layers of the MLPs have a
      bias.
    layer_scale: initial value of a factor per channel of each residual branch
      (1e-4 in DeiT-III, 1e-5 in DINOv2); None for no such factors.
    registers: number of extra tokens, whose outputs only `map_prefix` uses.
    distilled: whether the model has a distillation token with a head of its
      own, which learns from teacher targets (DeiT). Logits are the mean of both
      heads; `want=('heads',)` returns each.
    position: 'learned' (1-D), '2d' (learned, half of the channels for the row
      and half for the column), 'relative' (learned 1-D offsets, in attention),
      'relative_bias' (a learned number for each head and each offset of row
      and column, in attention, as in BEiT), 'sincos2d' (fixed, as in
      big_vision), 'sincos2d_mae' (fixed, as in MAE), 'rope2d' (none, and
      `rope='centered'`) or 'none'. Appendix D.4 compares 'learned', '2d',
      'relative' and 'none'.
    position_at: 'stem' (added once, before the first layer), 'layers' (every
      layer has its own) or 'shared' (all layers use the same); None for 'stem',
      or 'layers' for relative positions.
    prefix_positions: whether class token, distillation token and registers also
      have learned positions; `no_embed_class` in timm is the opposite. These
      tokens have no positions of other kinds, except that relative offsets
      count all tokens.
    rope: rotation of queries and keys by angles that depend on row and column,
      in addition to `position`: 'none', 'centered' (coordinates from -1 to 1,
      as in DINOv3), 'index' (rows and columns are counted, as in EVA-02) or
      'mixed' (the same, with learned frequencies for each head and layer, as in
      RoPE-Mixed). Prefix tokens are not rotated.
    rope_base: base of the wavelengths; None for 100 ('centered'), 10,000
      ('index') or 10 ('mixed', for the initial frequencies).
    rope_grid: number of rows and of columns to which 'index' and 'mixed' scale
      the grid of the image; None for no scaling.
    rope_offset: number of the first row and column, before scaling.
    rope_shift: largest random shift of the coordinates of 'centered' in
      training; None for none. Each layer draws its own, as for the next two.
    rope_jitter: largest random factor of each axis of these coordinates.
    rope_rescale: largest random factor of both axes (2 in DINOv3).
    rope_registers: base of the wavelengths of the registers' rotations, on a
      square grid of registers (ViT-5); None if they are not rotated.
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
      TPUs and GPUs), 'kernel' (kernels or an error) or 'xla'. For attention
      pooling, which TPU kernels do not support, 'kernel' means 'auto'.

  Raises:
    UserError: a variant or choice is unknown, a size is missing, a number is
      out of range, or options exclude each other.
  """

  # Sizes
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
  # Pooling and head
  pool: str = 'token'
  class_token: bool | None = None
  map_heads: int | None = None
  map_mlp_dim: int | None = None
  map_prefix: bool = False
  fc_norm: bool = False
  pre_logits: bool = False
  # Regularization
  dropout: float = 0.0
  drop_path: float = 0.0
  drop_path_first: float = 0.0
  # MLPs
  gelu: str = 'tanh'
  gated: bool = False
  # Norms
  norm: str = 'layer'
  norm_eps: float = layers.EPSILON
  patch_norm: bool = False
  pre_norm: bool = False
  post_norm: bool = False
  final_norm: bool = True
  qk_norm: bool = False
  attention_norm: bool = False
  mlp_norm: bool = False
  # Biases and scales
  qkv_bias: str = 'all'
  bias: bool = True
  layer_scale: float | None = None
  # Further tokens
  registers: int = 0
  distilled: bool = False
  # Positions
  position: str = 'learned'
  position_at: str | None = None
  prefix_positions: bool = True
  # Rotations
  rope: str = 'none'
  rope_base: float | None = None
  rope_grid: int | None = None
  rope_offset: float = 0.0
  rope_shift: float | None = None
  rope_jitter: float | None = None
  rope_rescale: float | None = None
  rope_registers: float | None = None
  # Images and training
  remainder: str = 'error'
  start_values: str = 'authors'
  pixels: str = 'symmetric'
  attention: str = 'auto'
  # The `contract.Stem` that `stem` describes, not a key
  stem_layers: Any = dataclasses.field(
    default=None, init=False, repr=False, compare=False
  )

  def __post_init__(self):
    super().__post_init__()
    self.complete(SIZE_KEYS, VARIANTS)
    of_variant = VARIANTS.get(self.variant or '', {})
    if self.stem is None and 'stem' in of_variant:
      stem = {'name': 'resnet'} | of_variant['stem']
      object.__setattr__(self, 'stem', stem)
    self.check_choices(
      pool=POOLS,
      gelu=layers.ACTIVATIONS,
      norm=layers.NORMS,
      qkv_bias=attention_lib.BIASES,
      position=positions.KINDS,
      rope=positions.ROTATIONS,
      remainder=('error', 'drop'),
      start_values=INIT,
      pixels=backbone.STATISTICS,
      attention=attention_lib.IMPLEMENTATIONS,
    )
    self.check_range(*SIZE_KEYS, at_least=1, at_most=backbone.MAX_SIZE)
    rates = 'dropout', 'drop_path', 'drop_path_first'
    self.check_range(*rates, at_least=0, below=1)
    self.check_range('norm_eps', above=0)
    self.check_range('layer_scale', 'registers', 'rope_offset', at_least=0)
    self.check_range('rope_base', 'rope_registers', above=1)
    self.check_range('rope_jitter', 'rope_rescale', above=1)
    self.check_range('rope_shift', above=0)
    self.check_range('map_heads', 'map_mlp_dim', 'rope_grid', at_least=1)
    allowed = positions.KINDS[self.position]
    if self.position_at is None and allowed:
      object.__setattr__(self, 'position_at', allowed[0])
    self._check_combinations()
    if self.stem is not None:
      # Built once: Flax does not allow it inside of another module.
      name: Any = self.stem['name']
      constructor = STEM.constructor(name)
      values = self.compute_dtype, self.remat, self.unroll
      stem = schema.construct(constructor, self.stem, *values)
      object.__setattr__(self, 'stem_layers', stem)

  @property
  def prefix(self) -> int:
    """Number of tokens that precede the patch tokens."""
    return self.has_class_token + self.distilled + self.registers

  @property
  def has_class_token(self) -> bool:
    """True if there is a class token."""
    if self.class_token is None:
      return self.pool in ('token', 'token_gap')
    return self.class_token

  @property
  def pooling(self) -> str:
    """Value of `pool`, or 'gap' if `fc_norm` replaces the class token."""
    return 'gap' if self.fc_norm and self.pool == 'token' else self.pool

  @property
  def num_learned_prefix(self) -> int:
    """Number of prefix tokens with learned positions: all or none."""
    learned = self.position == 'learned' and self.prefix_positions
    return self.prefix if learned else 0

  @property
  def rotary(self) -> str | None:
    """Kind of the rotations; None for none."""
    rope = 'centered' if self.position == 'rope2d' else self.rope
    return None if rope == 'none' else rope

  @property
  def rope_random(self) -> bool:
    """True if the coordinates of rotations are random in training."""
    return any((self.rope_shift, self.rope_jitter, self.rope_rescale))

  @property
  def new_norm(self) -> Callable[..., Any]:
    """Constructor of a norm; the keyword `name` is that of the module."""
    return functools.partial(
      layers.NORMS[self.norm], self.compute_dtype, self.norm_eps
    )

  @property
  def activation(self) -> str:
    """Activation of the MLPs of the layers."""
    return 'swiglu' if self.gated else self.gelu

  @property
  def head_dim(self) -> int:
    """Channels of an attention head."""
    return self.width // self.num_heads

  @property
  def init(self) -> Init:
    """Initializers of the parameters."""
    return INIT[self.start_values]

  @property
  def probe(self) -> dict[str, Any]:
    """Keys of a model with few layers, for the comparison of kernels."""
    # With a second layer, the result depends on all outputs of the first one.
    rates = 'dropout', 'drop_path', 'drop_path_first'
    return dict.fromkeys(rates, 0.0) | dict(depth=min(self.depth, 2))

  @property
  def attention_needs(self) -> list[str]:
    """Options that kernels may lack; see `needs` in `Attention.__call__`."""
    needs = {
      'qk_norm': self.qk_norm,
      'rotary positions': self.rotary,
      'relative positions': self.position in positions.IN_ATTENTION,
    }
    return [need for need, needed in needs.items() if needed]

  def attention_by(self, tokens: int) -> str:
    """Returns the implementation of attention; see `attention.choose`."""
    return choose(
      self.attention,
      tokens,
      self.num_heads,
      self.head_dim,
      self.compute_dtype,
      self.attention_needs,
    )

  def _check_combinations(self) -> None:
    """Checks that keys do not exclude each other."""
    kind, pool, check = self.position, self.pool, self.check_together
    fits = self.width % self.num_heads == 0
    check(fits, 'num_heads must divide width', 'width', 'num_heads')
    fits = self.drop_path or not self.drop_path_first
    check(fits, 'set both', 'drop_path', 'drop_path_first')
    fits = self.has_class_token or pool not in ('token', 'token_gap')
    check(fits, 'change one of them', 'pool', 'class_token')
    fits = not self.fc_norm or pool not in ('token_gap', 'map')
    check(fits, "set model.pool='gap'", 'pool', 'fc_norm')
    # Each token of a distilled model has a head.
    only_token = pool == 'token' and not (self.pre_logits or self.fc_norm)
    advice = "set model.pool='token', pre_logits=False and fc_norm=False"
    keys = 'distilled', 'pool', 'pre_logits', 'fc_norm'
    check(only_token or not self.distilled, advice, *keys)
    # Such weights could not be converted to pixels in [-1, 1]: a stem pads its
    # input with zeros, which mean another color in other units.
    fits = self.stem is None or self.pixels == 'symmetric'
    check(fits, "set model.pixels='symmetric'", 'pixels', 'stem')
    places = positions.KINDS[kind]
    advice = f'allowed: {", ".join(places) or "no position_at"}'
    fits = self.position_at in (places or (None,))
    check(fits, advice, 'position_at', 'position')
    fits = self.prefix_positions or kind == 'learned'
    advice = "set model.position='learned'"
    check(fits, advice, 'prefix_positions', 'position')
    fits = self.rope == 'none' or kind not in (
      *positions.IN_ATTENTION,
      'rope2d',
    )
    check(fits, 'set another model.position', 'rope', 'position')
    fits = not self.rope_registers or self.rotary in ('centered', 'index')
    advice = "set model.rope='index' or 'centered'"
    check(fits, advice, 'rope_registers', 'rope')
    is_square = math.isqrt(self.registers) ** 2 == self.registers > 0
    fits = is_square or not self.rope_registers
    check(fits, 'set model.registers=4', 'rope_registers', 'registers')
    fits = self.rotary == 'centered' and not self.rope_registers
    advice = "set model.rope='centered' without rope_registers"
    names = 'rope_shift', 'rope_jitter', 'rope_rescale'
    check(fits or not self.rope_random, advice, *names, 'rope')
    # '2d' has two halves; the others have sines and cosines of two coordinates.
    divisor = {'2d': 2, 'sincos2d': 4, 'sincos2d_mae': 4}.get(kind, 1)
    advice = f'width must be a multiple of {divisor}'
    check(self.width % divisor == 0, advice, 'position', 'width')
    advice = 'the width of a head must be a multiple of 4'
    keys = 'position', 'rope', 'width', 'num_heads'
    check(not self.rotary or self.head_dim % 4 == 0, advice, *keys)


# Keys that fine-tuning does not take from the weights: those of every backbone,
# of a variant, of heads, of training, and of the images. (Weights depend on the
# stem, which `architecture` compares, and on `pixels`, which loading converts.)
OF_RUN = {
  *backbone.BackboneConfig.__dataclass_fields__,
  *('variant', 'stem', 'stem_layers', 'fc_norm', 'pre_logits'),
  *('dropout', 'drop_path', 'drop_path_first'),
  *('rope_shift', 'rope_jitter', 'rope_rescale'),
  *('remainder', 'start_values', 'pixels', 'attention'),
}


class Block(nn.Module):
  """One layer (equations 2 and 3), to be scanned.

  Attributes:
    config: config of the model.
    grid: rows and columns of patches, if each layer has its own positions.
    want: names of results to return, 'layers' and 'attention'.
    tokens: number of tokens that are not padding; None if there is no padding.
    learned_for: grid and offset of `PositionEmbedding`.
  """

  config: Config
  grid: tuple[int, int] | None = None
  want: tuple[str, ...] = ()
  tokens: int | None = None
  learned_for: LearnedFor = (None, 0.0)

  @nn.compact
  def __call__(
    self,
    x: Tokens,
    per_layer: dict[str, Shaped[Array, '']],
    common: tuple[Position, Any],
  ) -> tuple[Tokens, dict[str, Array]]:
    """Applies the layer.

    Args:
      x: tokens.
      per_layer: values that differ between layers: `key` and the drop-path
        `rate` in training; {} for evaluation.
      common: values that all layers share: positions, and `index` of `Patches`
        for layers that have their own positions.

    Returns:
      Tokens after the layer, and the results named in `want`.
    """
    config, dtype = self.config, self.config.compute_dtype
    keys = [None] * 5
    if 'key' in per_layer:
      keys = list(jax.random.split(per_layer['key'], 5))
    # Keys of dropout and drop path of both branches, and of the hidden units.
    attention_keys, hidden_key, mlp_keys = keys[:2], keys[2], keys[3:]

    # The batch is split, but tokens and channels are not. Without this
    # constraint, XLA may choose another layout for the residual stream.
    x = xla.stored(sharding.constrain(x, sharding.BATCH, None, None))
    position, index = common
    if self.grid is not None:
      embedding = PositionEmbedding(config, *self.learned_for, name='position')
      own = embedding(Patches(self.grid, index))
      position = position._replace(
        added=own.added, relative=own.relative, bias=own.bias
      )
    # Coordinates are set only if each layer rotates in its own way.
    if (coordinates := position.coordinates) is not None:
      if config.rotary == 'mixed':
        base = config.rope_base or positions.ROTATIONS['mixed']
        heads = config.num_heads, config.head_dim
        rotate = positions.MixedRotation(*heads, base, name='rotation')
        rotation = rotate(coordinates)
      else:  # with random changes in training
        key = jax.random.fold_in(per_layer['key'], _ROPE)
        rotation = positions.random_rotation(config, coordinates, len(x), key)
      position = position._replace(rotation=rotation)
    if position.added is not None:
      x = x + position.added.astype(x.dtype)
    attend = Attention(
      config.num_heads,
      dtype,
      config.attention,
      qk_norm=config.new_norm if config.qk_norm else None,
      initializers=config.init,
      tokens=self.tokens,
      qkv_bias=config.qkv_bias,
      out_bias=config.bias,
      out_norm=config.new_norm if config.attention_norm else None,
      name='attention',
    )
    first, second = (config.new_norm(name=f'norm{i}') for i in (1, 2))
    y, weights = attend(
      x if config.post_norm else first(x),
      want_weights='attention' in self.want,
      position=position,
    )
    y = first(y) if config.post_norm else y
    x = x + self._branch('scale1', y, per_layer, *attention_keys)
    x = xla.stored(checkpoint_name(x, 'middle'))

    mlp = Mlp(
      config.mlp_dim,
      config.dropout,
      config.activation,
      dtype,
      config.init.matrix,
      config.init.mlp_bias,
      config.bias,
      config.new_norm if config.mlp_norm else None,
      name='mlp',
    )
    y = mlp(x if config.post_norm else second(x), hidden_key)
    y = second(y) if config.post_norm else y
    x = x + self._branch('scale2', y, per_layer, *mlp_keys)
    x = sharding.constrain(x, sharding.BATCH, None, None)
    results = {'layers': x, 'attention': weights}
    return x, {name: results[name] for name in self.want if name in results}

  def _branch(
    self,
    scale_name: str,
    y: Tokens,
    per_layer: Any,
    dropout_key: Any,
    path_key: Any,
  ) -> Tokens:
    """Applies dropout, LayerScale and drop path to a residual branch."""
    y = layers.dropout(y, self.config.dropout, dropout_key)
    if self.config.layer_scale is not None:
      init = nn.initializers.constant(self.config.layer_scale)
      y = layers.scaled(y, self.param(scale_name, init, y.shape[-1:]))
    if 'rate' in per_layer:
      y = layers.drop_path(y, per_layer['rate'], path_key)
    return y


class Encoder(nn.Module):
  """Layers under one scan, then a norm, if `final_norm` without `fc_norm`.

  Parameters are stacked: `layers/mlp/fc1/kernel` is `[depth, d, mlp_dim]`. Each
  layer gets its random key as a scanned input, so random values do not depend
  on unrolling or rematerialization.

  Attributes:
    config: config of the model.
    learned_for: grid and offset of `PositionEmbedding`.
  """

  config: Config
  learned_for: LearnedFor = (None, 0.0)

  def setup(self):
    self.has_norm = self.config.final_norm and not self.config.fc_norm
    if self.has_norm:
      self.norm = self.config.new_norm()

  def last_norm(self, x: Float[Array, '... d']) -> Float[Array, '... d']:
    """Applies the last norm; returns `x` if the model has none."""
    return self.norm(x) if self.has_norm else x

  @nn.compact
  def __call__(
    self,
    x: Tokens,
    key: Key[Array, ''] | None,
    want: tuple[str, ...] = (),
    position: Position = NO_POSITION,
    patches: Patches | None = None,
  ) -> tuple[Tokens, dict[str, Array]]:
    """Applies all layers.

    Args:
      x: tokens.
      key: random key of dropout and drop path; None for evaluation.
      want: names of results of each layer to return, 'layers' and 'attention'.
      position: positions that all layers share.
      patches: patches that the tokens belong to, if every layer has its own
        positions.

    Returns:
      Tokens, and the results named in `want`, `[n, depth, …]`.
    """
    config, tokens = self.config, x.shape[1]
    grid = index = None
    if config.position_at == 'layers':
      assert patches is not None
      grid, index = patches
    # The attention of cuDNN needs an even number of tokens. One padding for all
    # layers replaces copies of all queries, keys, values and outputs. Positions
    # in the layers and results of single layers do not allow for it.
    can_pad = (
      not {'layers', 'attention'} & {*want}
      and grid is None
      and all(p is None for p in position)
    )
    unpadded = None  # number of tokens without padding, if there is any
    if tokens % 2 and can_pad and config.attention_by(tokens) == 'cuDNN':
      x, unpadded = jnp.pad(x, ((0, 0), (0, 1), (0, 0))), tokens

    stack = layers.scanned(
      Block,
      config.depth,
      remat=config.remat,
      saved=SAVED,
      unroll=config.unroll,
      in_axes=(0, nn.broadcast),  # `per_layer`, `common`
    )(config, grid, want, unpadded, self.learned_for, name='layers')
    per_layer = {}
    if key is not None:
      per_layer['key'] = jax.random.split(key, config.depth)
      if config.drop_path:  # changes linearly with depth
        rates = config.drop_path_first, config.drop_path
        per_layer['rate'] = jnp.linspace(*rates, config.depth)
    x, results = stack(x, per_layer, (position, index))

    # A scan stacks results along a new first axis.
    results = {name: leaf.swapaxes(0, 1) for name, leaf in results.items()}
    return self.last_norm(x[:, :tokens]), results


class MapHead(nn.Module):
  """Multi-head attention of a learned query to all tokens, then an MLP.

  Reference: "Scaling Vision Transformers" (arXiv 2106.04560), section 3.2.

  Attributes:
    config: config of the model.
  """

  config: Config

  @nn.compact
  def __call__(self, x: Tokens) -> Float[Array, 'n d']:
    config, dtype, (n, _, d) = self.config, self.config.compute_dtype, x.shape
    # MAE, which initializes queries, keys and values as one matrix, has no
    # attention pooling.
    init = config.init._replace(query_key_value=config.init.matrix)
    probe = self.param('probe', init.matrix, (1, 1, d))
    probe = jnp.broadcast_to(probe.astype(dtype), (n, 1, d))
    attend = Attention(
      config.map_heads or config.num_heads,
      dtype,
      # TPU kernels do not support a single query, for which 'kernel' would be
      # an error.
      'xla' if config.attention == 'xla' else 'auto',
      initializers=init,
      name='attention',
    )
    pooled, _ = attend(probe, x)
    y = config.new_norm(name='norm')(pooled)
    mlp = Mlp(
      config.map_mlp_dim or config.mlp_dim,
      0.0,
      config.gelu,
      dtype,
      init.matrix,
      init.mlp_bias,
      name='mlp',
    )
    return (pooled + mlp(y, None))[:, 0]


class ViT(Backbone):
  """A Vision Transformer; `Model` builds it from config keys.

  Parameters, with those of the layers stacked: `stem/…` (hybrids),
  `embedding/{kernel,bias}`, `patch_norm/…`, `cls`, `distillation`, `registers`,
  `position/…`, `pre_norm/…`, `encoder/{layers/…,norm}`, `map/…`, `fc_norm/…`,
  `pre_logits/{kernel,bias}`, `head/{kernel,bias}`,
  `head_distillation/{kernel,bias}`.

  Attributes:
    num_classes: number of outputs of the head; 0 for a model without a head.
    config: validated config.
    made_for: (height, width) of the images that the positions were learned for,
      pixels; None for the size of the images in use. See `at_sizes`.
    position_offset: offset of the interpolation; see `at_sizes`.
  """

  config: Config
  made_for: Size | None = None
  position_offset: float = 0.0

  outputs = WANTED
  # Fine-tuning takes these keys from the weights. It takes those of `adopted`
  # only if its config has the default, and all others from its config.
  determined = tuple(
    field.name
    for field in dataclasses.fields(Config)
    if field.name not in OF_RUN
  )
  adopted = ('fc_norm',)
  initial = ('layer_scale',)
  # `adapt` passes all of these to `positions.resize`, also parameters that do
  # not depend on the image size.
  sized = ('position/', 'encoder/layers/position/')
  fresh = ('head/', 'pre_logits/', 'head_distillation/')

  def setup(self):
    config, dtype = self.config, self.config.compute_dtype
    # Attributes cannot have the names of config keys, which are also attributes
    # of the model; `name` sets the paths of the parameters.
    if config.stem is not None:
      self.stem_module = config.stem_layers.clone(name='stem', parent=self)
    self.embedding = Linear(
      (config.width,),
      input_axes=3,
      kernel_init=config.init.embedding,
      bias_init=config.init.embedding_bias(
        config.channels * config.patch_size**2
      ),
      dtype=dtype,
    )
    if config.patch_norm:
      self.norm_of_patches = config.new_norm(name='patch_norm')
    self.prefix_tokens = [
      self.param(name, init, (1, count, config.width))
      for name, count, init in (
        ('cls', int(config.has_class_token), config.init.cls),
        # DeiT, arXiv 2012.12877
        ('distillation', int(config.distilled), NORMAL),
        # "Vision Transformers Need Registers", arXiv 2309.16588. They need
        # different initial values, because equal ones stay equal.
        ('registers', config.registers, nn.initializers.normal(1e-6)),
      )
      if count
    ]
    learned_grid = self.grid(self.made_for) if self.made_for else None
    learned_for = learned_grid, self.position_offset
    if config.position_at in ('stem', 'shared'):
      self.positions = PositionEmbedding(config, *learned_for, name='position')
    if config.pre_norm:
      self.first_norm = config.new_norm(name='pre_norm')
    self.encoder = Encoder(config, learned_for)
    if config.fc_norm:
      self.norm_of_mean = config.new_norm(name='fc_norm')
    if config.pool == 'map':
      self.map = MapHead(config)
    if config.pre_logits:
      self.tanh_layer = Linear(
        (config.width,),
        kernel_init=config.init.pre_logits,
        dtype=dtype,
        name='pre_logits',
      )
    self.head = self._new_head(config.init.head)
    if config.distilled:
      self.head_distillation = self._new_head(config.init.head)

  def _predict(
    self, images: Images, key: Key[Array, ''] | None, want: tuple[str, ...]
  ) -> dict[str, Array]:
    _, height, width, _ = images.shape
    grid = self.grid((height, width))
    tokens, inner = self._encode(self._embed(images), key, Patches(grid), want)
    # A symbolic number of images, as in an export, has no `len`.
    shape = tokens.shape[0], *grid, tokens.shape[-1]
    patches = tokens[:, -math.prod(grid) :].reshape(shape)
    outputs = {'tokens': tokens, 'patches': patches}
    return inner | outputs | self._read(tokens)

  def embed(
    self, images: UncheckedImages, masked: Masked | None = None
  ) -> Tokens:
    """Computes the tokens of patches, row by row, before the first layer.

    Positions that are added before the first layer are included.

    Args:
      images: float images in [-1, 1], `[n, height, width, channels]`.
      masked: patches to replace before positions are added; None for none.

    Raises:
      UserError: the images have a wrong dtype, shape or size.
    """
    return self._embed(self._input(images), masked)[:, self.config.prefix :]

  def _embed(self, x: Images, masked: Masked | None = None) -> Tokens:
    """Computes all tokens before the first layer, prefix tokens first."""
    _, height, width, _ = x.shape
    grid, side = self.grid((height, width)), self.config.patch_size
    if self.config.stem is not None:
      x = self.stem_module(x)  # [n, y, x, c]
    x = self.embedding(layers.cut_patches(x, grid, (side, side)))
    if self.config.patch_norm:
      x = self.norm_of_patches(x)
    if masked is not None:
      x = jnp.where(masked.index[..., None], masked.token.astype(x.dtype), x)
    # Prefix tokens come first, because they may also have positions.
    x = self._with_prefix(x)
    if self.config.position_at == 'stem':
      x = x + self.positions(Patches(grid)).added.astype(x.dtype)
    return x

  def _with_prefix(self, x: Tokens, added: Any = None) -> Float[Array, 'n s d']:
    """Prepends the prefix tokens, after adding `added` to them."""
    if not self.prefix_tokens:
      return x
    first = [token.astype(x.dtype) for token in self.prefix_tokens]
    first = jnp.concatenate(first, 1)
    first = first if added is None else first + added
    first = jnp.broadcast_to(first, (x.shape[0], *first.shape[1:]))
    return jnp.concatenate([first, x], axis=1)  # [n, prefix + t, d]

  def encode(
    self,
    tokens: Tokens,
    key: Key[Array, ''] | None = None,
    patches: Patches | None = None,
  ) -> Float[Array, 'n s d']:
    """Computes all tokens after the last LayerNorm, prefix tokens first.

    Args:
      tokens: patch tokens from `embed`, without prefix tokens; some of them may
        be left out.
      key: random key of dropout and drop path; None for evaluation.
      patches: patches that the tokens belong to.

    Raises:
      UserError: `patches` is None, but every layer uses positions.
    """
    config, added = self.config, None
    in_layers = config.position_at in ('layers', 'shared') or config.rotary
    if in_layers and patches is None:
      raise UserError(
        'positions act in every layer of this model, so encode needs the '
        'patches of the tokens: encode(tokens, key, '
        'Patches(model.grid(image_size), index)).'
      )
    if config.position_at == 'stem' and config.num_learned_prefix:
      # `embed` has added the positions of patches, not those of the prefix.
      added = self.positions.prefix().astype(tokens.dtype)
    x = self._with_prefix(tokens, added)
    return self._encode(x, key, patches or Patches((0, 0)), ())[0]

  def _encode(
    self,
    x: Tokens,
    key: Key[Array, ''] | None,
    patches: Patches,
    want: tuple[str, ...],
  ) -> tuple[Tokens, dict[str, Array]]:
    # Dropout of the embedding has a key of its own, independent of the layers.
    embed_key, encoder_key = (None, None)
    if key is not None:
      embed_key, encoder_key = jax.random.split(key)
    x = layers.dropout(x, self.config.dropout, embed_key)
    if self.config.pre_norm:
      x = self.first_norm(x)
    shared = self.config.position_at == 'shared'
    position = self.positions(patches) if shared else NO_POSITION
    if self.config.rotary:
      random = self.config.rope_random and key is not None
      own = positions.rotary(self.config, patches, random)
      position = own._replace(added=position.added)
    return self.encoder(x, encoder_key, want, position, patches)

  def last_norm(self, tokens: Float[Array, '... d']) -> Float[Array, '... d']:
    """Applies the last LayerNorm to tokens of any block; float32.

    Args:
      tokens: outputs of blocks, see `layers` of `predict`.

    Returns:
      Normalized tokens. With `fc_norm`, or without `final_norm`, a model has no
      such LayerNorm, and its tokens are returned unchanged.
    """
    return self.encoder.last_norm(tokens).astype(jnp.float32)

  def readout(self, tokens: Tokens) -> dict[str, Float[Array, 'n _']]:
    """Computes features and logits of tokens from `encode`; float32."""
    out = self._read(tokens)
    return {k: out[k].astype(jnp.float32) for k in ('features', 'logits')}

  def _read(self, tokens: Tokens) -> dict[str, Array]:
    """Computes features, logits, and the logits of each head.

    Features and logits of a distilled model are the means over its two tokens
    and its two heads.
    """
    config, patches = self.config, tokens[:, self.config.prefix :]
    if config.pooling == 'token':
      features = tokens[:, 0]
    elif config.pooling == 'map':
      features = self.map(tokens if config.map_prefix else patches)
    elif config.pooling == 'gap':
      features = patches.mean(axis=1)
    elif config.pooling == 'token_gap':
      features = jnp.concatenate([tokens[:, 0], patches.mean(axis=1)], axis=-1)
    else:
      features = patches.max(axis=1)
      if config.pooling == 'avgmax':
        features = (features + patches.mean(axis=1)) / 2
    if config.fc_norm:
      features = self.norm_of_mean(features)
    if config.pre_logits:
      features = jnp.tanh(self.tanh_layer(features))
    logits = self._logits(features)
    if not config.distilled:
      heads = logits[:, None]
      return {'features': features, 'logits': logits, 'heads': heads}
    token = tokens[:, 1]  # the distillation token follows the class token
    second = self.head_distillation(token) if self.num_classes else token
    return {
      'features': (features + token) / 2,
      'logits': (logits + second) / 2,
      'heads': jnp.stack([logits, second], axis=1),
    }

  # Images of other sizes

  @nn.nowrap
  def grid(self, image_size: Size) -> Size:
    """Returns rows and columns of patches of an image.

    Args:
      image_size: (height, width), pixels.

    Raises:
      UserError: the patch size does not divide the image, or is larger.
    """
    drop = self.config.remainder == 'drop'
    return backbone.whole_patches(
      image_size, self.config.patch_size, self._stride, drop
    )

  @property
  def _stride(self) -> int:
    stem = self.config.stem_layers
    return 1 if stem is None else stem.stride

  @property
  def patch_pixels(self) -> int:
    """Side of a patch in the image, pixels."""
    return self.config.patch_size * self._stride

  @nn.nowrap
  def check(self, image_size: Size) -> None:
    """Checks that images can have this size; see `grid`."""
    self.grid(image_size)

  @nn.nowrap
  def adapt(
    self,
    leaves: Leaves,
    old_size: Size,
    new_size: Size,
    method: str | None,
  ) -> Leaves:
    """Interpolates learned positions; see `positions.resize`."""
    grids = self.grid(old_size), self.grid(new_size)
    return positions.resize(leaves, *grids, method)

  @nn.nowrap
  def at_sizes(self, made_for: Size, offset: float = 0.0) -> 'ViT':
    """Returns the model for images of any size.

    Learned positions are interpolated inside the program; positions without
    parameters are computed for the grid of the images. See
    `models.contract.Model.at_sizes`.

    Raises:
      UserError: positions are relative; these are numbered in one grid.
    """
    if self.config.position in positions.IN_ATTENTION:
      others = [k for k in positions.KINDS if k not in positions.IN_ATTENTION]
      raise UserError(
        f'model.position={self.config.position!r} numbers offsets in one '
        f'grid, that of {made_for[0]}x{made_for[1]} pixels, and this training '
        f'has images of several sizes: set model.position to one of {others}.'
      )
    self.check(made_for)
    return self.clone(made_for=tuple(made_for), position_offset=offset)

  # Parameters and devices; see `models.contract.Model`

  @nn.nowrap
  def layers_above(self, path: str) -> int | tuple[int, ...]:
    """Returns the number of layers above a parameter, as BEiT, MAE and DINOv2.

    All tokens and positions precede the first layer, and the last norm belongs
    to the head. (In timm, it belongs to the last layer.)
    """
    depth = self.config.depth
    if path.startswith('encoder/layers/'):
      return tuple(range(depth, 0, -1))
    return 0 if path.partition('/')[0] in AFTER_LAYERS else depth + 1

  @property
  def replaceable(self) -> tuple[str, ...]:
    """Returns the norms of tokens and of features, with `fc_norm`; else ().

    The model has only the second one. It is initialized from scratch if the
    weights have only the first one, which is then left out.
    """
    return ('encoder/norm/', 'fc_norm/') if self.config.fc_norm else ()

  @property
  def sharding_rules(self) -> tuple[tuple[str, int], ...]:
    """Sharding rules of the layers, the heads and the stem."""
    stem = self.config.stem_layers
    return (
      *SHARDING_RULES,
      (r'head(_distillation)?/(kernel|bias)', -1),
      *(() if stem is None else stem.sharding_rules),
    )

  @property
  def unstacked(self) -> tuple[str, ...]:
    """Path suffixes of stacked matrices whose gradients are best unstacked.

    These are the matrices of the layers if all layers are unrolled, except fc2.
    The gradient of fc2 is a product with activations that are recomputed
    (dropout and GELU), and XLA recomputes them more often when it fuses the sum
    over micro-batches into that product.
    """
    if self.config.unroll < self.config.depth:
      return ()
    attention = ('query', 'key', 'value', 'out')
    matrices = ('mlp/fc1', *(f'attention/{name}' for name in attention))
    return tuple(f'layers/{name}/kernel' for name in matrices)

  @property
  def architecture(self) -> dict[str, Any]:
    """Keys that the parameters determine, including those of the stem."""
    stem = self.config.stem_layers
    section = None if stem is None else stem.section
    return super().architecture | {'stem': section}

  @nn.nowrap
  def attention_by(self, image_size: Size | None = None) -> dict[str, str]:
    """Returns the implementation of attention; all layers are stage '1'."""
    patches = 0 if image_size is None else math.prod(self.grid(image_size))
    tokens = max(self.config.prefix + patches, 1)
    return {'1': self.config.attention_by(tokens)}

  @nn.nowrap
  def compiler_options(
    self, platform: str, num_devices: int
  ) -> dict[str, str | int]:
    """Returns the options for unrolled layers; see `xla`."""
    if min(self.config.unroll, self.config.depth) == 1:
      return {}
    return xla.options_for_unrolled(platform, num_devices)


Model = backbone.constructor(ViT, Config)
