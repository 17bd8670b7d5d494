"""A synthetic source that one process of a run reads slowly."""

import threading
import time

import jax

from vit_jax.data.sources import synthetic

# One example at a time, so that the number of threads does not matter.
_LOCK = threading.Lock()


class Source(synthetic.Source):
  def __getitem__(self, index):
    if jax.process_index() == 1:
      with _LOCK:
        time.sleep(0.15)
    return super().__getitem__(index)
