"""A synthetic source that never finishes opening, as on hanging storage."""

import pathlib
import sys
import threading

from vit_jax.data.sources import synthetic


class Source(synthetic.Source):
  def __init__(self, split, /, *, mark: str):
    pathlib.Path(mark).touch()
    print('opening', file=sys.stderr, flush=True)
    threading.Event().wait()
