"""The kinds of positions, and where each of them acts."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.arrays import sharding
from vit_jax.models.contract import Places
from vit_jax.models.layers.positions import fixed, resizing

# Where each kind may act: once before the first layer, in every layer with
# parameters of its own, or in every layer with the same. The first is the
# default; kinds without a choice have none.
KINDS = {
  'learned': ('stem', 'layers', 'shared'),
  '2d': ('stem', 'layers', 'shared'),
  'relative': ('layers', 'shared'),
  'sincos2d': ('stem',),
  'sincos2d_mae': ('stem',),
  'rope2d': (),
  'none': (),
}
Table = Float[Array | np.ndarray, '#n t d']
Given = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Scheme:
  """How positions are told.

  Attributes:
    kind: of `KINDS`.
    at: of the kind's places; None where there is no choice.
    prefix: tokens before those of patches.
    slots: how many of them have positions of their own ('learned'): all, or
      none, and nothing is added to them.
    made_for: grid of patches that parameters are for; None for the images' own.
      On another grid they are interpolated, see `resizing.cubic`.
    offset: of that interpolation.
  """

  kind: str
  at: str | None
  prefix: int
  slots: int
  made_for: tuple[int, int] | None = None
  offset: float = 0.0

  @property
  def in_attention(self) -> bool:
    """Whether they change attention, and not the tokens."""
    return self.kind in ('relative', 'rope2d')

  @property
  def shared(self) -> bool:
    """Whether all layers get the same."""
    return self.at == 'shared' or self.kind == 'rope2d'


class Positions(nn.Module):
  """What tokens or attention are told about positions.

  Parameters by kind: 'learned' `embedding` `[1, slots + patches, d]`; '2d'
  `rows` `[rows, d/2]` and `columns` `[columns, d/2]`; 'relative' `offsets`
  `[2t − 1, c]`, c channels of a head, which all heads share. All N(0, 0.02).

  Reference: the paper's section 3.1, and appendix D.4 with Table 8, which does
  not say what the class token gets in two dimensions, nor whether heads share
  relative embeddings.
  """

  scheme: Scheme
  width: int  # of tokens, or of a head where positions act in attention

  @nn.compact
  def __call__(self, places: Places) -> Given:
    """For all tokens, those before the patches first, one of these.

    `added` `[n or 1, t, d]`, to be added to tokens; `relative` `[q, k, c]` or
    `[n, q, k, c]`, whose products with queries are added to logits; `rotation`,
    (sines, cosines) `[n or 1, t, c]`.
    """
    kind, grid = self.scheme.kind, places.grid
    made_for = self.scheme.made_for or grid
    if kind == 'rope2d':
      sines, cosines = fixed.rotations2d(grid, self.width)
      rotation = self._all(sines, places, 0), self._all(cosines, places, 1)
      return {'rotation': rotation}
    if kind == 'relative':
      return {'relative': self._relative(places)}
    if kind == 'learned':
      count = self.scheme.slots + made_for[0] * made_for[1]
      table = self._table('embedding', 1, count, self.width)
      whole = places.kept is None and self.scheme.slots == self.scheme.prefix
      if whole and made_for == grid:
        return {'added': table}
      first, patches = jnp.split(table, [self.scheme.slots], axis=1)
      if made_for != grid:
        between = made_for, grid, self.scheme.offset
        patches = resizing.stretched_grid(patches[0], *between)[None]
      return {'added': self._all(patches[0], places, 0, first)}
    if kind == '2d':
      rows = self._axis('rows', made_for[0], grid[0])
      columns = self._axis('columns', made_for[1], grid[1])
      rows = jnp.broadcast_to(rows[:, None], (*grid, self.width // 2))
      columns = jnp.broadcast_to(columns, rows.shape)
      patches = jnp.concatenate([rows, columns], axis=-1)
      return {'added': self._all(patches.reshape(-1, self.width), places, 0)}
    patches = fixed.sincos2d(grid, self.width, kind == 'sincos2d')
    return {'added': self._all(patches, places, 0)}

  def first(self, slots: int) -> Table:
    """Embeddings of the first slots; does not need the number of all slots."""
    return self.get_variable('params', 'embedding')[:, :slots]

  def _axis(self, name: str, made_for: int, wanted: int) -> Any:
    """Positions along one axis of the grid, `[wanted, d/2]`."""
    table = self._table(name, made_for, self.width // 2)
    if made_for == wanted:
      return table
    return resizing.stretched(table, wanted, self.scheme.offset)

  def _table(self, name: str, *shape: int) -> Any:
    table = self.param(name, nn.initializers.normal(0.02), shape)
    if self.scheme.at == 'stem':
      return table
    return sharding.constrain(table, *[None] * len(shape))  # in every layer

  def _all(
    self,
    patches: Float[Array | np.ndarray, 'p d'],
    places: Places,
    fill: float,
    first: Any = None,
  ) -> Table:
    """Those of the tokens there are, after `first` or `fill` for the others."""
    kept = places.kept
    table = jnp.asarray(patches)
    table = table[None] if kept is None else table[kept]
    n, _, width = table.shape
    if first is None or not first.shape[1]:
      first = jnp.full((1, self.scheme.prefix, width), fill, table.dtype)
    first = jnp.broadcast_to(first, (n, *first.shape[1:]))
    return jnp.concatenate([first, table], axis=1)

  def _relative(self, places: Places) -> Float[Array, '... q k c']:
    """Of every query and key, numbered as one sequence: that of q − k."""
    prefix, (rows, columns) = self.scheme.prefix, places.grid
    count = prefix + rows * columns
    offsets = self._table('offsets', 2 * count - 1, self.width)
    number = jnp.arange(count)
    if places.kept is not None:
      first = jnp.broadcast_to(
        jnp.arange(prefix), (places.kept.shape[0], prefix)
      )
      number = jnp.concatenate([first, prefix + places.kept], axis=1)
    between = number[..., :, None] - number[..., None, :] + count - 1
    return offsets[between]
