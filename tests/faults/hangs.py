"""A synthetic source whose evaluation split hangs in its second batch."""

import threading

from vit_jax.data.sources import synthetic


class Source(synthetic.Source):
  def __init__(
    self, split, /, *, num_examples: int = 256, num_classes: int = 20
  ):
    super().__init__(split, num_examples=num_examples, num_classes=num_classes)
    self._hangs = not split.startswith('train[512')

  def __getitem__(self, index):
    if self._hangs and index >= 32:
      threading.Event().wait()
    return super().__getitem__(index)
