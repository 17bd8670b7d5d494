"""A stage: pairs of blocks under one scan, and what halves the map."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Shaped

from vit_jax.arrays import sharding
from vit_jax.models.layers import transformer
from vit_jax.models.swin import sizes
from vit_jax.models.swin.attention import INIT, WindowAttention
from vit_jax.models.swin.windows import Windows

LN_EPSILON = 1e-5  # PyTorch's default; a ViT has 1e-6
LayerNorm = functools.partial(transformer.LayerNorm, epsilon=LN_EPSILON)
PerLayer = dict[str, Shaped[Array, '...']]


class Block(nn.Module):
  """Attention in windows, then an MLP, both pre-norm (equation 3).

  `per_layer` holds {} at evaluation, else `key` and the drop-path `rate`.
  """

  num_heads: int
  windows: Windows
  dtype: jnp.dtype

  @nn.compact
  def __call__(
    self, x: Float[Array, 'n t d'], per_layer: PerLayer
  ) -> Float[Array, 'n t d']:
    rate, keys = per_layer.get('rate'), [None, None]
    if rate is not None:
      keys = list(jax.random.split(per_layer['key'], 2))

    def branch(y: Array, key: Array | None):
      return y if rate is None else transformer.drop_path(y, rate, key)

    x = sharding.constrain(x, sharding.BATCH, None, None)
    y = LayerNorm(self.dtype, name='norm1')(x)
    attend = WindowAttention(
      self.num_heads, self.windows, self.dtype, name='attention'
    )
    x = checkpoint_name(x + branch(attend(y), keys[0]), 'middle')
    y = LayerNorm(self.dtype, name='norm2')(x)
    mlp = transformer.Mlp(
      mlp_dim=sizes.MLP_RATIO * x.shape[-1],
      dropout=0.0,
      gelu='exact',
      dtype=self.dtype,
      kernel_init=INIT,
      bias_init=nn.initializers.zeros_init(),
      name='mlp',
    )
    x = x + branch(mlp(y, None), keys[1])
    return sharding.constrain(x, sharding.BATCH, None, None)


class Pair(nn.Module):
  """A block with plain windows and one with shifted ones; a scan's step.

  Returns the tokens, and with `want_layers` those after both blocks too.
  """

  num_heads: int
  grid: tuple[int, int]
  window_size: int
  dtype: jnp.dtype
  want_layers: bool

  @nn.compact
  def __call__(
    self, x: Float[Array, 'n t d'], per_layer: PerLayer
  ) -> tuple[Float[Array, 'n t d'], Float[Array, '2 n t d'] | None]:
    layers = []
    for i, name in enumerate(('plain', 'shifted')):
      windows = Windows.of(self.grid, self.window_size, shifted=i == 1)
      block = Block(self.num_heads, windows, self.dtype, name=name)
      x = block(x, jax.tree.map(lambda leaf, i=i: leaf[i], per_layer))
      layers.append(x)
    return x, jnp.stack(layers) if self.want_layers else None


class Stage(nn.Module):
  """An even number of blocks on a map of one size.

  Parameters are stacked by pairs: `layers/{plain,shifted}/mlp/fc1/kernel` is
  `[depth / 2, d, 4 d]`.
  """

  depth: int
  num_heads: int
  grid: tuple[int, int]
  window_size: int
  dtype: jnp.dtype
  remat: str
  unroll: int

  @nn.compact
  def __call__(
    self, x: Float[Array, 'n t d'], per_layer: PerLayer, want_layers: bool
  ) -> tuple[Float[Array, 'n t d'], Float[Array, 'depth n t d'] | None]:
    """The tokens, and where they are wanted those after every block."""
    pair, pairs = Pair, self.depth // 2
    if self.remat != 'none':
      policy = transformer.REMAT_POLICIES[self.remat]
      pair = nn.remat(Pair, prevent_cse=False, policy=policy)
    layers = nn.scan(
      pair,
      variable_axes={'params': 0},
      split_rngs={'params': True},
      in_axes=0,
      length=pairs,
      unroll=min(self.unroll, pairs),
    )(
      num_heads=self.num_heads,
      grid=self.grid,
      window_size=self.window_size,
      dtype=self.dtype,
      want_layers=want_layers,
      name='layers',
    )
    by_pairs = jax.tree.map(
      lambda leaf: leaf.reshape(pairs, 2, *leaf.shape[1:]), per_layer
    )
    x, after = layers(x, by_pairs)
    return x, after if after is None else after.reshape(self.depth, *x.shape)


class Merge(nn.Module):
  """Four neighbours become one token of twice the width.

  Their order is (row, column) (0, 0), (1, 0), (0, 1), (1, 1). A map of an odd
  size is padded with zeros below and on the right.

  Reference: section 3.1, "patch merging".
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
    kernel = jnp.asarray(self.param('kernel', INIT, (4 * d, 2 * d)))
    kernel = sharding.constrain(kernel.astype(self.dtype), None, None)
    return sharding.constrain(jnp.dot(x, kernel), sharding.BATCH, None, None)


def halved(grid: tuple[int, int]) -> tuple[int, int]:
  """Rows and columns after a `Merge`."""
  rows, columns = np.add(grid, 1) // 2
  return int(rows), int(columns)
