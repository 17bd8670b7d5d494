"""Reads the lines of metrics.jsonl, and leaves out what is not a metric."""

import math
from collections.abc import Iterator
from typing import Any

from etils import epath

from vit_jax.files import jsonl

Metrics = dict[str, float | None]  # None: the value was not finite


def read(workdir: epath.Path) -> Iterator[tuple[int, Metrics]]:
  """Reads the metrics of a run; a missing file has no lines.

  Lines that are not JSON objects or whose `step` is not an integer of 64 bits
  are left out, and so are values that are neither numbers nor null.

  Args:
    workdir: directory of the run.

  Yields:
    (number of updates completed, metrics by name) of each line.

  Raises:
    UserError: the permissions of the file forbid reading it.
    StorageError: the file exists, but cannot be read.
  """
  for _, record in jsonl.read(workdir / 'metrics.jsonl'):
    step = record.pop('step', None) if record else None
    if record is not None and type(step) is int and step.bit_length() < 64:
      yield (
        step,
        {
          name: value if _is_finite(value) else None
          for name, value in record.items()
          if value is None or _is_number(value)
        },
      )


def _is_number(value: Any) -> bool:
  # `isinstance` would accept True as an int.
  return type(value) in (int, float)


def _is_finite(value: Any) -> bool:
  """Returns whether a number or null is a finite float."""
  try:
    return value is not None and math.isfinite(value)
  except OverflowError:  # an integer with hundreds of digits
    return False
