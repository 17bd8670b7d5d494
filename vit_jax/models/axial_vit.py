"""The Vision Transformer with axial attention (appendix D.6)."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, Shaped

from vit_jax.config import plugins
from vit_jax.errors import UserError, check_range
from vit_jax.models import backbone, vit
from vit_jax.models.backbone import MAX_SIZE, Backbone, BackboneConfig, Images
from vit_jax.models.layers.head import head
from vit_jax.models.layers.linear import Linear
from vit_jax.models.layers.noise import dropout
from vit_jax.models.layers.norm import LayerNorm
from vit_jax.models.layers.positions import resize
from vit_jax.models.layers.remat import rematerialized
from vit_jax.models.layers.sized_parameter import sized_parameter
from vit_jax.models.vit import encoder, sizes

Size = tuple[int, int]


@plugins.operational('remat', 'unroll')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(BackboneConfig):
  """Keys of the config's `model` section for an Axial-ViT.

  `remat` and `unroll` apply to pairs of blocks.

  Attributes:
    variant: name of a ViT with the same sizes, such as 'B/16' (Table 1). Sizes
      that are set explicitly take precedence.
    patch_size: side of a patch, pixels.
    width: channels of the residual stream; even, and a multiple of `num_heads`.
    depth: number of pairs of blocks.
    mlp_dim: hidden units of an MLP.
    num_heads: number of attention heads.
    head_bias: initial value of the head's bias (-10 for a sigmoid loss).
    dropout: dropout rate, applied where a ViT applies it.
    gelu: 'tanh' or 'exact'.

  Raises:
    UserError: a variant or choice is unknown, a size is missing, or a number is
      out of range.
  """

  variant: str | None = None
  patch_size: backbone.Size = backbone.OF_VARIANT
  width: backbone.Size = backbone.OF_VARIANT
  depth: backbone.Size = backbone.OF_VARIANT
  mlp_dim: backbone.Size = backbone.OF_VARIANT
  num_heads: backbone.Size = backbone.OF_VARIANT
  head_bias: float = 0.0
  dropout: float = 0.0
  gelu: str = 'tanh'

  def __post_init__(self):
    super().__post_init__()
    self.complete(sizes.of_variant(self.variant), 'B/16')
    for key in self.size_keys():
      size = getattr(self, key)
      check_range(f'model.{key}', size, at_least=1, at_most=MAX_SIZE)
    if self.width % self.num_heads or self.width % 2:
      raise UserError(
        f'model.width is {self.width} and model.num_heads is {self.num_heads}: '
        'num_heads and 2 must divide width.'
      )
    self.check_choices(gelu=('tanh', 'exact'))
    check_range('model.dropout', self.dropout, at_least=0, below=1)
    check_range('model.head_bias', self.head_bias)
    object.__setattr__(self, 'unroll', min(self.unroll, self.depth))

  @classmethod
  def size_keys(cls) -> tuple[str, ...]:
    """Keys that the variant determines if they are None."""
    return sizes.NAMES

  @property
  def block(self) -> vit.Config:
    """Config of the blocks, which are those of a ViT."""
    return vit.Config(
      patch_size=self.patch_size,
      width=self.width,
      depth=self.depth,
      mlp_dim=self.mlp_dim,
      num_heads=self.num_heads,
      dropout=self.dropout,
      gelu=self.gelu,
      dtype=self.dtype,
      # Kernels are made for hundreds of tokens; a row has about ten.
      attention='xla',
    )


class Pair(nn.Module):
  """A block along rows and a block along columns, with the signature of a scan.

  Every token attends to the tokens of its row and then to those of its column.
  The paper does not say which comes first. In later public code of its authors
  the first block, called 'row', attends along the first axis. Transposed images
  turn one into the other.

  Reference: appendix D.6.

  Attributes:
    config: config of the model.
    grid: rows and columns of tokens.
    want_layers: whether to return the tokens after both blocks too.
  """

  config: Config
  grid: Size
  want_layers: bool

  @nn.compact
  def __call__(
    self, x: Float[Array, 'n t d'], per_layer: dict[str, Shaped[Array, ' 2']]
  ) -> tuple[Float[Array, 'n t d'], Float[Array, '2 n t d'] | None]:
    layers, (rows, columns) = [], self.grid
    for i, name in enumerate(('row', 'column')):
      block = encoder.Block(self.config.block, name=name)
      # Lines become examples of the block.
      own = jax.tree.map(lambda leaf, i=i: leaf[i], per_layer)
      n, t, d = x.shape
      if name == 'row':
        y, _ = block(x.reshape(n * rows, columns, d), own, {})
        x = y.reshape(n, t, d)
      else:
        y = x.reshape(n, rows, columns, d).swapaxes(1, 2)
        y, _ = block(y.reshape(n * columns, rows, d), own, {})
        x = y.reshape(n, columns, rows, d).swapaxes(1, 2).reshape(n, t, d)
      layers.append(x)
    return x, jnp.stack(layers) if self.want_layers else None


class Encoder(nn.Module):
  """`depth` pairs of blocks under one scan, then a LayerNorm (`norm`).

  Parameters are stacked: `layers/{row,column}/mlp/fc1/kernel` is
  `[depth, d, mlp_dim]`.

  Attributes:
    config: config of the model.
  """

  config: Config

  @nn.compact
  def __call__(
    self,
    x: Float[Array, 'n t d'],
    grid: Size,
    key: Key[Array, ''] | None,
    want_layers: bool,
  ) -> tuple[Float[Array, 'n t d'], Float[Array, 'n layers t d'] | None]:
    """Applies all blocks.

    Args:
      x: tokens of a map, row by row.
      grid: rows and columns of the map.
      key: random key of dropout; None for evaluation.
      want_layers: whether to return the tokens after every block.

    Returns:
      The tokens after the last norm, and those after every block, or None.
    """
    config = self.config
    layers = nn.scan(
      rematerialized(Pair, config.remat, encoder.SAVED),
      variable_axes={'params': 0},
      split_rngs={'params': True},
      in_axes=0,
      length=config.depth,
      unroll=config.unroll,
    )(config, grid, want_layers, name='layers')
    per_layer = {}
    if key is not None:
      # A key for each of the two blocks of a pair.
      per_layer['key'] = jax.random.split(key, (config.depth, 2))
    x, after = layers(x, per_layer)
    if after is not None:  # [depth, 2, n, t, d]
      after = after.reshape(2 * config.depth, *x.shape).swapaxes(0, 1)
    return LayerNorm(config.compute_dtype, name='norm')(x), after


class Positions(nn.Module):
  """Learned positions of rows and columns, each with half of the channels.

  Parameters: `rows` `[rows, d / 2]` and `columns` `[columns, d / 2]`, both
  initialized by N(0, 0.02). The authors' later public code has these positions;
  the paper does not describe them.
  """

  @nn.compact
  def __call__(self, grid: Size, width: int) -> Float[Array, '1 t d']:
    init = nn.initializers.normal(0.02)
    rows, columns = (
      jnp.asarray(sized_parameter(self, name, init, (count, width // 2)))
      for name, count in zip(('rows', 'columns'), grid, strict=True)
    )
    shape = (*grid, width // 2)
    rows = jnp.broadcast_to(rows[:, None], shape)
    columns = jnp.broadcast_to(columns[None], shape)
    return jnp.concatenate([rows, columns], axis=-1).reshape(1, -1, width)


class AxialViT(Backbone):
  """An Axial-ViT without a class token, which would have no row or column.

  Features are the mean of the tokens. There are no methods `embed` and
  `encode`, because no token of a map can be left out. Parameters:
  `embedding/{kernel,bias}`, `position/{rows,columns}`,
  `encoder/{layers/{row,column}/…,norm}`, `head/{kernel,bias}`.
  """

  config: Config

  outputs = ('tokens', 'layers')
  title = 'An Axial-ViT'
  sized = ('position/',)
  sharding_rules = (
    (r'attention/(query|key|value)/kernel', -2),
    (r'attention/(query|key|value)/bias', -2),
    (r'attention/out/kernel', -3),
    (r'mlp/fc1/(kernel|bias)', -1),
    (r'mlp/fc2/kernel', -2),
    (r'head/(kernel|bias)', -1),
  )

  def setup(self):
    config, dtype = self.config, self.config.compute_dtype
    self.embedding = Linear(
      (config.width,),
      input_axes=3,
      kernel_init=nn.initializers.lecun_normal(),
      dtype=dtype,
    )
    self.position = Positions()
    self.encoder = Encoder(config)
    if self.num_classes:
      self.head = head(self.num_classes, dtype, bias=config.head_bias)

  def _predict(
    self, images: Images, key: Key[Array, ''] | None, want: tuple[str, ...]
  ) -> dict[str, Any]:
    keys = (None, None) if key is None else jax.random.split(key)
    x, grid = self._embed(images)
    x = dropout(x, self.config.dropout, keys[0])
    tokens, layers = self.encoder(x, grid, keys[1], 'layers' in want)
    features = tokens.mean(axis=1)
    return {
      'features': features,
      'logits': self.head(features) if self.num_classes else features,
      'tokens': tokens,
      'layers': layers,
    }

  def _embed(self, images: Images) -> tuple[Float[Array, 'n t d'], Size]:
    """Returns patch tokens with their positions, and rows and columns."""
    x = jnp.asarray(images, self.config.compute_dtype)
    n, height, width, channels = x.shape
    (rows, columns), p = self.grid((height, width)), self.config.patch_size
    x = x.reshape(n, rows, p, columns, p, channels).swapaxes(2, 3)
    x = self.embedding(x.reshape(n, rows * columns, p, p, channels))
    position = self.position((rows, columns), self.config.width)
    return x + position.astype(x.dtype), (rows, columns)

  @nn.nowrap
  def grid(self, image_size: Size) -> Size:
    """Returns rows and columns of patches of an image.

    Args:
      image_size: (height, width), pixels.

    Raises:
      UserError: the patch size does not divide the image.
    """
    height, width = image_size
    p = self.config.patch_size
    if height % p or width % p or min(height, width) < p:
      raise UserError(
        f'an image of {height}x{width} pixels is not divisible by the patch '
        f'size {p}: take multiples of {p}.'
      )
    return height // p, width // p

  @nn.nowrap
  def check(self, image_size: Size) -> None:
    """Raises UserError if images cannot have this size; see `grid`."""
    self.grid(image_size)

  @nn.nowrap
  def adapt(
    self,
    leaves: dict[str, np.ndarray],
    old_size: Size,
    new_size: Size,
    method: str,
  ) -> dict[str, np.ndarray]:
    """Interpolates positions of rows and columns; see `positions.resize`."""
    old, new = self.grid(old_size), self.grid(new_size)
    counts: dict[str, tuple[int, int]] = {
      'position/rows': (old[0], new[0]),
      'position/columns': (old[1], new[1]),
    }

    def resized(leaf: np.ndarray, old: int, new: int) -> np.ndarray:
      return resize(leaf[None], (old, 1), (new, 1), method)[0]

    return {path: resized(leaf, *counts[path]) for path, leaf in leaves.items()}

  @property
  def architecture(self) -> dict[str, Any]:
    """Sizes, and the kind of GELU, which no shape shows."""
    return {key: getattr(self.config, key) for key in (*sizes.NAMES, 'gelu')}


@plugins.keyed_by(Config)
def Model(  # noqa: N802 (the fixed symbol that a config's name resolves to)
  num_classes: int, /, **keys: Any
) -> AxialViT:
  """Builds an Axial-ViT.

  Args:
    num_classes: number of outputs of the head; 0 for a model without a head.
    **keys: fields of `Config`.

  Raises:
    UserError: see `Config`.
  """
  return AxialViT(num_classes, Config(**keys))
