"""Examples that two splits of the same data have in common."""

import numpy as np

from vit_jax.data.contract import Source


def count(first: Source, second: Source) -> int:
  """Returns the number of examples that are in both splits.

  Args:
    first: one split.
    second: another split of the same data.

  Returns:
    Number of common examples; 0 if a source does not have the method `rows`,
    without which examples cannot be compared.
  """
  ours, theirs = _rows(first), _rows(second)
  return sum(
    len(np.intersect1d(rows, theirs[part]))
    for part, rows in ours.items()
    if part in theirs
  )


def _rows(source: Source) -> dict[str, np.ndarray]:
  """Returns the positions of a source's examples in each part of the data."""
  by_part: dict[str, list[np.ndarray]] = {}
  for part, rows in getattr(source, 'rows', tuple)():
    by_part.setdefault(part, []).append(rows)
  return {part: np.concatenate(rows) for part, rows in by_part.items()}
