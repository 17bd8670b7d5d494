"""The Vision Transformer with axial attention (appendix D.6)."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, Shaped

from vit_jax.config import schema
from vit_jax.models import backbone, positions, vit
from vit_jax.models.backbone import Backbone, BackboneConfig, Images
from vit_jax.models.contract import Leaves, Patches
from vit_jax.models.layers import (
  LayerNorm,
  Linear,
  cut_patches,
  dropout,
  scanned,
)

Size = tuple[int, int]


@schema.operational('remat', 'unroll')
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
  dropout: float = 0.0
  gelu: str = 'tanh'

  def __post_init__(self):
    super().__post_init__()
    self.complete(vit.SIZE_KEYS, vit.VARIANTS)
    self.check_range(*vit.SIZE_KEYS, at_least=1)
    fits = self.width % self.num_heads == 0 and self.width % 2 == 0
    advice = 'width must be even and a multiple of num_heads'
    self.check_together(fits, advice, 'width', 'num_heads')
    self.check_choices(gelu=('tanh', 'exact'))
    self.check_range('dropout', at_least=0, below=1)

  @property
  def block(self) -> vit.Config:
    """Config of blocks and positions, which are those of a ViT."""
    keys = (*vit.SIZE_KEYS, 'dropout', 'gelu', 'dtype')
    same = {key: getattr(self, key) for key in keys}
    # Kernels are made for hundreds of tokens; a row has about ten.
    return vit.Config(attention='xla', pool='gap', position='2d', **same)


class Pair(nn.Module):
  """A block along rows and a block along columns, to be scanned.

  Every token attends to the tokens of its row and then to those of its column.
  The paper does not specify the order. In its authors' later code, the first
  block attends along the first axis, that is, within columns, although it is
  named 'row'. That model equals this one applied to transposed images.

  Reference: appendix D.6.

  Attributes:
    config: config of the model.
    grid: rows and columns of tokens.
    want_layers: whether to also return the tokens after each block.
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
      block = vit.Block(self.config.block, name=name)
      own = jax.tree.map(lambda leaf, i=i: leaf[i], per_layer)
      n, t, d = x.shape
      # Each row or column becomes an example of the block.
      if name == 'row':
        y, _ = block(
          x.reshape(n * rows, columns, d), own, (positions.NO_POSITION, None)
        )
        x = y.reshape(n, t, d)
      else:
        y = x.reshape(n, rows, columns, d).swapaxes(1, 2)
        y, _ = block(
          y.reshape(n * columns, rows, d), own, (positions.NO_POSITION, None)
        )
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
      Tokens after the last norm, and tokens after every block or None.
    """
    config = self.config
    layers = scanned(
      Pair,
      config.depth,
      remat=config.remat,
      saved=vit.SAVED,
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


class AxialViT(Backbone):
  """An Axial-ViT without a class token, which would not have a row or column.

  Features are the mean of the tokens. There are no methods `embed` and
  `encode`, because tokens of a map cannot be left out. Positions are learned
  for rows and columns, as in the authors' later public code; the paper does not
  describe them. Parameters: `embedding/{kernel,bias}`,
  `position/{rows,columns}`, `encoder/{layers/{row,column}/…,norm}`,
  `head/{kernel,bias}`.
  """

  config: Config

  outputs = ('tokens', 'layers')
  determined = (*vit.SIZE_KEYS, 'gelu')
  sized = ('position/',)
  sharding_rules = (*vit.SHARDING_RULES, (r'head/(kernel|bias)', -1))

  def setup(self):
    config, dtype = self.config, self.config.compute_dtype
    self.embedding = Linear(
      (config.width,),
      input_axes=3,
      kernel_init=nn.initializers.lecun_normal(),
      dtype=dtype,
    )
    self.position = positions.PositionEmbedding(config.block)
    self.encoder = Encoder(config)
    self.head = self._new_head()

  def _predict(
    self, images: Images, key: Key[Array, ''] | None, want: tuple[str, ...]
  ) -> dict[str, Any]:
    keys = (None, None) if key is None else jax.random.split(key)
    x, grid = self._embed(images)
    x = dropout(x, self.config.dropout, keys[0])
    tokens, layers = self.encoder(x, grid, keys[1], 'layers' in want)
    return self._results(tokens.mean(axis=1), tokens) | {'layers': layers}

  def _embed(self, images: Images) -> tuple[Float[Array, 'n t d'], Size]:
    """Returns patch tokens with their positions, and rows and columns."""
    _, height, width, _ = images.shape
    grid, side = self.grid((height, width)), self.config.patch_size
    x = self.embedding(cut_patches(images, grid, (side, side)))
    added = self.position(Patches(grid)).added
    return x + added.astype(x.dtype), grid

  @nn.nowrap
  def grid(self, image_size: Size) -> Size:
    """Returns rows and columns of patches of an image.

    Args:
      image_size: (height, width), pixels.

    Raises:
      UserError: the patch size does not divide the image.
    """
    return backbone.whole_patches(image_size, self.config.patch_size)

  @nn.nowrap
  def check(self, image_size: Size) -> None:
    """Raises UserError if the model does not support this size; see `grid`."""
    self.grid(image_size)

  @nn.nowrap
  def adapt(
    self,
    leaves: Leaves,
    old_size: Size,
    new_size: Size,
    method: str | None,
  ) -> Leaves:
    """Interpolates positions; see `positions.resize`."""
    grids = self.grid(old_size), self.grid(new_size)
    return positions.resize(leaves, *grids, method)


Model = backbone.constructor(AxialViT, Config)
