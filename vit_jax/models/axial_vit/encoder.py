"""Blocks that attend along rows, then along columns of a map of tokens."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, Shaped

from vit_jax.models.layers import transformer


class Pair(nn.Module):
  """A block along rows and one along columns, each with its MLP; a scan's step.

  Every token attends to those of its row, then to those of its column. (The
  paper says no more; in the authors' later public code the first block, named
  'row', goes along the first axis. Transposed images make the one the other.)
  Returns the tokens, and with `want_layers` those after both blocks too.

  Reference: the ViT paper's appendix D.6.
  """

  grid: tuple[int, int]
  num_heads: int
  mlp_dim: int
  dropout: float
  gelu: str
  dtype: jnp.dtype
  want_layers: bool

  @nn.compact
  def __call__(
    self, x: Float[Array, 'n t d'], per_layer: dict[str, Shaped[Array, ' 2']]
  ) -> tuple[Float[Array, 'n t d'], Float[Array, '2 n t d'] | None]:
    layers, (rows, columns) = [], self.grid
    for i, name in enumerate(('row', 'column')):
      block = transformer.Block(
        num_heads=self.num_heads,
        mlp_dim=self.mlp_dim,
        dropout=self.dropout,
        gelu=self.gelu,
        dtype=self.dtype,
        attention='xla',  # kernels are for hundreds of tokens, not for ten
        name=name,
      )
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
  """

  depth: int
  num_heads: int
  mlp_dim: int
  dropout: float
  gelu: str
  dtype: jnp.dtype
  remat: str
  unroll: int

  @nn.compact
  def __call__(
    self,
    x: Float[Array, 'n t d'],
    grid: tuple[int, int],
    key: Key[Array, ''] | None,
    want_layers: bool,
  ) -> tuple[Float[Array, 'n t d'], Float[Array, 'n layers t d'] | None]:
    """The tokens of a map in rows, and where wanted those after every block."""
    pair = Pair
    if self.remat != 'none':
      policy = transformer.REMAT_POLICIES[self.remat]
      pair = nn.remat(Pair, prevent_cse=False, policy=policy)
    layers = nn.scan(
      pair,
      variable_axes={'params': 0},
      split_rngs={'params': True},
      in_axes=0,
      length=self.depth,
      unroll=self.unroll,
    )(
      grid=grid,
      num_heads=self.num_heads,
      mlp_dim=self.mlp_dim,
      dropout=self.dropout,
      gelu=self.gelu,
      dtype=self.dtype,
      want_layers=want_layers,
      name='layers',
    )
    per_layer = {}
    if key is not None:
      per_layer['key'] = jax.random.split(key, (self.depth, 2))
    x, after = layers(x, per_layer)
    if after is not None:  # [depth, 2, n, t, d]
      after = after.reshape(2 * self.depth, *x.shape).swapaxes(0, 1)
    return transformer.LayerNorm(self.dtype, name='norm')(x), after
