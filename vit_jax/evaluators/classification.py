"""Exact accuracy and loss over a split."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.errors import check_choice
from vit_jax.evaluators import contract
from vit_jax.evaluators.features import OnSplit
from vit_jax.objectives.losses import LOSSES

PyTree = Any


@dataclasses.dataclass(eq=False, kw_only=True)
class Evaluator(OnSplit):
  """Top-1 accuracy, mean loss and count over every example of a split.

  If a logit is NaN, the prediction is not correct. Sums are divided by counts
  once at the end and padding is masked, so the result does not depend on the
  batch size or the number of devices or processes.

  Attributes:
    cross_entropy: kind of the reported loss, 'softmax' or 'sigmoid'; by
      default, that of the objective.

  Raises:
    UserError: the model has no head; the split does not exist, or it is empty;
      or a value is out of range.
  """

  higher_is_better, lower_is_better = ('accuracy',), ('loss',)
  cross_entropy: str | None = None

  def __post_init__(self):
    kind = self.cross_entropy or self.setting.objective.cross_entropy
    check_choice('cross_entropy', kind, LOSSES)
    contract.check_head(self.setting, 'classification')
    super().__post_init__()
    self._loss = LOSSES[kind]
    self._count = self.setting.compiled(self._count_batch)

  def _count_batch(self, params: PyTree, batch: PyTree) -> dict[str, Array]:
    """Computes sums over the examples of a batch, without padding."""
    logits = self.setting.predict(params, batch)['logits']
    losses = jnp.where(batch['mask'], self._loss(logits, batch['label']), 0)
    return correct(logits, batch) | {'loss': losses.sum()}

  def run(self, params: PyTree) -> dict[str, float]:
    """Computes the metrics of the split.

    Returns:
      'accuracy' in [0, 1]; 'loss', the mean in nats; 'count', the number of
      examples used.

    Raises:
      UserError: there is a bad record and the reader's policy is to stop, or no
        example could be used.
    """
    results = self.setting.sweep(params, self._source, self._count)
    return contract.averages(results, self._source)


def correct(logits: Float[Array, 'n k'], batch: PyTree) -> dict[str, Array]:
  """Counts correct predictions (`accuracy`) and all examples (`count`).

  Args:
    logits: a number for each class.
    batch: batch with `label` and `mask`; padding is not counted.
  """
  label, mask = batch['label'], batch['mask']
  # argmax would return the class of a NaN.
  usable = mask & ~jnp.isnan(logits).any(axis=-1)
  right = (logits.argmax(axis=-1) == label) & usable
  return {
    'accuracy': right.sum(dtype=jnp.int32),
    'count': mask.sum(dtype=jnp.int32),
  }
