"""Interpolation of learned positions for images of another size."""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.errors import UserError, check_choice

# Methods of interpolation. 'aligned': linear with aligned corners, as SciPy's
# `zoom(order=1)` in the code of the paper's authors and big_vision. The others
# are bicubic with half-pixel centers: 'bicubic' with antialiasing, as in timm;
# 'bicubic_no_antialias' as in transformers, MAE, DeiT and Swin; 'dino' without
# antialiasing, for an axis that is a tenth of an entry longer, see `cubic`.
METHODS = ('aligned', 'bicubic', 'bicubic_no_antialias', 'dino')
DINO_OFFSET = 0.1
_AXES = {'rows': 0, 'columns': 1}


def _weights(old: int, new: int, method: str) -> Float[np.ndarray, 'new old']:
  """Returns the weights of an interpolation along one axis; see `resize`."""
  check_method(method)
  if method == 'aligned':
    at = np.linspace(0, old - 1, new) if new > 1 else np.zeros(1)
    return np.maximum(0, 1 - np.abs(at[:, None] - np.arange(old)))
  if method != 'bicubic':
    return cubic(old, new, DINO_OFFSET if method == 'dino' else 0.0)
  # The host computes products in float32; a TPU would round to bfloat16.
  with jax.default_device(jax.local_devices(backend='cpu')[0]):
    return np.asarray(jax.image.resize(jnp.eye(old), (new, old), 'cubic'))


