"""Scores of scikit-learn: of one or several labels, or of numbers."""

import dataclasses
from typing import Any

import numpy as np
from jax import Array
from sklearn import metrics

from vit_jax.data.contract import require, target_key
from vit_jax.evaluators import confusion, contract
from vit_jax.evaluators.contract import Batch, PyTree
from vit_jax.evaluators.features import OnSplit
from vit_jax.objectives.losses import PROBABILITIES


@dataclasses.dataclass(eq=False, kw_only=True)
class Evaluator(OnSplit):
  """Precision, recall, F1, AUC and average precision, or the absolute error.

  The scores of `label` and `labels` are means over the classes of at least one
  image of the split; AUC only over those that not all of its images have. The
  classes predicted for an image are the most likely one for `label`, and those
  with a probability of at least .5 for `labels`. The outputs for all images are
  kept in memory.

  Raises:
    UserError: the split does not exist, or it is empty; or batches have no
      targets.
  """

  higher_is_better = (
    'mean_average_precision',
    'precision',
    'recall',
    'f1',
    'auc',
  )
  lower_is_better = ('mean_absolute_error',)

  def __post_init__(self):
    spec = self.setting.transform.spec
    self._key = target_key(spec)
    require(spec, 'image', self._key, who='scores')
    super().__post_init__()
    self._outputs = self.setting.compiled(self._batch_outputs)

  def _batch_outputs(self, params: PyTree, batch: Batch) -> dict[str, Array]:
    logits = self.setting.predict(params, batch)['logits']
    outputs = PROBABILITIES[self.setting.objective.cross_entropy](logits)
    return {'outputs': outputs} | {k: batch[k] for k in (self._key, 'mask')}

  def run(self, params: PyTree) -> dict[str, float]:
    """Computes the scores of the split.

    Returns:
      'mean_absolute_error' of numbers, the mean over numbers and images; or
      'mean_average_precision', 'precision', 'recall', 'f1' and 'auc' in [0, 1];
      'count', the number of examples used. A score that is not defined for any
      class is missing.

    Raises:
      UserError: there is a bad record and the reader's policy is to stop, no
        example could be used, or an output is not finite.
    """
    values = self.setting.examples(params, self._source, self._outputs)
    outputs, target = values['outputs'].astype(float), values[self._key]
    if not np.isfinite(outputs).all():
      raise contract.not_finite_error('the logits', self._source)
    if self._key == 'numbers':
      self._scores = {'mean_absolute_error': np.abs(outputs - target).mean(0)}
    else:
      true, predicted = target > 0.5, outputs >= 0.5
      if self._key == 'label':
        one_hot = np.eye(outputs.shape[1], dtype=bool)
        true, predicted = one_hot[target], one_hot[outputs.argmax(axis=1)]
      # A class that is never predicted has the precision 0.
      ratios: Any = dict(average='binary', zero_division=0)
      scores = np.full((5, outputs.shape[1]), np.nan)
      for i in np.flatnonzero(true.any(axis=0)):
        one = true[:, i]
        scores[0, i] = metrics.average_precision_score(one, outputs[:, i])
        scores[1:4, i] = metrics.precision_recall_fscore_support(
          one, predicted[:, i], **ratios
        )[:3]
        if not one.all():
          scores[4, i] = metrics.roc_auc_score(one, outputs[:, i])
      self._scores = dict(zip(self.higher_is_better, scores, strict=True))
    known = {key: x[~np.isnan(x)] for key, x in self._scores.items()}
    means = {key: float(x.mean()) for key, x in known.items() if len(x)}
    return means | {'count': len(target)}

  def tables(self) -> dict[str, str]:
    """Returns `classes.csv` of the last `run`, a line for each class or number.

    Scores that are not defined are nan.
    """
    names = self._source.class_names
    rows = enumerate(np.transpose([*self._scores.values()]).tolist())
    lines = [(confusion.class_name(names, i), *row) for i, row in rows]
    head = [key.removeprefix('mean_') for key in self._scores]
    return {'classes.csv': confusion.to_csv(('name', *head), lines)}
