"""A text tower: the encoder of the Vision Transformer on tokens of a text.

Sizes are those of big_vision's `models/vit.py`, whose towers of the same letter
belong together.
"""

import math
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


class Text(nn.Module):
  """A text tower; `tower` builds it from config keys.

  Parameters: `embedding` `[vocabulary, width]`, `positions` `[length, width]`,
  `encoder/{layers/…,norm}`, `map/…` for that pooling, and
  `head/{kernel,bias}`.

  Attributes:
    outputs: channels of the result.
    vocabulary: number of different tokens.
    length: tokens of a text.
    pool: see `tower`.
    causal: see `tower`.
    bias: see `tower`.
    config: config of a Vision Transformer with the layers of the tower.
  """

  outputs: int
  vocabulary: int
  length: int
  pool: str
  causal: bool
  bias: bool
  config: vit.Config

  @nn.compact
  def __call__(self, tokens: Int[Array, 'n t']) -> Float[Array, 'n outputs']:
    """Computes embeddings of texts, float32, without randomness.

    Args:
      tokens: numbers of the tokens of each text, padded to `length`.
    """
    config = self.config
    init = nn.initializers.normal(1 / math.sqrt(config.width))
    table = self.param('embedding', init, (self.vocabulary, config.width))
    positions = self.param('positions', init, (self.length, config.width))
    # A token outside of the vocabulary results in NaN, not in another token.
    x = jnp.take(table, tokens, axis=0, mode='fill') + positions
    x, position = x.astype(config.compute_dtype), NO_POSITION
    if self.causal:
      shape = (config.num_heads, self.length, self.length)
      position = position._replace(bias=jnp.triu(jnp.full(shape, -jnp.inf), 1))
    x, _ = vit.Encoder(config, name='encoder')(x, None, position=position)
    if self.pool == 'last':
      y = x[:, -1]
    elif self.pool == 'max':
      y = x.max(axis=1)
    elif self.pool == 'map':
      y = vit.MapHead(config, name='map')(x)
    else:
      # The first of the highest numbers, because CLIP also pads with it.
      end = tokens.argmax(axis=1)
      y = jnp.take_along_axis(x, end[:, None, None], axis=1)[:, 0]
    return Linear(
      (self.outputs,),
      kernel_init=nn.initializers.lecun_normal(),
      use_bias=self.bias,
      dtype=config.compute_dtype,
      out_dtype='float32',
      name='head',
    )(y)


@schema.operational('remat', 'unroll')
def tower(
  outputs: int,
  kernels: bool = True,
  /,
  *,
  vocabulary: int = 32_000,
  length: int = 64,
  variant: str | None = 'B',
  width: int | None = None,
  depth: int | None = None,
  mlp_dim: int | None = None,
  num_heads: int | None = None,
  pool: str = 'last',
  causal: bool = False,
  bias: bool = True,
  gelu: str = 'tanh',
  norm_eps: float = 1e-6,
  dtype: str = 'bfloat16',
  remat: str = 'none',
  unroll: int = 1,
) -> Text:
  """Returns the text tower that the section `objective.text` describes.

  Args:
    outputs: channels of the result.
    kernels: whether attention may use kernels.
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
  check_choice('objective.text.pool', pool, POOLS)
  check_range('objective.text.vocabulary', vocabulary, at_least=1)
  check_range('objective.text.length', length, at_least=1)
  if variant is not None:
    check_choice('objective.text.variant', variant, SIZES)
  own = dict(width=width, depth=depth, mlp_dim=mlp_dim, num_heads=num_heads)
  sizes: dict[str, Any] = dict(SIZES.get(variant or '', {}))
  sizes |= {key: value for key, value in own.items() if value}
  try:
    config = vit.Config(
      patch_size=1,
      position='none',
      pool='gap',
      gelu=gelu,
      norm_eps=norm_eps,
      dtype=dtype,
      remat=remat,
      unroll=unroll,
      attention='auto' if kernels and not causal else 'xla',
      **sizes,
    )
  except UserError as error:  # the message names the keys of a model
    raise UserError(f'objective.text: {error}') from error
  return Text(outputs, vocabulary, length, pool, causal, bias, config)