def cubic(
  old: int, new: int, offset: float = 0.0
) -> Float[np.ndarray, 'new old']:
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

  Returns:
    The matrix `[new, old]`, float32, whose rows sum to 1.

  Reference: `torch.nn.functional.interpolate(mode='bicubic')` with
  `scale_factor=(new + offset) / old` is this matrix for rows and for columns.
  """
  at = (np.arange(new) + 0.5) * old / (new + offset) - 0.5
  slots = np.floor(at)[:, None] + np.arange(-1, 3)
  x = np.abs(at[:, None] - slots)
  near = (1.25 * x - 2.25) * x * x + 1
  far = ((-0.75 * x + 3.75) * x - 6) * x + 3
  weights = np.where(x < 1, near, np.where(x < 2, far, 0))
  hits = slots.clip(0, old - 1)[:, :, None] == np.arange(old)
  return np.einsum('nt,nto->no', weights, hits).astype(np.float32)


def stretched(
  table: Float[Array, 'old d'], new: int, offset: float
) -> Float[Array, 'new d']:
  """Interpolates entries along one axis by `cubic`, inside a program.

  Args:
    table: one embedding per entry.
    new: number of entries of the result.
    offset: offset of `cubic`.
  """
  weights = cubic(table.shape[0], new, offset)
  return jnp.einsum('no,od->nd', weights, table, precision='highest')


def stretched_grid(
  table: Float[Array, 'old d'],
  old_grid: tuple[int, int],
  new_grid: tuple[int, int],
  offset: float,
) -> Float[Array, 'new d']:
  """Interpolates the entries of a grid by `cubic`, inside a program.

  Args:
    table: one embedding per patch, row by row.
    old_grid: (rows, columns) of the table.
    new_grid: (rows, columns) of the result.
    offset: offset of `cubic`.
  """
  rows, columns = (
    cubic(old, new, offset) for old, new in zip(old_grid, new_grid, strict=True)
  )
  grid = table.reshape(*old_grid, -1)
  grid = jnp.einsum('yi,xj,ijd->yxd', rows, columns, grid, precision='highest')
  return grid.reshape(-1, table.shape[-1])


def check_method(method: str) -> None:
  """Checks that the method is one of `METHODS`.

  Raises:
    UserError: the method is unknown.
  """
  check_choice('position_resize', method, METHODS)


def resize(
  embedding: Float[Array | np.ndarray, '*layers t d'],
  old_grid: tuple[int, int],
  new_grid: tuple[int, int],
  method: str = 'aligned',
) -> Float[np.ndarray, '*layers s d']:
  """Interpolates the position embeddings of patches.

  The embeddings of prefix tokens do not change.

  Args:
    embedding: position embedding, `[…, prefix + old_h · old_w, d]`.
    old_grid: (rows, columns) of patches of the embedding.
    new_grid: (rows, columns) of patches of the result.
    method: one of `METHODS`.

  Returns:
    `[…, prefix + new_h · new_w, d]`, float32.

  Raises:
    UserError: the embedding is too small for the grid, or the method is
      unknown.

  Reference: section 3.2 of the paper, "2D interpolation".
  """
  check_method(method)
  prefix = embedding.shape[-2] - math.prod(old_grid)
  if prefix < 0:
    raise UserError(
      f'a position embedding has {embedding.shape[-2]} entries, too few for a '
      f'{old_grid[0]}x{old_grid[1]} grid of patches: check the image size and '
      'the patch size that belong to the weights.'
    )
  wide = np.asarray(embedding, np.float32)
  # Interpolation to the same grid would change values by rounding.
  if tuple(old_grid) == tuple(new_grid):
    return wide
  *layers, _, width = wide.shape
  slots, grid = np.split(wide, [prefix], axis=-2)
  grid = grid.reshape(*layers, *old_grid, width)
  rows, columns = (
    _weights(old, new, method)
    for old, new in zip(old_grid, new_grid, strict=True)
  )
  grid = np.einsum('yi,xj,...ijd->...yxd', rows, columns, grid)
  grid = np.asarray(grid, np.float32).reshape(*layers, -1, width)
  return np.concatenate([slots, grid], axis=-2)


def resize_axis(
  table: Float[Array | np.ndarray, '... old d'], new: int, method: str
) -> Float[np.ndarray, '... new d']:
  """Interpolates the second-to-last axis of a table; float32.

  Args:
    table: one embedding per row of patches, per column, or per offset.
    new: number of embeddings of the result.
    method: one of `METHODS`.
  """
  old, wide = table.shape[-2], np.asarray(table, np.float32)
  weights = _weights(old, new, method)
  if old == new:
    return wide
  return np.einsum('yi,...id->...yd', weights, wide).astype(np.float32)


def resize_leaf(
  name: str,
  leaf: Float[Array | np.ndarray, '...'],
  old_grid: tuple[int, int],
  new_grid: tuple[int, int],
  method: str,
) -> Float[np.ndarray, '...']:
  """Interpolates a parameter of `Positions`; layers may be stacked.

  Args:
    name: last part of the path: 'embedding' `[…, 1, t, d]`, 'rows' or 'columns'
      `[…, n, d/2]`, or 'offsets' `[…, 2t − 1, c]`. Offsets are interpolated as
      one axis, so that a distance of some rows becomes a distance that covers
      the same fraction of the image.
    leaf: parameter for `old_grid`.
    old_grid: (rows, columns) of patches.
    new_grid: (rows, columns) of patches of the result.
    method: one of `METHODS`.

  Raises:
    UserError: the parameter does not belong to `old_grid`, or the method is
      unknown.
  """
  if name == 'embedding':
    return resize(leaf, old_grid, new_grid, method)
  old_count, new_count = math.prod(old_grid), math.prod(new_grid)
  if name in _AXES:
    old, new = old_grid[_AXES[name]], new_grid[_AXES[name]]
    fits = leaf.shape[-2] == old
  else:  # offsets, numbered along the sequence with the prefix tokens
    tokens = (leaf.shape[-2] + 1) // 2
    new = 2 * (tokens - old_count + new_count) - 1
    fits = tokens >= old_count
  if not fits:
    raise UserError(
      f'the positions {name!r} have the shape {list(leaf.shape)}, which does '
      f'not belong to a {old_grid[0]}x{old_grid[1]} grid of patches: check the '
      'image size and the patch size that belong to the weights.'
    )
  return resize_axis(leaf, new, method)


def resize_leaves(
  leaves: Mapping[str, Float[Array | np.ndarray, '...']],
  old_grid: tuple[int, int],
  new_grid: tuple[int, int],
  method: str | None,
) -> dict[str, Float[np.ndarray, '...']]:
  """Interpolates parameters of `Positions` by path; see `resize_leaf`.

  Without a method, they are interpolated as in the paper ('aligned').
  """
  method = method or 'aligned'
  return {
    path: resize_leaf(path.rpartition('/')[2], leaf, old_grid, new_grid, method)
    for path, leaf in leaves.items()
  }


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
