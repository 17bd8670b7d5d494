"""Exchanges numbers, text and JSON values between the processes of a run."""

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def gather_integer(value: int) -> list[int]:
  """Gathers an integer below 2^31 from each process, by process index.

  All processes must call it.
  """
  if jax.process_count() == 1:
    return [int(value)]
  return multihost_utils.process_allgather(np.int32(value)).tolist()


def gather_text(text: str) -> list[str]:
  """Gathers a text from each process.

  All processes must call it.

  Args:
    text: text of this process.

  Returns:
    The texts of all processes, by process index, on every process.
  """
  if jax.process_count() == 1:
    return [text]
  data = np.frombuffer(text.encode(), np.uint8)
  sizes = gather_integer(len(data))
  # Only arrays of equal shape can be gathered, so all are padded to the
  # longest.
  padded = np.zeros(max(sizes), np.uint8)
  padded[: len(data)] = data
  rows = multihost_utils.process_allgather(padded)
  return [
    row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)
  ]


def from_main(function: Callable[[], Any]) -> Any:
  """Calls a function on the main process; returns its value on every process.

  All processes must call this function. It is used to read the files of a
  workdir, because other processes may still see older versions of them.

  Args:
    function: function that returns a JSON-able value.
  """
  if jax.process_count() == 1:
    return function()
  text = json.dumps(function()).encode() if jax.process_index() == 0 else b''
  size = multihost_utils.broadcast_one_to_all(np.array(len(text), np.int32))
  data = np.zeros(int(size), np.uint8)
  data[: len(text)] = np.frombuffer(text, np.uint8)
  return json.loads(multihost_utils.broadcast_one_to_all(data).tobytes())
