"""Splits images into patches, and chooses random patches to mask."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key, Num

from vit_jax.arrays import sharding
from vit_jax.errors import UserError
from vit_jax.models.layers import cut_patches
from vit_jax.objectives.contract import Setting

Grid = tuple[int, int]  # rows and columns of patches
_PARTS = ('embed', 'encode', 'grid', 'patch_pixels')


def grid_of(setting: Setting, who: str) -> Grid:
  """Returns the numbers of rows and columns of patches of an image.

  Args:
    setting: setting of the run.
    who: name of the objective, for messages.

  Raises:
    UserError: the model does not have tokens that can be masked, or patches do
      not cover all pixels.
  """
  model = setting.model
  missing = [name for name in _PARTS if not hasattr(model, name)]
  if missing:
    raise UserError(
      f'{who} masks patches, but {type(model).__name__} has no '
      f"{', '.join(missing)} (models/contract.py): use config.model.name='vit'."
    )
  tokens: Any = model
  rows, columns = tokens.grid(setting.image_size)
  side = tokens.patch_pixels
  if (rows * side, columns * side) != tuple(setting.image_size):
    height, width = setting.image_size
    raise UserError(
      f'{who} requires whole patches of {side} pixels; got {height}x{width}: '
      f'set --config.image_size={max(rows, 1) * side},{max(columns, 1) * side}.'
    )
  return rows, columns


def check_hidden(key: str, fraction: float, hidden: int, total: int) -> None:
  """Checks that some of the patches are hidden, and some are not.

  Args:
    key: key of the config's section `objective`, for messages.
    fraction: value of the key.
    hidden: number of hidden patches of an image.
    total: number of patches of an image.

  Raises:
    UserError: no patch is hidden, or all are.
  """
  if not 0 < hidden < total:
    raise UserError(
      f'objective.{key} {fraction} hides {hidden} of {total} patches: at least '
      'one must be hidden and one visible; use another fraction or image size.'
    )


def check_headless(setting: Setting, who: str) -> None:
  """Checks that the model has no head, because it would not be trained.

  Args:
    setting: setting of the run.
    who: name of the objective, for messages.

  Raises:
    UserError: the model has a head.
  """
  if setting.model.num_classes:
    raise UserError(
      f'config.num_classes is {setting.model.num_classes}, but the objective '
      f"'{who}' does not train it: set --config.num_classes=0."
    )


def cut(images: Num[Array, 'n y x c'], grid: Grid) -> Num[Array, 'n p d']:
  """Splits images into patches, whose values are ordered (y, x, channel)."""
  n, height, width, _ = images.shape
  sides = height // grid[0], width // grid[1]
  return cut_patches(images, grid, sides).reshape(n, math.prod(grid), -1)


def join(
  patches: Num[Array, 'n p d'], grid: Grid, image_size: tuple[int, int]
) -> Num[Array, 'n y x c']:
  """Joins patches into images; the inverse of `cut`."""
  (rows, columns), (height, width) = grid, image_size
  y, x = height // rows, width // columns
  parts = patches.reshape(len(patches), rows, columns, y, x, -1)
  pixels = parts.transpose(0, 1, 3, 2, 4, 5)  # [n, rows, y, columns, x, c]
  return pixels.reshape(len(patches), height, width, -1)


def spread(
  chosen: Bool[Array, 'n p'], grid: Grid, image_size: tuple[int, int]
) -> Bool[Array, 'n y x 1']:
  """Returns whether each pixel is in a chosen patch."""
  (rows, columns), (height, width) = grid, image_size
  cells = chosen.reshape(-1, rows, 1, columns, 1)
  shape = (len(chosen), rows, height // rows, columns, width // columns)
  return jnp.broadcast_to(cells, shape).reshape(-1, height, width, 1)


def shuffled(key: Key[Array, ''], n: int, grid: Grid) -> Int[Array, 'n p']:
  """Returns a random order of the patches of each image, by sorting noise.

  Every order is equally likely, so each of p patches is among the first k with
  probability k / p. The order depends on the key and the position in the global
  batch, so it is the same on every mesh.

  Args:
    key: random key.
    n: number of images.
    grid: rows and columns of patches.
  """
  noise = jax.random.uniform(key, (n, math.prod(grid)))
  noise = sharding.constrain(noise, sharding.BATCH, None)
  return jnp.argsort(noise, axis=1)


def take(
  patches: Num[Array, 'n p d'], places: Int[Array, 'n k']
) -> Num[Array, 'n k d']:
  """Selects patches by index, different ones for each image."""
  return jnp.take_along_axis(patches, places[..., None], axis=1)
