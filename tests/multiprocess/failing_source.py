"""A synthetic source that fails on the last process of a run only."""

import jax

from vit_jax.data.sources import synthetic
from vit_jax.errors import UserError


class Source(synthetic.Source):
  """Fails when it is opened, or in training."""

  def __init__(self, split, /, *, stage: str = 'open', kind: str = 'user'):
    super().__init__(split, num_examples=256, num_classes=20)
    self._stage, self._kind, self._reads = stage, kind, 0
    if stage == 'open':
      self._fail()

  def __getitem__(self, index):
    self._reads += 1
    if self._reads > 100 and self._stage == 'read':
      self._fail()
    return super().__getitem__(index)

  def _fail(self):
    if jax.process_index() == jax.process_count() - 1:
      if self._kind == 'crash':
        raise RuntimeError('a bug of this process')
      raise UserError('only this process has no data')
