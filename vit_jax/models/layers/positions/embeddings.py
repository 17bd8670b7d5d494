"""Position embeddings: their kinds, and the layers where each kind acts."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.arrays import sharding
from vit_jax.models.contract import Places
from vit_jax.models.layers.positions import fixed, resizing
from vit_jax.models.layers.sized_parameter import sized_parameter

# Values of `position_at` for each kind, the default first: once before the
# first layer, in every layer with its own parameters, or in every layer with
# the same parameters. 'rope2d' has no values, because it acts in every layer.
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


@dataclasses.dataclass(frozen=True)
class Scheme:
  """Kind of position embeddings and the tokens that have them.

  Attributes:
    kind: key of `KINDS`.
    at: where the embeddings are added, one of the values that `KINDS` lists for
      the kind; None if it lists no values.
    prefix: number of tokens that precede the patch tokens.
    slots: number of prefix tokens with learned positions, `prefix` or 0.
      Nothing is added to tokens without a position.
    made_for: grid of patches that the parameters were learned for; None for the
      grid of the images. For another grid, they are interpolated by
      `resizing.cubic`.
    offset: number that is added to the sides of the new grid when the scale of
      this interpolation is computed, as in DINO.
  """

  kind: str
  at: str | None
  prefix: int
  slots: int
  made_for: tuple[int, int] | None = None
  offset: float = 0.0

  @property
  def in_attention(self) -> bool:
    """True if positions change attention instead of the tokens."""
    return self.kind in ('relative', 'rope2d')

  @property
  def shared(self) -> bool:
    """True if all layers use the same positions."""
    return self.at == 'shared' or self.kind == 'rope2d'

  def channels(self, config: Any) -> int:
    """Returns the number of channels of a position: that of a head or a token.

    Args:
      config: `vit.Config` of the model.
    """
    return config.head_dim if self.in_attention else config.width


class Positions(nn.Module):
  """Computes the positions of tokens, for the tokens or for attention.

  Parameters by kind: 'learned' has `embedding` `[1, slots + patches, d]`; '2d'
  has `rows` `[rows, d/2]` and `columns` `[columns, d/2]`; 'relative' has
  `offsets` `[2t − 1, c]` for t tokens and heads of c channels, shared by the
  heads. All of them are initialized by N(0, 0.02).

  Reference: section 3.1, and appendix D.4 with Table 8. The paper does not
  specify the position of the class token in two dimensions, nor whether heads
  share relative embeddings.

  Attributes:
    scheme: kind of the positions.
    width: channels of a token, or of a head if positions act in attention.
  """

  scheme: Scheme
  width: int

  @nn.compact
  def __call__(self, places: Places) -> dict[str, Any]:
    """Computes the positions of all tokens, prefix tokens first.

    Args:
      places: positions of the tokens in the image.

    Returns:
      One of: `added` `[n or 1, t, d]`, to be added to the tokens; `relative`
      `[q, k, c]` or `[n, q, k, c]`, whose products with queries are added to
      the logits; `rotation`, (sines, cosines), each `[n or 1, t, c]`.
    """
    kind, grid = self.scheme.kind, places.grid
    made_for = self.scheme.made_for or grid
    if kind == 'rope2d':
      sines, cosines = fixed.rotations2d(grid, self.width)
      # An angle of 0, with sine 0 and cosine 1, leaves prefix tokens unchanged.
      rotation = (
        self._with_prefix(sines, places, 0),
        self._with_prefix(cosines, places, 1),
      )
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
        patches = resizing.stretched_grid(
          patches[0], made_for, grid, self.scheme.offset
        )[None]
      return {'added': self._with_prefix(patches[0], places, 0, first)}
    if kind == '2d':
      rows = self._axis('rows', made_for[0], grid[0])
      columns = self._axis('columns', made_for[1], grid[1])
      rows = jnp.broadcast_to(rows[:, None], (*grid, self.width // 2))
      columns = jnp.broadcast_to(columns, rows.shape)
      patches = jnp.concatenate([rows, columns], axis=-1)  # [rows, columns, d]
      patches = patches.reshape(-1, self.width)
      return {'added': self._with_prefix(patches, places, 0)}
    patches = fixed.sincos2d(grid, self.width, kind == 'sincos2d')
    return {'added': self._with_prefix(patches, places, 0)}

  def first(self, slots: int) -> Table:
    """Returns the embeddings of the first tokens of the sequence.

    Args:
      slots: number of embeddings.
    """
    # Unlike `_table`, this does not need the number of all embeddings, which
    # depends on the image.
    return self.get_variable('params', 'embedding')[:, :slots]

  def _axis(self, name: str, made_for: int, count: int) -> Any:
    """Returns the positions along one axis of the grid, `[count, d/2]`."""
    table = self._table(name, made_for, self.width // 2)
    if made_for == count:
      return table
    return resizing.stretched(table, count, self.scheme.offset)

  def _table(self, name: str, *shape: int) -> Any:
    table = sized_parameter(self, name, nn.initializers.normal(0.02), shape)
    if self.scheme.at == 'stem':
      return table
    # Gathered over the mesh axis `fsdp` once per layer.
    return sharding.constrain(table, *[None] * len(shape))

  def _with_prefix(
    self,
    patches: Float[Array | np.ndarray, 'p d'],
    places: Places,
    fill: float,
    first: Any = None,
  ) -> Table:
    """Selects the positions of the kept patches and prepends the prefix.

    Args:
      patches: positions of all patches.
      places: positions of the tokens in the image.
      fill: value of the positions of prefix tokens, if `first` has none.
      first: positions of the prefix tokens.
    """
    kept = places.kept
    table = jnp.asarray(patches)
    table = table[None] if kept is None else table[kept]
    n, _, width = table.shape
    if first is None or not first.shape[1]:
      first = jnp.full((1, self.scheme.prefix, width), fill, table.dtype)
    first = jnp.broadcast_to(first, (n, *first.shape[1:]))
    return jnp.concatenate([first, table], axis=1)

  def _relative(self, places: Places) -> Float[Array, '... q k c']:
    """Returns the embedding of the offset q − k of each pair of tokens.

    All tokens, including the prefix, are numbered as one sequence.
    """
    prefix, (rows, columns) = self.scheme.prefix, places.grid
    count = prefix + rows * columns
    offsets = self._table('offsets', 2 * count - 1, self.width)
    number = jnp.arange(count)
    if places.kept is not None:
      first = jnp.broadcast_to(
        jnp.arange(prefix), (places.kept.shape[0], prefix)
      )
      number = jnp.concatenate([first, prefix + places.kept], axis=1)
    difference = number[..., :, None] - number[..., None, :] + count - 1
    return offsets[difference]
