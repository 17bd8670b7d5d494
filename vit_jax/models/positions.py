"""Position embeddings of a Transformer: learned, fixed, rotary or relative.

A kind of positions has a row in `KINDS`, a branch in
`PositionEmbedding.__call__` and, if it acts on logits, its name in
`IN_ATTENTION`. Rotations of queries and keys (`ROTATIONS`) can be added to the
other kinds. Parameters with new names that depend on the image size need a row
in the table of `_axes`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from vit_jax.arrays import sharding
from vit_jax.errors import UserError, check_choice
from vit_jax.models.contract import Leaves, Patches
from vit_jax.models.init import NORMAL
from vit_jax.models.layers import sized_parameter

# Values of `position_at` for each kind, the default first: once before the
# first layer, in every layer with its own parameters, or in every layer with
# the same parameters. 'rope2d' has no values, because it acts in every layer.
KINDS = {
  'learned': ('stem', 'layers', 'shared'),
  '2d': ('stem', 'layers', 'shared'),
  'relative': ('layers', 'shared'),
  'relative_bias': ('layers', 'shared'),
  'sincos2d': ('stem',),
  'sincos2d_mae': ('stem',),
  'rope2d': (),
  'none': (),
}
# Kinds that act on the logits of attention, see `Position`
IN_ATTENTION = ('relative', 'relative_bias')
# Kinds of rotations, and the default of `rope_base`: see `vit.Config.rope`.
ROTATIONS = {'none': 0.0, 'centered': 100.0, 'index': 10_000.0, 'mixed': 10.0}
# Methods of interpolation. 'aligned': linear with aligned corners, as SciPy's
# `zoom(order=1)` in the code of the paper's authors and big_vision. The others
# have half-pixel centers: 'bicubic' with antialiasing, as in timm;
# 'bicubic_no_antialias' as in transformers, MAE, DeiT and Swin; 'bilinear' with
# antialiasing, as in SigLIP 2; 'bilinear_no_antialias' as for BEiT in
# transformers; 'dino' bicubic without antialiasing, for an axis that is a tenth
# of an entry longer, see `cubic`. 'bicubic_aligned' is bicubic with aligned
# corners, as in torchvision.
METHODS = (
  'aligned',
  'bicubic',
  'bicubic_aligned',
  'bicubic_no_antialias',
  'bilinear',
  'bilinear_no_antialias',
  'dino',
)
DINO_OFFSET = 0.1
_TEMPERATURE = 10_000.0

Grid = tuple[int, int]  # rows and columns of patches
Matrix = Float[np.ndarray, 'new old']


class Position(NamedTuple):
  """Positions of all tokens, prefix tokens first.

  Attributes:
    added: embeddings that are added to the tokens, `[n or 1, t, d]`.
    rotation: sines and cosines of the angles by which queries and keys are
      rotated, each `[n or 1, t, c]`, or `[n or 1, t, h, c]` if heads differ.
    coordinates: row and column of each token, `[n or 1, t, 2]`, from which each
      layer computes its own `rotation` (`MixedRotation`, `random_rotation`).
    relative: embeddings of each pair of query and key, whose products with
      queries are added to the logits, `[q, k, c]` or `[n, q, k, c]`.
    bias: numbers that are added to the logits of each head, `[h, q, k]` or `[n,
      h, q, k]`.
  """

  added: Any = None
  rotation: Any = None
  coordinates: Any = None
  relative: Any = None
  bias: Any = None


NO_POSITION = Position()


class PositionEmbedding(nn.Module):
  """Computes the positions of the prefix tokens and of the patches.

  Parameters by kind: 'learned' has `embedding` `[1, prefix + patches, d]`; '2d'
  has `rows` `[rows, d/2]` and `columns` `[columns, d/2]`; 'relative' has
  `offsets` `[2t − 1, c]` for t tokens and heads of c channels, shared by the
  heads; 'relative_bias' has `biases` `[3 + (2 rows − 1)·(2 columns − 1), h]`.
  All of them are initialized by N(0, 0.02).

  Reference: section 3.1, and appendix D.4 with Table 8. The paper does not
  specify the position of the class token in two dimensions, nor whether heads
  share relative embeddings.

  Attributes:
    config: config with the fields `position`, `position_at`, `width`,
      `num_heads`, `head_dim`, `prefix` and `num_learned_prefix` of
      `vit.Config`, and the options of a kind of your own.
    learned_grid: grid of patches that the parameters were learned for; None for
      the grid of the images. For another grid, they are interpolated by
      `cubic`.
    offset: offset of this interpolation.
  """

  config: Any
  learned_grid: Grid | None = None
  offset: float = 0.0

  @nn.compact
  def __call__(self, patches: Patches) -> Position:
    """Computes the positions of all tokens.

    Args:
      patches: the patches that the tokens belong to.
    """
    config, kind, grid = self.config, self.config.position, patches.grid
    if kind == 'relative':
      return Position(relative=self._relative(patches))
    if kind == 'relative_bias':
      return Position(bias=self._bias(patches))
    if kind == 'learned':
      return Position(added=self._learned(patches))
    if kind == '2d':
      table = self._learned_by_axis(grid)
    else:
      assert kind in ('sincos2d', 'sincos2d_mae'), kind
      table = sincos2d(grid, config.width, kind == 'sincos2d')
    return Position(added=_of_tokens(table, patches, config.prefix))

  def prefix(self) -> Float[Array, '1 p d']:
    """Returns the learned embeddings of the prefix tokens."""
    # Unlike `_table`, this does not need the number of all embeddings, which
    # depends on the image.
    table = self.get_variable('params', 'embedding')
    return table[:, : self.config.num_learned_prefix]

  def _learned(self, patches: Patches) -> Float[Array, '#n t d']:
    config, grid = self.config, patches.grid
    old, count = self.learned_grid or grid, config.num_learned_prefix
    table = self._table('embedding', 1, count + math.prod(old), config.width)
    if old == grid and patches.index is None and count == config.prefix:
      return table
    prefix, x = jnp.split(table, [count], axis=1)
    x = x[0]
    if old != grid:
      x = resized_map(x.reshape(*old, -1), grid, self.offset)
    return _of_tokens(x, patches, prefix if count else config.prefix)

  def _learned_by_axis(self, grid: Grid) -> Float[Array, 'p d']:
    """Returns the embeddings of row and column of each patch, side by side."""
    half, axes = self.config.width // 2, []
    old_grid = self.learned_grid or grid
    for name, old, new in zip(('rows', 'columns'), old_grid, grid, strict=True):
      table = self._table(name, old, half)
      if old != new:
        table = _interpolated(table, [cubic(old, new, self.offset)], _einsum)
      axes.append(table)
    rows = jnp.broadcast_to(axes[0][:, None], (*grid, half))
    columns = jnp.broadcast_to(axes[1], rows.shape)
    table = jnp.concatenate([rows, columns], axis=-1)  # [rows, columns, d]
    return table.reshape(-1, 2 * half)

  def _relative(self, patches: Patches) -> Float[Array, '... q k c']:
    """Returns the embedding of the offset q − k of each pair of tokens.

    All tokens, including the prefix, are numbered as one sequence.
    """
    prefix = self.config.prefix
    count = prefix + math.prod(patches.grid)
    offsets = self._table('offsets', 2 * count - 1, self.config.head_dim)
    index = jnp.arange(count)
    if patches.index is not None:
      first = jnp.broadcast_to(
        jnp.arange(prefix), (patches.index.shape[0], prefix)
      )
      index = jnp.concatenate([first, prefix + patches.index], axis=1)
    difference = index[..., :, None] - index[..., None, :] + count - 1
    return offsets[difference]

  def _bias(self, patches: Patches) -> Float[Array, '... h q k']:
    """Returns the bias of each pair of tokens, for each head.

    A pair of patches has the bias of its offset (query − key) in rows and
    columns. The first three rows of the table are those of pairs with prefix
    tokens: prefix to patch, patch to prefix, and prefix to prefix.

    Reference: BEiT, arXiv 2106.08254, and the code of its authors.
    """
    (rows, columns), prefix = patches.grid, self.config.prefix
    span = 2 * columns - 1
    count = (2 * rows - 1) * span
    table = self._table('biases', 3 + count, self.config.num_heads)
    index = patches.index
    index = jnp.arange(rows * columns) if index is None else index
    at = index // columns * span + index % columns
    # The offset (0, 0) is in the middle.
    pairs = at[..., :, None] - at[..., None, :] + 3 + count // 2
    # [prefix to prefix: 2, prefix to patch: 0]
    # [patch to prefix:  1, patch to patch:  `pairs`]
    others = [(0, 0)] * (pairs.ndim - 2)
    pairs = jnp.pad(pairs, [*others, (prefix, 0), (0, 0)], constant_values=0)
    pairs = jnp.pad(pairs, [*others, (0, 0), (prefix, 0)], constant_values=1)
    pairs = pairs.at[..., :prefix, :prefix].set(2)
    return jnp.moveaxis(table[pairs], -1, -3)

  def _table(self, name: str, *shape: int) -> Any:
    table = sized_parameter(self, name, NORMAL, shape)
    if self.config.position_at == 'stem':
      return jnp.asarray(table)
    # Gathered over the mesh axis `fsdp` once per layer.
    return sharding.constrain(table, *[None] * len(shape))


def _of_tokens(
  table: Float[Array | np.ndarray, 'p d'], patches: Patches, prefix: Any
) -> Float[Array, '#n t d']:
  """Selects the rows of the tokens' patches, and prepends the prefix.

  Args:
    table: positions of all patches.
    patches: the patches that the tokens belong to.
    prefix: positions of the prefix tokens `[1, prefix, d]`, or their number;
      then they have the position 0.
  """
  x = jnp.asarray(table)
  x = x[None] if patches.index is None else x[patches.index]
  n, _, width = x.shape
  if isinstance(prefix, int):
    prefix = jnp.zeros((1, prefix, width), x.dtype)
  prefix = jnp.broadcast_to(prefix, (n, *prefix.shape[1:]))
  return jnp.concatenate([prefix, x], axis=1)


# Rotations


def rotary(config: Any, patches: Patches, random: bool = False) -> Position:
  """Returns the rotations of all tokens, or coordinates for each layer.

  The angle of a prefix token is 0, which leaves it unchanged, except for
  registers with rotations of their own.

  Args:
    config: config with the fields `rotary` (a key of `ROTATIONS`), `rope_base`,
      `rope_grid`, `rope_offset`, `rope_registers`, `registers`, `prefix` and
      `head_dim` of `vit.Config`.
    patches: the patches that the tokens belong to.
    random: whether each layer changes coordinates, see `random_rotation`.
  """
  grid, reference = patches.grid, config.rope_grid
  if config.rotary == 'centered':
    # 2π times the centers of patches in (-1, 1), so that images of all sizes
    # have the same range
    axes = [2 * np.pi * (2 * (np.arange(n) + 0.5) / n - 1) for n in grid]
  else:
    axes = [
      (np.arange(n) + config.rope_offset) * ((reference or n) / n) for n in grid
    ]
  coordinates = _pairs(*axes)
  if config.rotary == 'mixed' or random:
    table = coordinates.astype(np.float32)
    return Position(coordinates=_of_tokens(table, patches, config.prefix))
  base = config.rope_base or ROTATIONS[config.rotary]
  angles = axial_angles(coordinates, config.head_dim, base)
  prefix = np.zeros((1, config.prefix, config.head_dim))
  if config.rope_registers:
    side = np.arange(square_grid(config.registers)[0], dtype=np.float64)
    prefix[:, -config.registers :] = axial_angles(
      _pairs(side, side), config.head_dim, config.rope_registers
    )
  rotation = [
    _of_tokens(
      function(angles).astype(np.float32),
      patches,
      jnp.asarray(function(prefix), jnp.float32),
    )
    for function in (np.sin, np.cos)
  ]
  return Position(rotation=tuple(rotation))


def _pairs(rows: np.ndarray, columns: np.ndarray) -> Float[np.ndarray, 'p 2']:
  """Returns the coordinates of all positions of a grid, row by row."""
  pairs = np.stack(np.meshgrid(rows, columns, indexing='ij'), axis=-1)
  return pairs.reshape(-1, 2)


def axial_angles(
  coordinates: Float[Any, '*n p 2'], channels: int, base: float
) -> Float[Any, '*n p c']:
  """Returns the rotation angles of the planes of a head, for each position.

  Channels i and i + channels/2 form a plane. The angles of the first quarter of
  the channels are row / base^(i / (channels/4)), those of the second quarter
  depend on the column.

  Args:
    coordinates: row and column of each position.
    channels: channels of a head; a multiple of 4.
    base: ratio of the largest to the smallest wavelength, about.

  Reference: EVA-02 (arXiv 2303.11331) and DINOv3 (arXiv 2508.10104).
  """
  count = channels // 4
  wavelengths = base ** (np.arange(count) / count)
  # The same angles for both channels of each plane
  halves = np.broadcast_to(wavelengths, (2, 1, count))
  # [p, halves of the channels, row and column, i]
  angles = coordinates[..., None, :, None] / halves
  return angles.reshape(*coordinates.shape[:-1], channels)


def random_rotation(
  config: Any, coordinates: Float[Array, '#n t 2'], n: int, key: Key[Array, '']
) -> tuple[Float[Array, 'n t c'], Float[Array, 'n t c']]:
  """Returns rotations for shifted, stretched and scaled coordinates.

  Coordinates in [-1, 1] are shifted by a number from [-s, s] for each axis,
  multiplied by a factor from [1/j, j] for each axis, and by one from [1/r, r]
  for both. Shifts are uniform, and so are logarithms of factors. Each image
  has its own numbers. Prefix tokens are not rotated.

  Args:
    config: config with the fields `rope_shift` (s), `rope_jitter` (j),
      `rope_rescale` (r), `rope_base`, `rotary`, `prefix` and `head_dim` of
      `vit.Config`.
    coordinates: 2π times the coordinates.
    n: number of images.
    key: random key of the layer.

  Returns:
    Sines and cosines.

  Reference: DINOv3 (arXiv 2508.10104), section 3.2. Its code has the same
  numbers for all images of a GPU, and the angles in bfloat16.
  """

  def draw(i: int, axes: int, largest: float) -> Array:
    own, shape = jax.random.fold_in(key, i), (n, 1, axes)
    return jax.random.uniform(own, shape, minval=-largest, maxval=largest)

  x = coordinates + 2 * jnp.pi * draw(0, 2, config.rope_shift or 0)
  x *= jnp.exp(draw(1, 2, math.log(config.rope_jitter or 1)))
  x *= jnp.exp(draw(2, 1, math.log(config.rope_rescale or 1)))
  base = config.rope_base or ROTATIONS[config.rotary]
  is_patch = jnp.arange(x.shape[1])[:, None] >= config.prefix
  angles = jnp.where(is_patch, axial_angles(x, config.head_dim, base), 0)
  angles = sharding.constrain(angles, sharding.BATCH, None, None)
  return jnp.sin(angles), jnp.cos(angles)


class MixedRotation(nn.Module):
  """Rotations with learned frequencies of row and column for each head.

  Reference: RoPE-Mixed, arXiv 2403.13298. The initial directions of the
  frequencies are random, as in its code.

  Attributes:
    num_heads: number of heads.
    channels: channels of a head; a multiple of 4.
    base: base of the initial wavelengths.
  """

  num_heads: int
  channels: int
  base: float

  @nn.compact
  def __call__(self, coordinates: Float[Array, '#n t 2']) -> tuple[Any, Any]:
    count = self.channels // 4

    def init(key: Array) -> Float[Array, '2 h p']:
      # The frequencies (row, column) of a plane are a vector. In each head, one
      # half of the vectors has a random direction, the other is orthogonal.
      sizes = self.base ** -(jnp.arange(count) / count)
      turn = jax.random.uniform(key, (self.num_heads, 1), maxval=2 * np.pi)
      columns = [jnp.cos(turn), jnp.cos(turn + np.pi / 2)]
      rows = [jnp.sin(turn), jnp.sin(turn + np.pi / 2)]
      return jnp.stack(
        [
          jnp.concatenate([sizes * x for x in axis], -1)
          for axis in (rows, columns)
        ]
      )

    rows, columns = self.param('frequencies', init)
    at = coordinates[..., None, None]  # [n, t, 2, 1, 1]
    angles = at[:, :, 0] * rows + at[:, :, 1] * columns  # [n, t, h, c/2]
    angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.sin(angles), jnp.cos(angles)


def rotate(
  x: Float[Array, 'n t h c'],
  sines: Float[Array, '#n t *h c'],
  cosines: Float[Array, '#n t *h c'],
) -> Float[Array, 'n t h c']:
  """Rotates the planes (i, i + c/2) of every head, in float32.

  Args:
    x: queries or keys.
    sines: sines of the angles, of all heads or of each.
    cosines: cosines of the angles.

  Returns:
    The rotated array, in the dtype of `x`.
  """
  x32 = x.astype(jnp.float32)
  first, second = jnp.split(x32, 2, axis=-1)
  rotated = jnp.concatenate([-second, first], axis=-1)
  if sines.ndim == 3:
    sines, cosines = sines[:, :, None], cosines[:, :, None]
  y = x32 * cosines + rotated * sines
  return y.astype(x.dtype)


# Fixed positions


def sincos2d(
  grid: Grid, width: int, last_included: bool
) -> Float[np.ndarray, 't d']:
  """Returns position embeddings: sines and cosines of column, then of row.

  There are two variants. Both have the frequencies 10000^(-i/n) for i from 0 to
  width/4 − 1. In big_vision n is width/4 − 1, so that the last frequency is
  1/10000; in MAE (arXiv 2111.06377) n is width/4.

  Args:
    grid: rows and columns of patches.
    width: channels of a token; a multiple of 4.
    last_included: True for the variant of big_vision.

  Returns:
    The table, `[rows · columns, width]`, float32.
  """
  count = width // 4
  exponents = np.arange(count) / max(count - 1 if last_included else count, 1)
  frequencies = _TEMPERATURE**-exponents
  rows, columns = (np.ravel(x) for x in np.mgrid[: grid[0], : grid[1]])
  tables = []
  for position in (columns, rows):
    angles = np.outer(position, frequencies)
    tables += [np.sin(angles), np.cos(angles)]
  return np.concatenate(tables, axis=1).astype(np.float32)


# Interpolation for images of another size


class Axes(NamedTuple):
  """Axes of a parameter `[…, prefix + product of old, d]`.

  Attributes:
    old: number of embeddings along each axis.
    new: numbers for the result.
    prefix: number of embeddings before them, which do not change.
  """

  old: tuple[int, ...]
  new: tuple[int, ...]
  prefix: int = 0


def _axes(name: str, count: int, old: Grid, new: Grid) -> Axes | None:
  """Returns the axes of a parameter; None if the grid does not matter.

  Args:
    name: name of the parameter, the last part of its path.
    count: number of its embeddings.
    old: grid of patches of the parameter.
    new: grid of patches of the result.
  """
  patches = math.prod(old)
  # Offsets are numbered along the sequence, which includes the prefix tokens,
  # so that a distance of some rows becomes a distance that covers the same
  # fraction of the image.
  offsets = max(count, 2 * patches - 1)
  table = {
    'embedding': Axes(old, new, count - patches),
    'rows': Axes(old[:1], new[:1]),
    'columns': Axes(old[1:], new[1:]),
    'biases': Axes(
      tuple(2 * n - 1 for n in old), tuple(2 * n - 1 for n in new), prefix=3
    ),
    'offsets': Axes((offsets,), (offsets + 2 * (math.prod(new) - patches),)),
  }
  return table.get(name)


def resize(
  leaves: Leaves, old_grid: Grid, new_grid: Grid, method: str | None
) -> Leaves:
  """Interpolates parameters of `PositionEmbedding` on the host.

  The embeddings of prefix tokens do not change. Interpolation to the same grid
  returns the values unchanged.

  Args:
    leaves: parameters for `old_grid` by path; layers may be stacked in front.
      One whose name has no row in `_axes` is returned unchanged.
    old_grid: rows and columns of patches of the parameters.
    new_grid: rows and columns of patches of the result.
    method: one of `METHODS`; None for 'aligned'.

  Returns:
    Parameters for `new_grid`, float32.

  Raises:
    UserError: a parameter does not belong to `old_grid`, or the method is
      unknown.

  Reference: section 3.2 of the paper, "2D interpolation".
  """
  resized = {}
  for path, table in leaves.items():
    name = path.rpartition('/')[2]
    count = np.shape(table)[-2] if np.ndim(table) > 1 else 0
    axes = _axes(name, count, old_grid, new_grid)
    if axes and (axes.prefix < 0 or axes.prefix + math.prod(axes.old) != count):
      raise UserError(
        f'the positions {name!r} have the shape {list(table.shape)}, which '
        f'does not belong to a {old_grid[0]}x{old_grid[1]} grid of patches: '
        'check the image size and the patch size that belong to the weights.'
      )
    resized[path] = (
      interpolate(table, axes, method or 'aligned') if axes else table
    )
  return resized


def interpolate(
  table: Float[Array | np.ndarray, '... old d'], axes: Axes, method: str
) -> Float[np.ndarray, '... new d']:
  """Interpolates embeddings of an axis or a grid on the host; float32.

  Args:
    table: embeddings, row by row.
    axes: axes of the table.
    method: one of `METHODS`.

  Raises:
    UserError: the method is unknown.
  """
  check_method(method)
  x32 = np.asarray(table, np.float32)
  if axes.old == axes.new:  # rounding would change the values
    return x32
  sizes = zip(axes.old, axes.new, strict=True)
  weights = [_weights(old, new, method) for old, new in sizes]
  prefix, x = np.split(x32, [axes.prefix], axis=-2)
  x = x.reshape(*x.shape[:-2], *axes.old, -1)
  x = _interpolated(x, weights, np.einsum).astype(np.float32)
  return np.concatenate([prefix, x], axis=-2)


def _interpolated(
  x: Any, weights: Sequence[Matrix], einsum: Callable[..., Any]
) -> Any:
  """Applies weights to the axes before the last one, and merges these axes.

  Args:
    x: table `[…, old, d]`, or `[…, rows, columns, d]` for two matrices.
    weights: weights of each axis.
    einsum: `np.einsum` or `_einsum`.
  """
  one_axis, two_axes = 'yi,...id->...yd', 'yi,xj,...ijd->...yxd'
  equation = one_axis if len(weights) == 1 else two_axes
  y = einsum(equation, *weights, x)
  return y.reshape(*x.shape[: -len(weights) - 1], -1, x.shape[-1])


def resized_map(
  x: Float[Array, '*n rows columns d'], grid: Grid, offset: float = 0.0
) -> Float[Array, '*n p d']:
  """Interpolates maps of patches to another grid inside a program.

  Args:
    x: maps.
    grid: rows and columns of the result, whose patches are merged.
    offset: see `cubic`.
  """
  weights = [
    cubic(old, new, offset)
    for old, new in zip(x.shape[-3:-1], grid, strict=True)
  ]
  return _interpolated(x, weights, _einsum)


def _einsum(*operands: Any) -> Array:
  """Computes a sum of products inside a program, in float32 on every device."""
  return jnp.einsum(*operands, precision='highest')


def _weights(old: int, new: int, method: str) -> Matrix:
  """Returns the weights of an interpolation along one axis; see `METHODS`."""
  if method in ('aligned', 'bilinear_no_antialias'):
    if method == 'aligned':
      at = np.linspace(0, old - 1, new) if new > 1 else np.zeros(1)
    else:
      at = ((np.arange(new) + 0.5) * old / new - 0.5).clip(0, old - 1)
    return np.maximum(0, 1 - np.abs(at[:, None] - np.arange(old)))
  if method not in ('bicubic', 'bilinear'):
    offset = DINO_OFFSET if method == 'dino' else 0.0
    return cubic(old, new, offset, method == 'bicubic_aligned')
  # The host computes products in float32; a TPU would round to bfloat16.
  with jax.default_device(jax.local_devices(backend='cpu')[0]):
    kind = 'cubic' if method == 'bicubic' else 'linear'
    return np.asarray(jax.image.resize(jnp.eye(old), (new, old), kind))


def check_method(method: str) -> None:
  """Checks that the method is one of `METHODS`.

  Raises:
    UserError: the method is unknown.
  """
  check_choice('position_resize', method, METHODS)


def cubic(
  old: int, new: int, offset: float = 0.0, aligned: bool = False
) -> Matrix:
  """Returns weights of cubic interpolation without antialiasing.

  The kernel is Keys' with a = -3/4 over the four nearest entries; the last
  entry is repeated beyond an end. Entry i of the result is at (i + 1/2) · old /
  (new + offset) - 1/2. With an offset, the result stops slightly before the end
  of the axis. The code of DINO uses an offset of .1, to avoid an error when the
  ratio of sizes is rounded; its released weights were trained with this offset.

  Args:
    old: number of entries.
    new: number of entries of the result.
    offset: addition to the new size; 0 spans the whole axis.
    aligned: whether the first and the last entry stay where they are; then
      `offset` has no effect.

  Returns:
    The matrix `[new, old]`, float32, whose rows sum to 1.

  Reference: `torch.nn.functional.interpolate(mode='bicubic')` with
  `scale_factor=(new + offset) / old` is this matrix for rows and for columns.
  """
  at = (np.arange(new) + 0.5) * old / (new + offset) - 0.5
  if aligned:
    at = np.linspace(0, old - 1, new)
  near = np.floor(at)[:, None] + np.arange(-1, 3)
  # Keys' kernel of the distance x, for x < 1 and for 1 <= x < 2
  x = np.abs(at[:, None] - near)
  close = (1.25 * x - 2.25) * x * x + 1
  far = ((-0.75 * x + 3.75) * x - 6) * x + 3
  weights = np.where(x < 1, close, np.where(x < 2, far, 0))
  same = near.clip(0, old - 1)[:, :, None] == np.arange(old)  # [new, 4, old]
  return np.einsum('nt,nto->no', weights, same).astype(np.float32)


def square_grid(num_patches: int) -> tuple[int, int]:
  """Returns the square grid with the given number of patches.

  Raises:
    UserError: the number is not a square.
  """
  side = round(num_patches**0.5)
  if side * side != num_patches:
    raise UserError(
      f'{num_patches} positions do not form a square grid: give the image size '
      'that the weights were made for.'
    )
  return side, side
