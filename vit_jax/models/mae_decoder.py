"""The decoder of masked autoencoders (arXiv 2111.06377, section 3)."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from vit_jax.config import schema
from vit_jax.errors import UserError
from vit_jax.models.init import NORMAL
from vit_jax.models.layers import Linear
from vit_jax.models.positions import sincos2d
from vit_jax.models.vit import SHARDING_RULES, Config, Encoder, ViT


class MaskedDecoder(nn.Module):
  """Predicts every patch from the tokens of the visible patches.

  Parameters: `embedding/{kernel,bias}`, `mask` `[1, 1, width]`,
  `blocks/{layers/…,norm/…}`, `prediction/{kernel,bias}`. All matrices are
  initialized by Xavier's uniform distribution (query, key and value as one
  matrix), `mask` by N(0, .02) and biases by 0. The MLP biases are initialized
  by N(0, 1e-6); in the authors' code they are 0.

  Attributes:
    outputs: number of values predicted for each patch.
    config: config of a Vision Transformer with the layers of the decoder.
  """

  outputs: int
  config: Config

  sharding_rules = SHARDING_RULES

  @property
  def like(self) -> ViT:
    """A Vision Transformer with the layers of this decoder.

    Its patches are single pixels. It is used to compare kernels with plain XLA
    operations.
    """
    return ViT(0, self.config)

  @nn.nowrap
  def replace(self, **options: Any) -> 'MaskedDecoder':
    """Returns the same decoder with other values of some fields of `config`."""
    return self.clone(config=dataclasses.replace(self.config, **options))

  @nn.compact
  def __call__(
    self,
    tokens: Float[Array, 'n s d'],
    order: Int[Array, 'n patches'],
    grid: tuple[int, int],
    num_visible: int,
  ) -> Float[Array, 'n patches outputs']:
    """Predicts all patches, row by row; float32.

    Args:
      tokens: tokens from the encoder; those of visible patches are the last.
      order: indices of all patches of each image, the visible ones first, in
        the order of `tokens`.
      grid: rows and columns of patches.
      num_visible: number of visible patches.
    """
    width, dtype = self.config.width, self.config.compute_dtype
    x = Linear((width,), dtype=dtype, name='embedding')(tokens)
    # One learned token stands for every hidden patch.
    mask = self.param('mask', NORMAL, (1, 1, width))
    n, prefix = len(x), x.shape[1] - num_visible
    num_hidden = order.shape[1] - num_visible
    hidden = jnp.broadcast_to(mask.astype(x.dtype), (n, num_hidden, width))
    patches = jnp.concatenate([x[:, prefix:], hidden], axis=1)
    # The inverse permutation: the position of each patch in `patches`.
    inverse = jnp.argsort(order, axis=1)
    patches = jnp.take_along_axis(patches, inverse[..., None], axis=1)
    table = sincos2d(grid, width, last_included=False)
    # Positions are added after the reordering, so they fit the tokens.
    patches += jnp.asarray(table, x.dtype)
    x = jnp.concatenate([x[:, :prefix], patches], axis=1)
    x, _ = Encoder(self.config, name='blocks')(x, None)
    predict = Linear(
      (self.outputs,),
      dtype=dtype,
      out_dtype=jnp.dtype(jnp.float32),
      name='prediction',
    )
    return predict(x[:, prefix:])


@schema.operational('remat', 'unroll')
def Decoder(  # noqa: N802 (the fixed symbol that the section resolves to)
  outputs: int,
  /,
  *,
  width: int = 512,
  depth: int = 8,
  num_heads: int = 16,
  mlp_dim: int = 2048,
  dtype: str = 'bfloat16',
  remat: str = 'none',
  unroll: int = 1,
) -> MaskedDecoder:
  """Builds a decoder; the defaults are those of the authors for all encoders.

  Args:
    outputs: number of values predicted for each patch.
    width: channels of the tokens; a multiple of 4, for the positions.
    depth: number of layers.
    num_heads: number of attention heads; it divides the width.
    mlp_dim: hidden units of an MLP.
    dtype: dtype of the computation, 'bfloat16' or 'float32'; predictions are
      float32.
    remat: activations that the backward pass recomputes: 'none', 'full' or
      'dots'; see `vit.Config`.
    unroll: number of layers that are unrolled in each step of the scan.

  Raises:
    UserError: a number is out of range, or a choice is unknown.
  """
  try:
    config = Config(
      patch_size=1,
      width=width,
      depth=depth,
      num_heads=num_heads,
      mlp_dim=mlp_dim,
      gelu='exact',
      position='sincos2d_mae',
      start_values='mae',
      dtype=dtype,
      remat=remat,
      unroll=unroll,
    )
  except UserError as error:  # the message names the keys of a model
    raise UserError(f'objective.decoder: {error}') from error
  return MaskedDecoder(outputs, config)
