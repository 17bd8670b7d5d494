"""From images to logits (arXiv 2010.11929, section 3.1 and Table 1)."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from vit_jax.errors import UserError
from vit_jax.models.contract import Places, Stem
from vit_jax.models.layers import transformer
from vit_jax.models.layers.head import head
from vit_jax.models.layers.linear import Linear
from vit_jax.models.layers.norm import LayerNorm
from vit_jax.models.layers.pooling import MapHead
from vit_jax.models.layers.positions import Positions, Scheme
from vit_jax.models.vit import grid
from vit_jax.models.vit import tokens as tokens_lib

Images = Float[Array | np.ndarray, 'n y x c']
Tokens = Float[Array, 'n t d']


class Network(nn.Module):
  """The function of a Vision Transformer; see `Model` for its fields.

  Parameters (layers stacked):
  `stem/…` (hybrids), `embedding/{kernel,bias}`, `cls`, `distillation`,
  `registers`, `position/…`,
  `pre_norm/…`, `encoder/{layers/…,norm}`, `map/…`, `fc_norm/…`,
  `pre_logits/{kernel,bias}`, `head/{kernel,bias}`,
  `head_distillation/{kernel,bias}`.
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
  position: str
  position_at: str | None
  prefix_positions: bool
  registers: int
  distilled: bool
  layer_scale: float | None
  qk_norm: bool
  norm_eps: float
  pre_norm: bool
  gated: bool
  fc_norm: bool
  start_values: str
  stem: Stem | None = None
  made_for: tuple[int, int] | None = None  # see `ViT.at_sizes`
  position_offset: float = 0.0
  drop_path_first: float = 0.0

  def setup(self):
    lecun, as_mae = nn.initializers.lecun_normal(), self.start_values == 'mae'
    self.embedding = Linear(
      (self.width,),
      input_axes=3,
      kernel_init=nn.initializers.xavier_uniform() if as_mae else lecun,
      dtype=self.dtype,
    )
    prefix = tokens_lib.prefix(*self._kinds, 0.02 if as_mae else 0.0)
    self.prefix = [
      self.param(name, init, (1, count, self.width))
      for name, (count, init) in prefix.items()
    ]
    scheme = self.scheme
    if scheme.at == 'stem' or scheme.shared:
      width = self.width
      if scheme.in_attention:
        width //= self.num_heads
      self.positions = Positions(scheme, width, name='position')
    if self.pre_norm:
      self.norm_before = LayerNorm(self.dtype, self.norm_eps, name='pre_norm')
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
      gated=self.gated,
      qk_norm=self.qk_norm,
      layer_scale=self.layer_scale,
      epsilon=self.norm_eps,
      scheme=scheme if scheme.at == 'layers' else None,
      drop_path_first=self.drop_path_first,
      joint_start=as_mae,
      last_norm=not self.fc_norm,
    )
    if self.fc_norm:
      self.norm_of_mean = LayerNorm(self.dtype, self.norm_eps, name='fc_norm')
    if self.pool == 'map':
      self.map = MapHead(
        self.num_heads, self.mlp_dim, self.gelu, self.dtype, self.norm_eps
      )
    if self.has_pre_logits:
      self.pre_logits = Linear(
        (self.width,), kernel_init=lecun, dtype=self.dtype
      )
    if self.num_classes:
      new = functools.partial(
        head, self.num_classes, self.dtype, bias=self.head_bias
      )
      self.head = new()
      if self.distilled:
        self.head_distillation = new()

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
      `[n, layers, heads, q, k]`, `heads` `[n, heads, num_classes]`.
    """
    _, height, width, _ = images.shape
    places = Places(self.grid((height, width)))
    tokens, inner = self._transform(self._tokens(images), key, places, want)
    inner |= {'tokens': tokens} | self._read(tokens)
    return {
      name: inner[name].astype(jnp.float32)
      for name in ('features', 'logits', *want)
    }

  def embed(self, images: Images) -> Tokens:
    """Tokens of patches, in rows; what is added at the stem is added."""
    return self._tokens(images)[:, self.scheme.prefix :]

  def _tokens(self, images: Images) -> Tokens:
    """All tokens before the first layer: those before the patches first.

    A patch embedding is a convolution whose stride is its size.
    """
    x = jnp.asarray(images, self.dtype)
    _, height, width, _ = x.shape
    rows, columns = self.grid((height, width))
    if self.stem is not None:
      x = self.stem(x)  # [n, y, x, c]
    n, *_, channels = x.shape
    p = self.patch_size
    x = x[:, : rows * p, : columns * p]
    x = x.reshape(n, rows, p, columns, p, channels)
    x = x.transpose(0, 1, 3, 2, 4, 5)  # [n, rows, columns, p, p, c]
    x = self.embedding(x.reshape(n, rows * columns, p, p, channels))
    x = self._with_prefix(x)
    if self.scheme.at == 'stem':
      added = self.positions(Places((rows, columns)))['added']
      x = x + added.astype(x.dtype)
    return x

  def _with_prefix(self, x: Tokens, added: Any = None) -> Float[Array, 'n s d']:
    """`[n, t, d]` → `[n, prefix + t, d]`; `added` is added to the new ones."""
    if not self.prefix:
      return x
    first = jnp.concatenate([each.astype(x.dtype) for each in self.prefix], 1)
    first = first if added is None else first + added
    first = jnp.broadcast_to(first, (x.shape[0], *first.shape[1:]))
    return jnp.concatenate([first, x], axis=1)

  def encode(
    self,
    tokens: Tokens,
    key: Key[Array, ''] | None = None,
    places: Places | None = None,
  ) -> Float[Array, 'n s d']:
    """All tokens after the last norm: those before the patches first.

    Args:
      tokens: of patches, from `embed`; some of them may be left out.
      key: for dropout and drop path.
      places: of these tokens.

    Raises:
      UserError: positions act in every layer, and there are no places.
    """
    scheme, added = self.scheme, None
    if scheme.at != 'stem' and scheme.kind != 'none' and places is None:
      raise UserError(
        f'positions of the kind {scheme.kind!r} act in every layer of this '
        'model: say where the tokens are, encode(tokens, key, '
        'Places(model.grid(image_size), kept)).'
      )
    if scheme.at == 'stem' and scheme.slots:
      added = self.positions.first(scheme.slots).astype(tokens.dtype)
    x = self._with_prefix(tokens, added)
    return self._transform(x, key, places or Places((0, 0)), ())[0]

  def _transform(
    self,
    x: Tokens,
    key: Key[Array, ''] | None,
    places: Places,
    want: tuple[str, ...],
  ) -> tuple[Tokens, dict[str, Array]]:
    embed_key, encoder_key = (None, None)
    if key is not None:
      embed_key, encoder_key = jax.random.split(key)
    x = transformer.dropout(x, self.dropout, embed_key)
    if self.pre_norm:
      x = self.norm_before(x)
    common = self.positions(places) if self.scheme.shared else None
    return self.encoder(x, encoder_key, want, common, places)

  def readout(self, tokens: Tokens) -> dict[str, Float[Array, 'n _']]:
    """Features and logits of tokens from `encode`; float32."""
    out = self._read(tokens)
    return {k: out[k].astype(jnp.float32) for k in ('features', 'logits')}

  def _read(self, tokens: Tokens) -> dict[str, Array]:
    """Features, logits, and the logits of each head.

    A distilled model's features and logits are the means of its two tokens' and
    of its two heads'.
    """
    first = self.scheme.prefix  # patches begin there
    if self.fc_norm:
      features = self.norm_of_mean(tokens[:, first:].mean(axis=1))
    elif self.pool == 'token':
      features = tokens[:, 0]
    elif self.pool == 'gap':
      features = tokens[:, first:].mean(axis=1)
    else:
      features = self.map(tokens[:, first:])
    if self.has_pre_logits:
      features = jnp.tanh(self.pre_logits(features))
    logits = self.head(features) if self.num_classes else features
    if not self.distilled:
      heads = logits[:, None]
      return {'features': features, 'logits': logits, 'heads': heads}
    taught = tokens[:, 1]
    second = self.head_distillation(taught) if self.num_classes else taught
    return {
      'features': (features + taught) / 2,
      'logits': (logits + second) / 2,
      'heads': jnp.stack([logits, second], axis=1),
    }

  @property
  def _kinds(self) -> tuple[str, bool, int]:
    """What decides the tokens before those of patches."""
    return self.pool, self.distilled, self.registers

  @property
  def scheme(self) -> Scheme:
    """How positions are told."""
    prefix = tokens_lib.count(*self._kinds)
    slots = prefix * (self.position == 'learned' and self.prefix_positions)
    made_for = self.made_for and self.grid(self.made_for)
    kind = self.position, self.position_at
    return Scheme(*kind, prefix, slots, made_for, self.position_offset)

  def grid(self, image_size: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of patches of an image of (height, width) pixels.

    Raises:
      UserError: see `grid.of_image`.
    """
    stride = 1 if self.stem is None else self.stem.stride
    return grid.of_image(image_size, self.patch_size, stride, self.remainder)
