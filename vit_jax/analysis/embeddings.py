"""Analysis of the first layer: patch filters and position embeddings."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

Grid = tuple[int, int]
FILTERS = 28  # principal components in Figure 7


class Components(NamedTuple):
  """Principal components of filters, in descending order of variance.

  Attributes:
    filters: filters of norm 1; the entry with the largest magnitude is
      positive.
    fractions: fraction of the variance that each component explains.
  """

  filters: Float[np.ndarray, 'n y x 3']
  fractions: Float[np.ndarray, ' n']


def components(
  kernel: Float[np.ndarray, 'y x 3 d'], count: int = FILTERS
) -> Components:
  """Computes the principal components of d centred filters of RGB pixels.

  Args:
    kernel: kernel of the first layer.
    count: maximum number of components.

  Reference: arXiv 2010.11929, Figure 7 (left).
  """
  *shape, width = kernel.shape
  filters = kernel.reshape(-1, width).T.astype(np.float64)  # [d, y x 3]
  _, sizes, vectors = np.linalg.svd(filters - filters.mean(0), False)
  vectors, variances = vectors[:count], sizes**2
  largest = np.abs(vectors).argmax(axis=1)
  signs = np.sign(vectors[np.arange(len(vectors)), largest])
  fractions = variances / max(variances.sum(), 1e-300)
  return Components(
    (vectors * signs[:, None]).reshape(-1, *shape), fractions[: len(vectors)]
  )


def first_kernel(
  leaves: Mapping[str, Any],
) -> Float[np.ndarray, 'y x 3 d'] | None:
  """Finds the filters that are applied to RGB pixels (patch embedding or stem).

  Args:
    leaves: parameters by path.

  Returns:
    The kernel `[y, x, 3, d]`, or None if the model does not have one that is
    larger than 1 x 1 pixel.
  """
  for path in sorted(leaves, key=lambda path: path.count('/')):
    shape = leaves[path].shape
    is_filter = len(shape) == 4 and shape[2] == 3 and shape[0] * shape[1] > 1
    if is_filter and path.endswith('kernel') and '/layers/' not in path:
      return np.asarray(leaves[path], np.float32)
  return None


def positions(
  leaves: Mapping[str, Any], grid: Grid
) -> Float[np.ndarray, 'p d'] | None:
  """Returns the learned position embeddings of the patches, row by row.

  If every layer has its own embeddings, those of the first layer are returned.

  Args:
    leaves: parameters by path.
    grid: rows and columns of patches.

  Returns:
    The embeddings, or None if the model does not learn any.
  """
  count = grid[0] * grid[1]
  for start in ('position', 'encoder/layers/position'):
    tables = {
      path[len(start) + 1 :]: np.asarray(leaf, np.float64)
      for path, leaf in leaves.items()
      if path.startswith(f'{start}/')
    }
    if start != 'position':
      tables = {name: leaf[0] for name, leaf in tables.items()}
    if 'embedding' in tables:  # [1, other tokens + patches, d]
      return tables['embedding'][0, -count:]
    if {'rows', 'columns'} <= tables.keys():
      rows, columns = tables['rows'], tables['columns']
      rows = np.broadcast_to(rows[:, None], (*grid, rows.shape[-1]))
      columns = np.broadcast_to(columns, (*grid, columns.shape[-1]))
      return np.concatenate([rows, columns], axis=-1).reshape(count, -1)
  return None


def similarity(
  table: Float[np.ndarray, 'p d'], grid: Grid
) -> Float[np.ndarray, 'r c r c']:
  """Computes the cosine similarity of all pairs of position embeddings.

  Args:
    table: position embeddings, patches numbered row by row.
    grid: rows and columns of patches.

  Reference: arXiv 2010.11929, Figure 7 (centre).
  """
  lengths = np.linalg.norm(table, axis=1, keepdims=True)
  unit = table / np.maximum(lengths, 1e-30)
  return (unit @ unit.T).reshape(*grid, *grid)
