"""The Vision Transformer (arXiv 2010.11929, section 3.1 and Table 1)."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from vit_jax import flops, plugins
from vit_jax.errors import UserError, check_range
from vit_jax.models import layers
from vit_jax.models import sizes as sizes_lib
from vit_jax.models.attention import IMPLEMENTATIONS
from vit_jax.models.linear import Linear
from vit_jax.models.pooling import MapHead
from vit_jax.models.posemb import PositionEmbedding

Images = Float[Array | np.ndarray, 'n y x c']
# What a checkpoint decides about its model; a fine-tuning run takes these over.
ARCHITECTURE = ('variant', *sizes_lib.NAMES, 'pool', 'gelu')
_CHOICES = {
  'pool': ('token', 'gap', 'map'),
  'gelu': ('tanh', 'exact'),
  'remainder': ('error', 'drop'),
  'dtype': ('bfloat16', 'float32'),
  'attention': IMPLEMENTATIONS,
  'remat': tuple(layers.REMAT_POLICIES),
}
_MAX_SIZE = 2**31 - 1  # XLA's dimensions


class ViT(nn.Module):
  """A Vision Transformer; build it with `Model`, which knows the sizes.

  Parameters (layers stacked): `embedding/{kernel,bias}`, `cls`,
  `position/embedding`, `encoder/{layers/…,norm}`, `map/…`,
  `pre_logits/{kernel,bias}`, `head/{kernel,bias}`.
  """

  num_classes: int
  patch_size: int
  width: int
  depth: int
  mlp_dim: int
  num_heads: int
  pool: str
  pre_logits: bool
  head_bias: float
  dropout: float
  drop_path: float
  gelu: str
  remainder: str
  dtype: jnp.dtype
  attention: str
  remat: str
  unroll: int

  def __call__(
    self, images: Images, key: Key[Array, ''] | None = None
  ) -> Float[Array, 'n k']:
    """Logits of images in [-1, 1]; float32. A key turns dropout on."""
    return self.predict(images, key)['logits']

  @nn.compact
  def predict(
    self, images: Images, key: Key[Array, ''] | None = None
  ) -> dict[str, Float[Array, 'n _']]:
    """Features (after pooling and pre-logits) and logits of images.

    Args:
      images: `[n, height, width, 3]`, in [-1, 1].
      key: for dropout and drop path; None (evaluation) turns them off.

    Returns:
      `features` `[n, width]` and `logits` `[n, num_classes]`, float32; the
      logits are the features where `num_classes` is 0.
    """
    embed_key, encoder_key = (None, None)
    if key is not None:
      embed_key, encoder_key = jax.random.split(key)
    x = self._embed_patches(jnp.asarray(images, self.dtype))  # [n, t, d]
    if self.pool == 'token':
      cls = self.param('cls', nn.initializers.zeros_init(), (1, 1, self.width))
      cls = jnp.broadcast_to(cls.astype(x.dtype), (x.shape[0], 1, self.width))
      x = jnp.concatenate([cls, x], axis=1)  # [n, 1 + t, d]
    x = PositionEmbedding(name='position')(x)
    x = layers.dropout(x, self.dropout, embed_key)
    x = layers.Encoder(
      depth=self.depth,
      num_heads=self.num_heads,
      mlp_dim=self.mlp_dim,
      dropout=self.dropout,
      drop_path=self.drop_path,
      gelu=self.gelu,
      dtype=self.dtype,
      attention=self.attention,
      remat=self.remat,
      unroll=self.unroll,
      name='encoder',
    )(x, encoder_key)
    features = self._pool(x)  # [n, d]
    dense = functools.partial(Linear, dtype=self.dtype)
    if self.pre_logits:
      lecun = nn.initializers.lecun_normal()
      features = dense((self.width,), kernel_init=lecun, name='pre_logits')(
        features
      )
      features = jnp.tanh(features)
    logits = features
    if self.num_classes:
      logits = dense(
        (self.num_classes,),
        model_dim=-1,
        kernel_init=nn.initializers.zeros_init(),
        bias_init=nn.initializers.constant(self.head_bias),
        out_dtype=jnp.dtype(jnp.float32),  # near -10 bfloat16 has steps of 1/16
        name='head',
      )(features)
    as_float = functools.partial(jnp.asarray, dtype=jnp.float32)
    return {'features': as_float(features), 'logits': as_float(logits)}

  def grid(self, image_size: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of patches of an image of (height, width) pixels.

    Raises:
      UserError: the patch does not divide it and `remainder` is 'error'.
    """
    height, width = image_size
    p = self.patch_size
    if self.remainder == 'error' and (height % p or width % p):
      sizes = [(max(height // p, 1) + i) * p for i in (0, 1)]
      raise UserError(
        f'an image of {height}x{width} pixels is not divisible by the patch '
        f'size {p}: take {sizes[0]} or {sizes[1]}, or set '
        "model.remainder='drop' to leave out the last "
        f'{height % p} rows and {width % p} columns (the VALID convolution of '
        'the official code).'
      )
    if min(height, width) < p:
      raise UserError(
        f'an image of {height}x{width} pixels holds no {p}x{p} patch.'
      )
    return height // p, width // p

  @property
  def apart(self) -> tuple[str, ...]:
    """Ends of the paths of parameters for `step.Trainer.apart`.

    The layers' matrices, where no layer is scanned. Not fc2's: its gradient is
    a product with what dropout and GELU make again, which XLA does more often
    if it fuses a sum into that product.
    """
    if self.unroll < self.depth:
      return ()
    names = (f'attention/{name}' for name in ('query', 'key', 'value', 'out'))
    return tuple(f'layers/{name}/kernel' for name in ('mlp/fc1', *names))

  def forward_flops(self, image_size: tuple[int, int]) -> int:
    """Matrix FLOPs of one image's forward pass, see `flops.vit_forward`."""
    rows, columns = self.grid(image_size)
    return flops.vit_forward(
      num_tokens=rows * columns + (self.pool == 'token'),
      num_patches=rows * columns,
      patch_size=self.patch_size,
      width=self.width,
      depth=self.depth,
      mlp_dim=self.mlp_dim,
      num_classes=self.num_classes,
      pre_logits=self.pre_logits,
      map_pooling=self.pool == 'map',
    )

  def _embed_patches(
    self, images: Float[Array, 'n y x c']
  ) -> Float[Array, 'n t d']:
    """Cuts patches and embeds them: a convolution whose stride is its size."""
    n, height, width, channels = images.shape
    rows, columns = self.grid((height, width))
    p = self.patch_size
    x = images[:, : rows * p, : columns * p]
    x = x.reshape(n, rows, p, columns, p, channels)
    x = x.transpose(0, 1, 3, 2, 4, 5)  # [n, rows, columns, p, p, c]
    x = x.reshape(n, rows * columns, p, p, channels)
    return Linear(
      (self.width,),
      inputs=(p, p, channels),
      kernel_init=nn.initializers.lecun_normal(),
      dtype=self.dtype,
      name='embedding',
    )(x)

  def _pool(self, x: Float[Array, 'n t d']) -> Float[Array, 'n d']:
    if self.pool == 'token':
      return x[:, 0]
    if self.pool == 'gap':
      return x.mean(axis=1)
    head = MapHead(
      self.num_heads, self.mlp_dim, self.gelu, self.dtype, name='map'
    )
    return head(x)


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
  given = zip(sizes_lib.NAMES, explicit, strict=True)
  return _checked(
    sizes=sizes_lib.of_variant(variant)
    | {name: size for name, size in given if size is not None},
    choices=dict(pool=pool, gelu=gelu, remainder=remainder)
    | dict(dtype=dtype, attention=attention, remat=remat),
    rates=dict(dropout=dropout, drop_path=drop_path),
    num_classes=num_classes,
    pre_logits=pre_logits,
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
