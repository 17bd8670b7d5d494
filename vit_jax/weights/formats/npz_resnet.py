"""ResNets in official `.npz` files: units one by one there, stacked here.

The first unit of a stage stands alone in both; the others, which are alike, are
`layers/…` with a leading axis here (`models.layers.residual`).
"""

import re
from collections.abc import Callable, Iterable

import numpy as np

from vit_jax.errors import UserError
from vit_jax.weights.formats import npz_arrays

# {path in this package's layout: official name, or those of a stack}
Names = dict[str, str | list[str]]
UNIT = tuple(
  f'{layer}/{leaf}'
  for i in (1, 2, 3)
  for layer, leaf in (
    (f'conv{i}', 'kernel'),
    (f'gn{i}', 'scale'),
    (f'gn{i}', 'bias'),
  )
)
WIDTH = 64  # channels of the root at width factor 1


def depths(path: str, arrays: Iterable[str], pattern: str) -> tuple[int, ...]:
  """Units in each stage.

  Args:
    path: of the file, for messages.
    arrays: names.
    pattern: a regular expression with a group for the stage's number and one
      for the unit's, both from 1.

  Raises:
    UserError: a stage is left out. (A unit that is shows as a missing array.)
  """
  found: dict[int, int] = {}
  for match in filter(None, (re.match(pattern, name) for name in arrays)):
    stage, unit = int(match[1]), int(match[2])
    found[stage] = max(found.get(stage, 0), unit)
  if sorted(found) != list(range(1, len(found) + 1)):
    raise UserError(
      f'{path} holds the stages {sorted(found)} of a ResNet; they are numbered '
      'from 1 without gaps.'
    )
  return tuple(found[stage] for stage in sorted(found))


def unit_names(
  depths: tuple[int, ...],
  first: tuple[str, ...],
  official: Callable[[int, int, str], str],
) -> Names:
  """Names of all units.

  Args:
    depths: units in each stage.
    first: paths that only a stage's first unit has, as in `UNIT`.
    official: (stage, unit, path within it) → name, numbers from 1.
  """
  names: Names = {}
  for stage, depth in enumerate(depths, start=1):
    for leaf in (*UNIT, *first):
      names[f'block{stage}/unit1/{leaf}'] = official(stage, 1, leaf)
    for leaf in UNIT if depth > 1 else ():
      names[f'block{stage}/layers/{leaf}'] = [
        official(stage, unit, leaf) for unit in range(2, depth + 1)
      ]
  return names


def take(
  path: str, arrays: dict[str, np.ndarray], names: Names
) -> dict[str, np.ndarray]:
  """Takes arrays out of a file's, in this package's layout.

  Norms may be stored with leading dimensions of 1.

  Raises:
    UserError: an array is missing, is no weights, or does not stack.
  """

  def one(native: str, name: str) -> np.ndarray:
    if name not in arrays:
      raise UserError(f'{path} lacks the array {name!r}.')
    array = arrays.pop(name)
    if not native.endswith('kernel') and array.shape[:-1] == (1, 1, 1):
      array = array.reshape(-1)
    rank = 4 if native.endswith('kernel') else 1
    return npz_arrays.floats(path, name, array, rank)

  def stack(native: str, several: list[str]) -> np.ndarray:
    parts = [one(native, name) for name in several]
    shapes = {part.shape for part in parts}
    if len(shapes) > 1:
      raise UserError(
        f'{path} has units of different shapes: {several[0]} and those after '
        f'it are {sorted(shapes)}.'
      )
    return np.stack(parts)

  return {
    native: one(native, name) if isinstance(name, str) else stack(native, name)
    for native, name in names.items()
  }


def give(flat: dict[str, np.ndarray], names: Names) -> dict[str, np.ndarray]:
  """Takes leaves out of a flat tree; {official name: array}."""
  arrays = {}
  for native, name in names.items():
    leaf = flat.pop(native)
    if isinstance(name, str):
      arrays[name] = leaf
    else:
      arrays |= zip(name, leaf, strict=True)
  return arrays


def stacked_depths(flat: dict[str, np.ndarray]) -> tuple[int, ...]:
  """Units in each stage of a flat tree in this package's layout."""
  count = sum(path.endswith('/unit1/conv1/kernel') for path in flat)
  rest = [flat.get(f'block{i + 1}/layers/conv1/kernel') for i in range(count)]
  return tuple(1 if leaf is None else 1 + len(leaf) for leaf in rest)


def width_factor(path: str, root: np.ndarray) -> int:
  """The width factor that a root convolution has.

  Raises:
    UserError: it has none.
  """
  factor, rest = divmod(root.shape[-1], WIDTH)
  if rest or not factor:
    raise UserError(
      f'{path} holds a ResNet whose root has {root.shape[-1]} channels; it '
      f'must be a multiple of {WIDTH}.'
    )
  return factor
