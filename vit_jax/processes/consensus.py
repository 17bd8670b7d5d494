"""One answer for all processes of a run."""

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def of_each(text: str) -> list[str]:
  """What each process says, on every process, by their numbers."""
  if jax.process_count() == 1:
    return [text]
  own = np.frombuffer(text.encode(), np.uint8)
  sizes = multihost_utils.process_allgather(np.array(len(own), np.int32))
  padded = np.zeros(int(sizes.max()), np.uint8)
  padded[: len(own)] = own
  rows = multihost_utils.process_allgather(padded)
  return [
    row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)
  ]


def from_main(answer: Callable[[], Any]) -> Any:
  """What the main process answers, on every process.

  Files of the workdir are read so: others may see them later, or otherwise.

  Args:
    answer: called on the main process alone; JSON-able.
  """
  if jax.process_count() == 1:
    return answer()
  text = json.dumps(answer()).encode() if jax.process_index() == 0 else b''
  size = multihost_utils.broadcast_one_to_all(np.array(len(text), np.int32))
  data = np.zeros(int(size), np.uint8)
  data[: len(text)] = np.frombuffer(text, np.uint8)
  return json.loads(multihost_utils.broadcast_one_to_all(data).tobytes())
