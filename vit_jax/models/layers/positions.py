"""Position embeddings: learned, and how they change resolution."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.errors import UserError

METHODS = ('aligned', 'bicubic')


class PositionEmbedding(nn.Module):
  """A learned embedding of each slot (section 3.1; N(0, 0.02))."""

  @nn.compact
  def __call__(
    self, slots: int, width: int
  ) -> Float[Array | np.ndarray, '1 t d']:
    """The embeddings of all slots."""
    init = nn.initializers.normal(0.02)
    return self.param('embedding', init, (1, slots, width))

  def first(self, slots: int) -> Float[Array | np.ndarray, '1 s d']:
    """Embeddings of the first slots; does not need the number of all slots."""
    return self.get_variable('params', 'embedding')[:, :slots]


def _aligned_matrix(old: int, new: int) -> np.ndarray:
  """[new, old] linear interpolation weights with the end points aligned."""
  at = np.linspace(0, old - 1, new) if new > 1 else np.zeros(1)
  distance = np.abs(at[:, None] - np.arange(old)[None, :])
  return np.maximum(0, 1 - distance)


def check_method(method: str) -> None:
  """Raises UserError unless `resize` knows the method."""
  if method not in METHODS:
    raise UserError(
      f'position embeddings are resized by one of {METHODS} '
      f'(position_resize); got {method!r}.'
    )


def resize(
  embedding: Float[Array | np.ndarray, '1 t d'],
  old_grid: tuple[int, int],
  new_grid: tuple[int, int],
  method: str = 'aligned',
) -> Float[np.ndarray, '1 s d']:
  """Interpolates the grid part of a position embedding; keeps class slots.

  Args:
    embedding: `[1, prefix + old_h · old_w, d]`, prefix ≥ 0 slots first.
    old_grid: (rows, columns) of patches it was made for.
    new_grid: (rows, columns) wanted, square or not.
    method: 'aligned', linear with aligned corners as in the authors' code
      (SciPy's `zoom(order=1)`), or 'bicubic', antialiased with half-pixel
      centres as in timm.

  Returns:
    `[1, prefix + new_h · new_w, d]`, float32.

  Raises:
    UserError: the embedding does not hold that grid; unknown method.

  Reference: section 3.2 of the paper, "2D interpolation".
  """
  check_method(method)
  prefix = embedding.shape[1] - old_grid[0] * old_grid[1]
  if prefix < 0:
    raise UserError(
      f'a position embedding of {embedding.shape[1]} slots cannot hold a '
      f'{old_grid[0]}x{old_grid[1]} grid of patches.'
    )
  if tuple(old_grid) == tuple(new_grid):
    return np.asarray(embedding, np.float32)
  width = embedding.shape[-1]
  slots, grid = np.split(np.asarray(embedding, np.float32), [prefix], axis=1)
  grid = grid.reshape(*old_grid, width)
  if method == 'aligned':
    rows = _aligned_matrix(old_grid[0], new_grid[0])
    columns = _aligned_matrix(old_grid[1], new_grid[1])
    grid = np.einsum('yi,xj,ijd->yxd', rows, columns, grid)
  else:
    with jax.default_device(jax.local_devices(backend='cpu')[0]):
      grid = jax.image.resize(jnp.asarray(grid), (*new_grid, width), 'cubic')
  grid = np.asarray(grid, np.float32).reshape(1, -1, width)
  return np.concatenate([slots, grid], axis=1)


def square_grid(num_patches: int) -> tuple[int, int]:
  """The square grid of that many patches.

  Raises:
    UserError: it is no square number, so the grid must be told.
  """
  side = round(num_patches**0.5)
  if side * side != num_patches:
    raise UserError(
      f'{num_patches} position slots are no square grid: say the image size '
      'that the weights were made for.'
    )
  return side, side
