"""The decoder of masked autoencoders (arXiv 2111.06377, section 3)."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from vit_jax.config import plugins
from vit_jax.errors import UserError, check_range
from vit_jax.models.layers import transformer
from vit_jax.models.layers.linear import Linear
from vit_jax.models.layers.positions import fixed
from vit_jax.models.vit import Model
from vit_jax.models.vit.vit import ViT

_DTYPES = ('bfloat16', 'float32')


class MaskedDecoder(nn.Module):
  """From the tokens of visible patches to a prediction for every patch.

  Parameters: `embedding/{kernel,bias}`, `mask` `[1, 1, width]`,
  `blocks/{layers/…,norm/…}`, `prediction/{kernel,bias}`. All matrices start
  Xavier-uniform (query, key and value as one), `mask` N(0, .02), and biases 0
  but for N(0, 1e-6) in the MLPs, which start with 0 in the authors' code.
  """

  outputs: int
  width: int
  depth: int
  num_heads: int
  mlp_dim: int
  dtype: jnp.dtype
  remat: str
  unroll: int
  attention: str = 'auto'  # of `multi_head.IMPLEMENTATIONS`

  sharding_rules = (
    (r'attention/(query|key|value)/(kernel|bias)', -2),
    (r'attention/out/kernel', -3),
    (r'mlp/fc1/(kernel|bias)', -1),
    (r'mlp/fc2/kernel', -2),
  )

  @property
  def like(self) -> ViT:
    """A Vision Transformer with the layers of this decoder.

    For images of a pixel a patch: its kernels are compared in place of the
    decoder's.
    """
    return Model(
      0,
      patch_size=1,
      width=self.width,
      depth=self.depth,
      mlp_dim=self.mlp_dim,
      num_heads=self.num_heads,
      gelu='exact',
      dtype=str(jnp.dtype(self.dtype)),
      attention=self.attention,
    )

  @nn.compact
  def __call__(
    self,
    tokens: Float[Array, 'n s d'],
    order: Int[Array, 'n patches'],
    grid: tuple[int, int],
    num_visible: int,
  ) -> Float[Array, 'n patches outputs']:
    """Predictions for all patches, in rows; float32.

    Args:
      tokens: from the encoder; the visible patches' are the last.
      order: all patches of each image, the visible ones first, as in `tokens`.
      grid: rows and columns of patches.
      num_visible: how many patches are visible.
    """
    x = Linear((self.width,), dtype=self.dtype, name='embedding')(tokens)
    mask = self.param('mask', nn.initializers.normal(0.02), (1, 1, self.width))
    n, prefix = len(x), x.shape[1] - num_visible
    num_hidden = order.shape[1] - num_visible
    hidden = jnp.broadcast_to(mask.astype(x.dtype), (n, num_hidden, self.width))
    patches = jnp.concatenate([x[:, prefix:], hidden], axis=1)
    places = jnp.argsort(order, axis=1)  # where each patch of a row stands
    patches = jnp.take_along_axis(patches, places[..., None], axis=1)
    table = fixed.sincos2d(grid, self.width, last_included=False)
    patches += jnp.asarray(table, x.dtype)
    x = jnp.concatenate([x[:, :prefix], patches], axis=1)
    blocks = transformer.Encoder(
      depth=self.depth,
      num_heads=self.num_heads,
      mlp_dim=self.mlp_dim,
      dropout=0.0,
      drop_path=0.0,
      gelu='exact',
      dtype=self.dtype,
      attention=self.attention,
      remat=self.remat,
      unroll=self.unroll,
      joint_start=True,
      name='blocks',
    )
    x, _ = blocks(x, None)
    predict = Linear(
      (self.outputs,),
      dtype=self.dtype,
      out_dtype=jnp.dtype(jnp.float32),
      name='prediction',
    )
    return predict(x[:, prefix:])


@plugins.operational('remat', 'unroll')
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
  """Builds a decoder; the authors' by default, for every size of encoder.

  Args:
    outputs: numbers to be predicted for each patch.
    width: of its tokens; a multiple of 4, for the positions.
    depth: layers.
    num_heads: of attention; it divides the width.
    mlp_dim: hidden units.
    dtype: of computation, 'bfloat16' or 'float32'; predictions are float32.
    remat: as the key of the model vit.
    unroll: likewise.

  Raises:
    UserError: a number outside its range, an unknown choice.
  """
  sizes = dict(width=width, depth=depth, num_heads=num_heads, mlp_dim=mlp_dim)
  where = 'objective.decoder'
  for key, size in (sizes | dict(unroll=unroll)).items():
    check_range(f'{where}.{key}', size, at_least=1)
  if width % num_heads or width % 4:
    raise UserError(
      f'{where} has the width {width} and {num_heads} heads: num_heads and 4 '
      'must divide width.'
    )
  policies = tuple(transformer.REMAT_POLICIES)
  for key, value, allowed in (
    ('dtype', dtype, _DTYPES),
    ('remat', remat, policies),
  ):
    if value not in allowed:
      raise UserError(f'{where}.{key} is {value!r}; allowed: {allowed}.')
  return MaskedDecoder(
    outputs=outputs,
    width=width,
    depth=depth,
    num_heads=num_heads,
    mlp_dim=mlp_dim,
    dtype=jnp.dtype(dtype),
    remat=remat,
    unroll=min(unroll, depth),
  )
