"""The Vision Transformer (arXiv 2010.11929, section 3.1 and Table 1)."""

import os
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from vit_jax.arrays import sharding
from vit_jax.errors import UserError
from vit_jax.models.contract import Kernels
from vit_jax.models.layers import transformer
from vit_jax.models.layers.linear import Linear
from vit_jax.models.layers.pooling import MapHead
from vit_jax.models.layers.positions import PositionEmbedding, resize
from vit_jax.models.vit import sizes

Images = Float[Array | np.ndarray, 'n y x c']
Tokens = Float[Array, 'n t d']
_DEFAULT_EXCHANGE, _EXCHANGE_A_DEVICE = 120 * 2**20, 128 * 2**10  # bytes
_MATRICES = ('mlp/fc1', *(f'attention/{n}' for n in ('query', 'key', 'value')))


class ViT(nn.Module):
  """A Vision Transformer; build it with `Model`, which knows the sizes.

  It keeps `models.contract.Model`. Parameters (layers stacked):
  `embedding/{kernel,bias}`, `cls`, `position/embedding`,
  `encoder/{layers/…,norm}`, `map/…`, `pre_logits/{kernel,bias}`,
  `head/{kernel,bias}`.
  """

  num_classes: int
  patch_size: int
  width: int
  depth: int
  mlp_dim: int
  num_heads: int
  pool: str
  has_pre_logits: bool
  head_bias: float
  dropout: float
  drop_path: float
  gelu: str
  remainder: str
  dtype: jnp.dtype
  attention: str
  remat: str
  unroll: int

  fresh = ('head/', 'pre_logits/')
  sized = ('position/embedding',)
  sharding_rules = (
    (r'attention/(query|key|value)/kernel', -2),
    (r'attention/(query|key|value)/bias', -2),
    (r'attention/out/kernel', -3),
    (r'mlp/fc1/(kernel|bias)', -1),
    (r'mlp/fc2/kernel', -2),
    (r'head/(kernel|bias)', -1),
  )

  def setup(self):
    lecun = nn.initializers.lecun_normal()
    self.embedding = Linear(
      (self.width,), input_axes=3, kernel_init=lecun, dtype=self.dtype
    )
    if self.pool == 'token':
      self.cls = self.param(
        'cls', nn.initializers.zeros_init(), (1, 1, self.width)
      )
    self.position = PositionEmbedding()
    self.encoder = transformer.Encoder(
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
    )
    if self.pool == 'map':
      self.map = MapHead(self.num_heads, self.mlp_dim, self.gelu, self.dtype)
    if self.has_pre_logits:
      self.pre_logits = Linear(
        (self.width,), kernel_init=lecun, dtype=self.dtype
      )
    if self.num_classes:
      self.head = Linear(
        (self.num_classes,),
        model_dim=-1,
        kernel_init=nn.initializers.zeros_init(),
        bias_init=nn.initializers.constant(self.head_bias),
        dtype=self.dtype,
        out_dtype=jnp.dtype(jnp.float32),  # near -10 bfloat16 has steps of 1/16
      )

  def __call__(
    self, images: Images, key: Key[Array, ''] | None = None
  ) -> Float[Array, 'n k']:
    """Logits of images in [-1, 1]; float32. A key turns dropout on."""
    return self.predict(images, key)['logits']

  def predict(
    self,
    images: Images,
    key: Key[Array, ''] | None = None,
    want: tuple[str, ...] = (),
  ) -> dict[str, Float[Array, 'n ...']]:
    """Features (after pooling and pre-logits) and logits of images.

    Args:
      images: `[n, height, width, 3]`, in [-1, 1].
      key: for dropout and drop path; None (evaluation) turns them off.
      want: of `models.contract.WANTED`.

    Returns:
      `features` `[n, width]` and `logits` `[n, num_classes]`, float32 (the
      logits are the features where `num_classes` is 0), and what `want` names:
      `tokens` `[n, t, d]`, `layers` `[n, layers, t, d]`, `attention`
      `[n, layers, heads, q, k]`.
    """
    tokens, inner = self._transform(self._tokens(images), key, want)
    inner |= {'tokens': tokens}
    return self.readout(tokens) | {
      name: inner[name].astype(jnp.float32) for name in want
    }

  def embed(self, images: Images) -> Tokens:
    """Tokens of patches, in rows; position embeddings are added."""
    return self._tokens(images)[:, self._prefix :]

  def _tokens(self, images: Images) -> Tokens:
    """All tokens before the first layer: the class token first.

    A patch embedding is a convolution whose stride is its size.
    """
    x = jnp.asarray(images, self.dtype)
    n, height, width, channels = x.shape
    rows, columns = self.grid((height, width))
    p = self.patch_size
    x = x[:, : rows * p, : columns * p]
    x = x.reshape(n, rows, p, columns, p, channels)
    x = x.transpose(0, 1, 3, 2, 4, 5)  # [n, rows, columns, p, p, c]
    x = self.embedding(x.reshape(n, rows * columns, p, p, channels))
    if self._prefix:
      cls = self.cls.astype(x.dtype)
      cls = jnp.broadcast_to(cls, (n, 1, self.width))
      x = jnp.concatenate([cls, x], axis=1)  # [n, 1 + t, d]
    return x + self.position(x.shape[1], self.width).astype(x.dtype)

  def encode(
    self, tokens: Tokens, key: Key[Array, ''] | None = None
  ) -> Float[Array, 'n s d']:
    """All tokens after the last norm: the class token first, if there is one.

    Args:
      tokens: of patches, from `embed`; some of them may be left out.
      key: for dropout and drop path.
    """
    if self._prefix:
      first = self.position.first(1).astype(tokens.dtype)
      cls = self.cls.astype(tokens.dtype) + first
      cls = jnp.broadcast_to(cls, (tokens.shape[0], 1, self.width))
      tokens = jnp.concatenate([cls, tokens], axis=1)  # [n, 1 + t, d]
    return self._transform(tokens, key, ())[0]

  def _transform(
    self, x: Tokens, key: Key[Array, ''] | None, want: tuple[str, ...]
  ) -> tuple[Tokens, dict[str, Array]]:
    embed_key, encoder_key = (None, None)
    if key is not None:
      embed_key, encoder_key = jax.random.split(key)
    x = transformer.dropout(x, self.dropout, embed_key)
    return self.encoder(x, encoder_key, want)

  def readout(self, tokens: Tokens) -> dict[str, Float[Array, 'n _']]:
    """Features and logits of tokens from `encode`; float32."""
    if self.pool == 'token':
      features = tokens[:, 0]
    elif self.pool == 'gap':
      features = tokens.mean(axis=1)
    else:
      features = self.map(tokens)
    if self.has_pre_logits:
      features = jnp.tanh(self.pre_logits(features))
    logits = self.head(features) if self.num_classes else features
    return {
      'features': features.astype(jnp.float32),
      'logits': logits.astype(jnp.float32),
    }

  @property
  def _prefix(self) -> int:
    """Tokens before those of patches."""
    return int(self.pool == 'token')

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

  def check(self, image_size: tuple[int, int]) -> None:
    """Raises UserError if images cannot have that size; see `grid`."""
    self.grid(image_size)

  def adapt(
    self,
    leaves: dict[str, np.ndarray],
    old_size: tuple[int, int],
    new_size: tuple[int, int],
    method: str,
  ) -> dict[str, np.ndarray]:
    """Interpolates the position embedding; see `positions.resize`."""
    grids = self.grid(old_size), self.grid(new_size)
    return {p: resize(leaf, *grids, method) for p, leaf in leaves.items()}

  @property
  def apart(self) -> tuple[str, ...]:
    """The layers' matrices, where no layer is scanned.

    Not fc2's: its gradient is a product with activations that are recomputed
    (dropout and GELU), and XLA recomputes them more often when it fuses the sum
    over micro-batches into that product.
    """
    if self.unroll < self.depth:
      return ()
    return tuple(f'layers/{n}/kernel' for n in (*_MATRICES, 'attention/out'))

  @property
  def architecture(self) -> dict[str, Any]:
    """Sizes, pooling, and the kind of GELU, which no shape shows."""
    names = (*sizes.NAMES, 'pool', 'gelu')
    return {name: getattr(self, name) for name in names}

  @property
  def reference(self) -> 'ViT':
    """Without kernels, rematerialisation or unrolling."""
    return self.clone(attention='xla', remat='none', unroll=1)

  @property
  def kernels(self) -> Kernels | None:
    """Those of attention, where they may be used."""
    wanted = self.attention == 'kernel'
    if not wanted and not (self.attention == 'auto' and sharding.on_tpu()):
      return None
    # The second layer lets the first one's results for every token count.
    probe: Any = self.clone(depth=min(self.depth, 2), unroll=1)
    plain: Any = self.clone(attention='xla')
    return Kernels(probe, plain)

  def compiler_options(
    self, platform: str, num_devices: int
  ) -> dict[str, str | int]:
    """Options for unrolled layers on TPUs, which halve the compile time.

    All unrolled layers have the same code, so it is compiled once and called.
    For that, gradients must be all-reduced in parts that are the same in each
    layer: of 128 KiB per device, large enough that latency is negligible.

    Options that the user has set in $LIBTPU_INIT_ARGS are not overridden.
    """
    if platform != 'tpu' or self.unroll == 1:
      return {}
    part = min(num_devices * _EXCHANGE_A_DEVICE, _DEFAULT_EXCHANGE)
    options: dict[str, Any] = {
      'xla_tpu_enable_deduplicated_calls': 'ENABLED',
      'xla_jf_crs_combiner_threshold_in_bytes': part,
    }
    users = os.environ.get('LIBTPU_INIT_ARGS', '')
    return {k: v for k, v in options.items() if k not in users}
