"""A text tower: the encoder of the Vision Transformer on tokens of a text.

Sizes are those of big_vision's `models/vit.py`, whose towers of the same letter
belong together.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from vit_jax.config import schema
from vit_jax.errors import UserError, check_choice, check_range
from vit_jax.models import vit
from vit_jax.models.layers import Linear
from vit_jax.models.positions import NO_POSITION

# S, B, L, H: those of images. So400m: arXiv 2305.13035.
SIZES = vit.SIZES | {
  'M': dict(width=512, depth=12, mlp_dim=2048, num_heads=8),
  'So400m': dict(width=1152, depth=27, mlp_dim=4304, num_heads=16),
  'g-opt': dict(width=1536, depth=40, mlp_dim=6144, num_heads=16),
}
POOLS = ('last', 'map', 'max', 'end')
# Keys of `Config` that are also those of a Vision Transformer
_OF_LAYERS = (
  *(key for key in vit.SIZE_KEYS if key != 'patch_size'),
  *('gelu', 'norm_eps', 'dtype', 'remat', 'unroll'),
)


@schema.operational('remat', 'unroll')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Keys of the config's section `objective.text`.

  Attributes:
    vocabulary: number of different tokens.
    length: tokens of a text, with padding.
    variant: name of a set of sizes, a key of `SIZES`; None to set all sizes.
    width: channels of a token; None for those of the variant.
    depth: number of layers; None for that of the variant.
    mlp_dim: hidden units of an MLP; None for those of the variant.
    num_heads: number of attention heads; None for that of the variant.
    pool: 'last' (the last token, which is the end of the text or padding, as in
      SigLIP), 'map' (attention pooling), 'max' (maximum over the tokens) or
      'end' (the first token with the highest number of the text, which is the
      end in CLIP).
    causal: whether a token only attends to itself and earlier ones (CLIP).
      XLA computes this attention on all devices.
    bias: whether the last layer has a bias.
    gelu: activation of the MLPs, see `vit.Config`.
    norm_eps: epsilon of the norms.
    dtype: dtype of the computation, 'bfloat16' or 'float32'.
    remat: activations that the backward pass recomputes, see `vit.Config`.
    unroll: number of layers that are unrolled in each step of the scan.

  Raises:
    UserError: a value is not allowed, or a size is missing.
  """

  vocabulary: int = 32_000
  length: int = 64
  variant: str | None = 'B'
  width: int | None = None
  depth: int | None = None
  mlp_dim: int | None = None
  num_heads: int | None = None
  pool: str = 'last'
  causal: bool = False
  bias: bool = True
  gelu: str = 'tanh'
  norm_eps: float = 1e-6
  dtype: str = 'bfloat16'
  remat: str = 'none'
  unroll: int = 1

  def __post_init__(self):
    check_choice('objective.text.pool', self.pool, POOLS)
    check_range('objective.text.vocabulary', self.vocabulary, at_least=1)
    check_range('objective.text.length', self.length, at_least=1)
    if self.variant is not None:
      check_choice('objective.text.variant', self.variant, SIZES)
    self.layers()  # checks the other keys

  def layers(self, attention: str = 'xla') -> vit.Config:
    """Returns the config of a Vision Transformer with the layers of the tower.

    Args:
      attention: see `vit.Config`.
    """
    sizes: dict[str, Any] = dict(SIZES[self.variant] if self.variant else {})
    own = {key: getattr(self, key) for key in _OF_LAYERS}
    sizes |= {key: value for key, value in own.items() if value is not None}
    sizes['attention'] = 'xla' if self.causal else attention
    try:
      return vit.Config(patch_size=1, position='none', pool='gap', **sizes)
    except UserError as error:  # the message names the keys of a model
      raise UserError(f'objective.text: {error}') from error


class Text(nn.Module):
  """A text tower.

  Parameters: `embedding` `[vocabulary, width]`, `positions` `[length, width]`,
  `encoder/{layers/…,norm}`, `map/…` for that pooling, and
  `head/{kernel,bias}`.

  Attributes:
    config: keys of the tower.
    outputs: channels of the result.
    attention: see `vit.Config`.
  """

  config: Config
  outputs: int
  attention: str = 'xla'

  @nn.compact
  def __call__(self, tokens: Int[Array, 'n t']) -> Float[Array, 'n outputs']:
    """Computes embeddings of texts, float32, without randomness.

    Args:
      tokens: numbers of the tokens of each text, padded to `length`.
    """
    keys, config = self.config, self.config.layers(self.attention)
    init = nn.initializers.normal(config.width**-0.5)
    table = self.param('embedding', init, (keys.vocabulary, config.width))
    positions = self.param('positions', init, (keys.length, config.width))
    # A token above the vocabulary results in NaN, not in another token.
    x = jnp.take(table, tokens, axis=0, mode='fill') + positions
    x, position = x.astype(config.compute_dtype), NO_POSITION
    if keys.causal:
      shape = (config.num_heads, keys.length, keys.length)
      position = position._replace(bias=jnp.triu(jnp.full(shape, -jnp.inf), 1))
    x, _ = vit.Encoder(config, name='encoder')(x, None, position=position)
    if keys.pool == 'last':
      y = x[:, -1]
    elif keys.pool == 'max':
      y = x.max(axis=1)
    elif keys.pool == 'map':
      # The mask of a causal tower, which XLA computes, is not that of pooling.
      pooling = dataclasses.replace(config, attention=self.attention)
      y = vit.MapHead(pooling, name='map')(x)
    else:
      # The first of the highest numbers, because CLIP also pads with it.
      y = jnp.take_along_axis(x, tokens.argmax(1)[:, None, None], axis=1)[:, 0]
    return Linear(
      (self.outputs,),
      kernel_init=nn.initializers.lecun_normal(),
      use_bias=keys.bias,
      dtype=config.compute_dtype,
      out_dtype='float32',
      name='head',
    )(y)
