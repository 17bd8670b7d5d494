"""One answer for all processes of a run."""

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


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
