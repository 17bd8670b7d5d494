"""An evaluator outside the package: confidence on two datasets."""

import os
import signal

import jax
import jax.numpy as jnp

from vit_jax.evaluators import contract
from vit_jax.evaluators.contract import total


class Evaluator(contract.Evaluator):
  """Accuracy and confidence on a split, confidence on another source."""

  higher_is_better = ('accuracy',)

  def __init__(
    self, setting, /, *, split: str, other: str, stops: bool = False
  ):
    self._setting, self._stops = setting, stops
    self._own = setting.open_source(split)
    self._other = setting.open_other({'name': other}, 'other')
    self._sums = setting.compiled(self._of_batch)

  def _of_batch(self, weights, batch):
    logits = self._setting.predict(weights, batch)['logits']
    sure = jax.nn.softmax(logits).max(-1)
    correct = (logits.argmax(-1) == batch['label']) & batch['mask']
    return {
      'count': batch['mask'].sum(),
      'correct': correct.sum(),
      'sure': jnp.where(batch['mask'], sure, 0).sum(),
    }

  def run(self, weights):
    if self._stops:  # as if the machine was preempted
      os.kill(os.getpid(), signal.SIGTERM)
    own, other = (
      total(self._setting.sweep(weights, source, self._sums))
      for source in (self._own, self._other)
    )
    return {
      'accuracy': own['correct'] / own['count'],
      'confidence': own['sure'] / own['count'],
      'confidence_other': other['sure'] / other['count'],
      'count': own['count'],
    }
