"""A stage of pairs of blocks under one scan, and patch merging."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Shaped

from vit_jax.arrays import sharding
from vit_jax.models.layers import norm
from vit_jax.models.layers.initializers import NORMAL
from vit_jax.models.layers.mlp import Mlp
from vit_jax.models.layers.noise import drop_path
from vit_jax.models.layers.scan import scanned
from vit_jax.models.layers.stream import stored
from vit_jax.models.swin import sizes
from vit_jax.models.swin.attention import WindowAttention
from vit_jax.models.swin.config import Config
from vit_jax.models.swin.windows import Windows
from vit_jax.models.vit.encoder import SAVED

LN_EPSILON = 1e-5  # the default of PyTorch; 1e-6 in a ViT
LayerNorm = functools.partial(norm.LayerNorm, epsilon=LN_EPSILON)
PerLayer = dict[str, Shaped[Array, '...']]


class Block(nn.Module):
  """Attention in windows and an MLP, both pre-norm (equation 3).

  `per_layer` contains `key` and the drop-path `rate`, or nothing for
  evaluation.

  Attributes:
    num_heads: number of attention heads.
    windows: windows of the block.
    dtype: dtype of the computation.
    implementation: implementation of attention, see `Config.attention`.
  """

  num_heads: int
  windows: Windows
  dtype: jnp.dtype
  implementation: str

  @nn.compact
  def __call__(
    self, x: Float[Array, 'n t d'], per_layer: PerLayer
  ) -> Float[Array, 'n t d']:
    rate, keys = per_layer.get('rate'), [None, None]
    if rate is not None:
      keys = list(jax.random.split(per_layer['key'], 2))

    def branch(y: Array, key: Array | None):
      return y if rate is None else drop_path(y, rate, key)

    x = stored(sharding.constrain(x, sharding.BATCH, None, None))
    y = LayerNorm(self.dtype, name='norm1')(x)
    attend = WindowAttention(
      self.num_heads,
      self.windows,
      self.dtype,
      self.implementation,
      name='attention',
    )
    x = checkpoint_name(x + branch(attend(y), keys[0]), 'middle')
    x = stored(x)
    y = LayerNorm(self.dtype, name='norm2')(x)
    mlp = Mlp(
      mlp_dim=sizes.MLP_RATIO * x.shape[-1],
      dropout=0.0,
      activation='exact',
      dtype=self.dtype,
      kernel_init=NORMAL,
      bias_init=nn.initializers.zeros_init(),
      name='mlp',
    )
    x = x + branch(mlp(y, None), keys[1])
    return sharding.constrain(x, sharding.BATCH, None, None)


class Pair(nn.Module):
  """A block with plain windows and one with shifted windows, to be scanned.

  Attributes:
    config: config of the model.
    num_heads: number of attention heads.
    grid: rows and columns of tokens.
    want_layers: whether to also return the tokens after each block.
  """

  config: Config
  num_heads: int
  grid: tuple[int, int]
  want_layers: bool

  @nn.compact
  def __call__(
    self, x: Float[Array, 'n t d'], per_layer: PerLayer
  ) -> tuple[Float[Array, 'n t d'], Float[Array, '2 n t d'] | None]:
    layers, config = [], self.config
    for i, name in enumerate(('plain', 'shifted')):
      windows = Windows.of(
        self.grid, config.window_size, i == 1, config.window_rule
      )
      block = Block(
        self.num_heads,
        windows,
        config.compute_dtype,
        config.attention,
        name=name,
      )
      x = block(x, jax.tree.map(lambda leaf, i=i: leaf[i], per_layer))
      layers.append(x)
    return x, jnp.stack(layers) if self.want_layers else None


class Stage(nn.Module):
  """An even number of blocks, all on maps of the same size.

  Parameters are stacked by pairs: `layers/{plain,shifted}/mlp/fc1/kernel` is
  `[depth / 2, d, 4 d]`.

  Attributes:
    config: config of the model.
    index: index of the stage, from 0.
    grid: rows and columns of tokens.
  """

  config: Config
  index: int
  grid: tuple[int, int]

  @nn.compact
  def __call__(
    self, x: Float[Array, 'n t d'], per_layer: PerLayer, want_layers: bool
  ) -> tuple[Float[Array, 'n t d'], Float[Array, 'depth n t d'] | None]:
    """Applies all blocks.

    Args:
      x: tokens of the map, row by row.
      per_layer: keys and drop-path rates of the blocks; {} for evaluation.
      want_layers: whether to return the tokens after every block.

    Returns:
      Tokens after the stage, and tokens after every block (None without
      `want_layers`).
    """
    config, depth = self.config, self.config.depths[self.index]
    pairs, num_heads = depth // 2, config.num_heads * 2**self.index
    layers = scanned(
      Pair, pairs, remat=config.remat, saved=SAVED, unroll=config.unroll
    )(config, num_heads, self.grid, want_layers, name='layers')
    # The scan steps over pairs, so keys and rates are grouped in twos.
    by_pairs = jax.tree.map(
      lambda leaf: leaf.reshape(pairs, 2, *leaf.shape[1:]), per_layer
    )
    x, after = layers(x, by_pairs)
    return x, after if after is None else after.reshape(depth, *x.shape)


class Merge(nn.Module):
  """Patch merging: four neighbors become one token of twice the width.

  The order of the neighbors is (row, column) = (0, 0), (1, 0), (0, 1), (1, 1).
  A side of odd length is padded with zeros below and on the right.

  Reference: section 3.1.

  Attributes:
    grid: rows and columns of tokens before merging.
    dtype: dtype of the computation.
  """

  grid: tuple[int, int]
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x: Float[Array, 'n t d']) -> Float[Array, 'n s e']:
    n, _, d = x.shape
    rows, columns = self.grid
    x = x.reshape(n, rows, columns, d)
    x = jnp.pad(x, ((0, 0), (0, rows % 2), (0, columns % 2), (0, 0)))
    rows, columns = halved(self.grid)
    x = x.reshape(n, rows, 2, columns, 2, d)
    x = x.transpose(0, 1, 3, 4, 2, 5)  # [n, rows, columns, 2 (x), 2 (y), d]
    x = LayerNorm(self.dtype, name='norm')(x.reshape(n, rows * columns, 4 * d))
    kernel = jnp.asarray(self.param('kernel', NORMAL, (4 * d, 2 * d)))
    kernel = sharding.constrain(kernel.astype(self.dtype), None, None)
    return sharding.constrain(jnp.dot(x, kernel), sharding.BATCH, None, None)


def halved(grid: tuple[int, int]) -> tuple[int, int]:
  """Returns rows and columns after patch merging.

  Args:
    grid: rows and columns before patch merging.
  """
  rows, columns = np.add(grid, 1) // 2
  return int(rows), int(columns)
