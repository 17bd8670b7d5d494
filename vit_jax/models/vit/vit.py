"""The Vision Transformer (arXiv 2010.11929, section 3.1 and Table 1)."""

import functools
import os
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from vit_jax.arrays import sharding
from vit_jax.config import schema
from vit_jax.errors import UserError
from vit_jax.models.attention import multi_head
from vit_jax.models.backbone import Backbone, Images, UncheckedImages
from vit_jax.models.contract import WANTED, Kernels, Leaves, Places, Stem
from vit_jax.models.layers import initializers, patches
from vit_jax.models.layers.linear import Linear
from vit_jax.models.layers.noise import dropout
from vit_jax.models.layers.norm import LayerNorm
from vit_jax.models.layers.pooling import MapHead
from vit_jax.models.layers.positions import Positions, Scheme, resize_leaves
from vit_jax.models.vit import encoder, sizes
from vit_jax.models.vit.config import STEM, Config

Size = tuple[int, int]
Tokens = Float[Array, 'n t d']

_DEFAULT_ALL_REDUCE, _ALL_REDUCE_PER_DEVICE = 120 * 2**20, 128 * 2**10  # bytes


class ViT(Backbone):
  """A Vision Transformer; `Model` builds it from config keys.

  Parameters, with those of the layers stacked: `stem/…` (hybrids),
  `embedding/{kernel,bias}`, `cls`, `distillation`, `registers`, `position/…`,
  `pre_norm/…`, `encoder/{layers/…,norm}`, `map/…`, `fc_norm/…`,
  `pre_logits/{kernel,bias}`, `head/{kernel,bias}`,
  `head_distillation/{kernel,bias}`.

  Attributes:
    num_classes: number of outputs of the head; 0 for a model without a head.
    config: validated config.
    stem: layers between the images and the patches; None for a model without a
      stem.
    made_for: (height, width) of the images that the positions were learned for,
      pixels; None for the size of the images in use. See `at_sizes`.
    position_offset: offset of the interpolation; see `at_sizes`.
  """

  config: Config
  stem: Stem | None = None
  made_for: Size | None = None
  position_offset: float = 0.0

  outputs = WANTED
  title = 'A Vision Transformer'
  determined = (
    *sizes.NAMES,
    'pool',
    'gelu',
    'gated',
    'norm_eps',
    'qk_norm',
    'pre_norm',
    'layer_scale',
    'registers',
    'distilled',
    'position',
    'position_at',
    'prefix_positions',
  )
  adopted = ('fc_norm',)
  sized = ('position/', 'encoder/layers/position/')
  fresh = ('head/', 'pre_logits/', 'head_distillation/')

  def setup(self):
    config, dtype = self.config, self.config.compute_dtype
    lecun = nn.initializers.lecun_normal()
    kernel_init, bias_init = {
      'authors': (lecun, nn.initializers.zeros_init()),
      'mae': (nn.initializers.xavier_uniform(), nn.initializers.zeros_init()),
      'trunc_normal': initializers.torch_convolution(3 * config.patch_size**2),
    }[config.start_values]
    self.embedding = Linear(
      (config.width,),
      input_axes=3,
      kernel_init=kernel_init,
      bias_init=bias_init,
      dtype=dtype,
    )
    self.prefix_tokens = [
      self.param(name, init, (1, count, config.width))
      for name, (count, init) in prefix_tokens(config).items()
    ]
    scheme = self.scheme
    if scheme.at == 'stem' or scheme.shared:
      self.positions = Positions(
        scheme, scheme.channels(config), name='position'
      )
    norm = functools.partial(LayerNorm, dtype, config.norm_eps)
    # These attributes cannot have the names of their config keys, which are
    # also attributes; `name` sets the paths of the parameters.
    if config.pre_norm:
      self.first_norm = norm(name='pre_norm')
    self.encoder = encoder.Encoder(
      config, scheme if scheme.at == 'layers' else None
    )
    if config.fc_norm:
      self.norm_of_mean = norm(name='fc_norm')
    if config.pool == 'map':
      self.map = MapHead(config)
    # The heads of the official JAX models are initialized by zeros.
    tanh_init, head_init = lecun, nn.initializers.zeros
    if config.start_values == 'trunc_normal':
      tanh_init = head_init = initializers.NORMAL
    if config.pre_logits:
      self.tanh_layer = Linear(
        (config.width,), kernel_init=tanh_init, dtype=dtype, name='pre_logits'
      )
    self.head = self._new_head(head_init)
    if config.distilled:
      self.head_distillation = self._new_head(head_init)

  def _predict(
    self, images: Images, key: Key[Array, ''] | None, want: tuple[str, ...]
  ) -> dict[str, Array]:
    _, height, width, _ = images.shape
    places = Places(self.grid((height, width)))
    tokens, inner = self._encode(self._embed(images), key, places, want)
    return inner | {'tokens': tokens} | self._read(tokens)

  def embed(self, images: UncheckedImages) -> Tokens:
    """Computes the tokens of patches, row by row, before the first layer.

    Positions that are added before the first layer are included.

    Args:
      images: float images in [-1, 1], `[n, height, width, channels]`.

    Raises:
      UserError: the images have a wrong dtype, shape or size.
    """
    return self._embed(self._input(images))[:, self.scheme.prefix :]

  def _embed(self, x: Images) -> Tokens:
    """Computes all tokens before the first layer, prefix tokens first."""
    _, height, width, _ = x.shape
    grid = self.grid((height, width))
    if self.stem is not None:
      x = self.stem(x)  # [n, y, x, c]
    side = self.config.patch_size
    x = self.embedding(patches.cut(x, grid, (side, side)))
    # Prefix tokens are added first, because they may also have positions.
    x = self._with_prefix(x)
    if self.scheme.at == 'stem':
      added = self.positions(Places(grid))['added']
      x = x + added.astype(x.dtype)
    return x

  def _with_prefix(self, x: Tokens, added: Any = None) -> Float[Array, 'n s d']:
    """Prepends the prefix tokens, after adding `added` to them."""
    if not self.prefix_tokens:
      return x
    first = [each.astype(x.dtype) for each in self.prefix_tokens]
    first = jnp.concatenate(first, 1)
    first = first if added is None else first + added
    first = jnp.broadcast_to(first, (x.shape[0], *first.shape[1:]))
    return jnp.concatenate([first, x], axis=1)  # [n, prefix + t, d]

  def encode(
    self,
    tokens: Tokens,
    key: Key[Array, ''] | None = None,
    places: Places | None = None,
  ) -> Float[Array, 'n s d']:
    """Computes all tokens after the last LayerNorm, prefix tokens first.

    Args:
      tokens: patch tokens from `embed`, without prefix tokens; some of them may
        be left out.
      key: random key of dropout and drop path; None for evaluation.
      places: positions of the tokens in the image.

    Raises:
      UserError: `places` is None, but the model uses positions in every layer.
    """
    scheme, added = self.scheme, None
    if scheme.at != 'stem' and scheme.kind != 'none' and places is None:
      raise UserError(
        f'model.position={scheme.kind!r} acts in every layer of this model, so '
        'encode needs the positions of the tokens: encode(tokens, key, '
        'Places(model.grid(image_size), kept)).'
      )
    if scheme.at == 'stem' and scheme.slots:
      # `embed` has added the positions of patches, not those of the prefix.
      added = self.positions.first(scheme.slots).astype(tokens.dtype)
    x = self._with_prefix(tokens, added)
    return self._encode(x, key, places or Places((0, 0)), ())[0]

  def _encode(
    self,
    x: Tokens,
    key: Key[Array, ''] | None,
    places: Places,
    want: tuple[str, ...],
  ) -> tuple[Tokens, dict[str, Array]]:
    # Dropout of the embedding has a key of its own, independent of the layers.
    embed_key, encoder_key = (None, None)
    if key is not None:
      embed_key, encoder_key = jax.random.split(key)
    x = dropout(x, self.config.dropout, embed_key)
    if self.config.pre_norm:
      x = self.first_norm(x)
    common = self.positions(places) if self.scheme.shared else None
    return self.encoder(x, encoder_key, want, common, places)

  def last_norm(self, tokens: Float[Array, '... d']) -> Float[Array, '... d']:
    """Applies the last LayerNorm to tokens of any block; float32.

    Args:
      tokens: outputs of blocks, see `layers` of `predict`.

    Returns:
      Normalized tokens. With `fc_norm`, a model has no such LayerNorm, and its
      tokens are returned unchanged.
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
    config, prefix = self.config, self.scheme.prefix
    if config.fc_norm:
      features = self.norm_of_mean(tokens[:, prefix:].mean(axis=1))
    elif config.pool == 'token':
      features = tokens[:, 0]
    elif config.pool == 'gap':
      features = tokens[:, prefix:].mean(axis=1)
    else:
      features = self.map(tokens[:, prefix:])
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

  @property
  def scheme(self) -> Scheme:
    """Kind of position embeddings and the tokens that have them."""
    config = self.config
    has_slots = config.position == 'learned' and config.prefix_positions
    return Scheme(
      config.position,
      config.position_at,
      prefix=config.prefix,
      slots=config.prefix if has_slots else 0,
      made_for=self.grid(self.made_for) if self.made_for else None,
      offset=self.position_offset,
    )

  @nn.nowrap
  def grid(self, image_size: Size) -> Size:
    """Returns rows and columns of patches of an image.

    Args:
      image_size: (height, width), pixels.

    Raises:
      UserError: the patch size does not divide the image, or is larger.
    """
    stride = 1 if self.stem is None else self.stem.stride
    # A stem rounds up whenever it halves the map.
    height, width = (-(-side // stride) for side in image_size)
    p = self.config.patch_size
    subject = 'an image of {}x{} pixels'.format(*image_size)
    if stride > 1:
      subject = f"the stem's map of {height}x{width} positions, of {subject},"
    if min(height, width) < p:
      raise UserError(
        f'{subject} is smaller than a patch of {p}x{p}: use larger images or '
        'smaller patches.'
      )
    if self.config.remainder == 'error' and (height % p or width % p):
      fitting = [(height // p + i) * p for i in (0, 1)]
      raise UserError(
        f'{subject} is not divisible by the patch size {p}: use {fitting[0]} '
        f"or {fitting[1]}, or set model.remainder='drop' to drop the last "
        f'{height % p} rows and {width % p} columns (as the VALID convolution '
        'of the official code does).'
      )
    return height // p, width // p

  @nn.nowrap
  def check(self, image_size: Size) -> None:
    """Checks that images can have this size.

    Raises:
      UserError: see `grid`.
    """
    self.grid(image_size)

  @property
  def patch_pixels(self) -> int:
    """Side of a patch in the image, pixels."""
    stride = 1 if self.stem is None else self.stem.stride
    return self.config.patch_size * stride

  @nn.nowrap
  def adapt(
    self,
    leaves: Leaves,
    old_size: Size,
    new_size: Size,
    method: str | None,
  ) -> Leaves:
    """Interpolates learned positions; see `positions.resize_leaves`."""
    grids = self.grid(old_size), self.grid(new_size)
    return resize_leaves(leaves, *grids, method)

  @nn.nowrap
  def at_sizes(self, made_for: Size, offset: float = 0.0) -> 'ViT':
    """Returns the model for images of any size.

    Learned positions are interpolated inside the program; positions without
    parameters are computed for the grid of the images. See
    `models.contract.Model.at_sizes`.

    Raises:
      UserError: positions are relative; these are numbered along the sequence
        of one grid.
    """
    if self.config.position == 'relative':
      raise UserError(
        "model.position='relative' numbers offsets along the sequence of one "
        f'grid, that of {made_for[0]}x{made_for[1]} pixels, and this training '
        "has images of several sizes: set model.position to 'learned', '2d', "
        "'sincos2d', 'sincos2d_mae', 'rope2d' or 'none'."
      )
    self.check(made_for)
    return self.clone(made_for=tuple(made_for), position_offset=offset)

  @property
  def replaceable(self) -> tuple[str, ...]:
    """LayerNorms before and after the mean, with `fc_norm`.

    A model has only one of them.
    """
    return ('encoder/norm/', 'fc_norm/') if self.config.fc_norm else ()

  @property
  def sharding_rules(self) -> tuple[tuple[str, int], ...]:
    """Sharding rules of the layers and of the stem."""
    stem = () if self.stem is None else self.stem.sharding_rules
    return (
      *encoder.SHARDING_RULES,
      (r'head(_distillation)?/(kernel|bias)', -1),
      *stem,
    )

  @property
  def apart(self) -> tuple[str, ...]:
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
    stem = None if self.stem is None else self.stem.section
    return super().architecture | {'stem': stem}

  @property
  def reference(self) -> 'ViT':
    """The same model without kernels, rematerialization or unrolling."""
    plain = self.replace(attention='xla', remat='none', unroll=1)
    return plain.clone(stem=self.stem and self.stem.reference)

  @property
  def kernels(self) -> Kernels | None:
    """The models for the comparison of kernels; None if XLA is used."""
    config = self.config
    accelerated = sharding.on_tpu() or sharding.on_gpu()
    if config.attention != 'kernel' and not (
      config.attention == 'auto' and accelerated
    ):
      return None
    if self.beyond_kernels:
      return None
    if sharding.on_gpu() and not self._takes_cudnn:
      return None
    # With a second layer, the result depends on all outputs of the first one.
    probe = self.replace(depth=min(config.depth, 2), unroll=1)
    return Kernels(probe, self.replace(attention='xla'))

  @property
  def _takes_cudnn(self) -> bool:
    config = self.config
    return multi_head.takes_cudnn(
      config.attention, config.head_dim, config.compute_dtype
    )

  @nn.nowrap
  def computed_by(self, image_size: Size) -> str:
    """Describes how attention is computed, and which options exclude kernels.

    Args:
      image_size: (height, width), pixels.
    """
    config, (rows, columns) = self.config, self.grid(image_size)
    if self.beyond_kernels:
      options = ' and '.join(self.beyond_kernels)
      return f'attention by XLA: kernels do not support {options}'
    if sharding.on_gpu():
      return f'attention by {"cuDNN" if self._takes_cudnn else "XLA"}'
    kernels = multi_head.takes_kernels(
      config.attention,
      self.scheme.prefix + rows * columns,
      config.width,
      config.num_heads,
      config.compute_dtype,
    )
    return f'attention by {"kernels" if kernels else "XLA"}'

  @property
  def beyond_kernels(self) -> tuple[str, ...]:
    """Options of this model that kernels do not support."""
    config = self.config
    # On GPUs, queries and keys are normalized and rotated before cuDNN.
    if sharding.on_gpu():
      relative = config.position == 'relative'
      return ("position='relative'",) if relative else ()
    options = {
      'qk_norm': config.qk_norm,
      f'position={config.position!r}': self.scheme.in_attention,
    }
    return tuple(name for name, used in options.items() if used)

  @nn.nowrap
  def compiler_options(
    self, platform: str, num_devices: int
  ) -> dict[str, str | int]:
    """Returns compiler options that halve the compile time of unrolled layers.

    All unrolled layers have the same code. With these options XLA compiles it
    once and calls it. This requires that gradients are all-reduced in parts
    that are the same for each layer: 128 KiB per device, which is large enough
    to make the latency negligible.

    Args:
      platform: JAX platform; only 'tpu' has such options.
      num_devices: number of devices that exchange gradients.

    Returns:
      XLA options; options that the user sets in $LIBTPU_INIT_ARGS are left out.
    """
    if platform != 'tpu' or self.config.unroll == 1:
      return {}
    part = min(num_devices * _ALL_REDUCE_PER_DEVICE, _DEFAULT_ALL_REDUCE)
    chosen: dict[str, Any] = {
      'xla_tpu_enable_deduplicated_calls': 'ENABLED',
      'xla_jf_crs_combiner_threshold_in_bytes': part,
    }
    users = os.environ.get('LIBTPU_INIT_ARGS', '')
    return {k: v for k, v in chosen.items() if k not in users}


def prefix_tokens(config: Config) -> dict[str, tuple[int, Any]]:
  """Returns number and initializer of the tokens that precede the patches.

  Args:
    config: config of the model.

  Returns:
    `{parameter: (number of tokens, initializer)}` in the order of the tokens:
    the class token, the distillation token (DeiT, arXiv 2012.12877) and the
    registers ("Vision Transformers Need Registers", arXiv 2309.16588).
  """
  normal, zeros = nn.initializers.normal, nn.initializers.zeros_init()
  tokens = {
    'cls': (
      int(config.pool == 'token'),
      zeros if config.start_values == 'authors' else normal(0.02),
    ),
    'distillation': (int(config.distilled), normal(0.02)),
    # Registers need different initial values, because equal ones stay equal.
    'registers': (config.registers, normal(1e-6)),
  }
  return {name: each for name, each in tokens.items() if each[0]}


@schema.keyed_by(Config)
def Model(  # noqa: N802 (the fixed symbol that a config's name resolves to)
  num_classes: int, /, **keys: Any
) -> ViT:
  """Builds a Vision Transformer.

  Args:
    num_classes: number of outputs of the head; 0 for a model without a head.
    **keys: fields of `Config`.

  Raises:
    UserError: see `Config`; or 'kernel' attention does not support an option.
  """
  config, stem = Config(**keys), None
  if config.stem is not None:
    stem = schema.construct(
      STEM.constructor(config.stem['name']),
      config.stem,
      config.compute_dtype,
      config.remat,
      keys.get('unroll', 1),  # of the units of the stem, not of the layers
    )
  model = ViT(num_classes, config, stem)
  if config.attention == 'kernel' and model.beyond_kernels:
    raise UserError(
      "model.attention is 'kernel', and kernels do not support "
      f"{' and '.join(model.beyond_kernels)}: set model.attention='auto'."
    )
  return model
