"""Scores of scikit-learn for one or several labels, or for numbers."""

import dataclasses
from typing import Any

import numpy as np
from jax import Array
from jaxtyping import Bool, Float
from sklearn import metrics

from vit_jax.data.contract import require, target_key
from vit_jax.evaluators import confusion
from vit_jax.evaluators.contract import Batch, PyTree
from vit_jax.evaluators.features import OnSplit
from vit_jax.objectives.losses import PROBABILITIES


@dataclasses.dataclass(eq=False, kw_only=True)
class Evaluator(OnSplit):
  """Precision, recall, F1, AUC and average precision, or the absolute error.

  The mean absolute error is that of `numbers`. The other scores are those of
  `label` and `labels`: each is computed for one class at a time, and averaged
  over the classes that at least one image of the split has; AUC only over those
  that not all images have. The classes predicted for an image are the most
  likely one for `label`, and those with a probability of at least .5 for
  `labels`. The outputs for all images are kept in memory.

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
    """Returns outputs `[n, k]`, targets and mask of each example."""
    logits = self.setting.predict(params, batch)['logits']
    outputs = PROBABILITIES[self.setting.objective.cross_entropy](logits)
    return {
      'outputs': outputs,
      self._key: batch[self._key],
      'mask': batch['mask'],
    }

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
    values = self.setting.examples(
      params, self._source, self._outputs, finite={'outputs': 'the logits'}
    )
    outputs, target = values['outputs'].astype(float), values[self._key]
    if self._key == 'numbers':
      self._scores = {'mean_absolute_error': np.abs(outputs - target).mean(0)}
    elif self._key == 'label':
      one_hot = np.eye(outputs.shape[1], dtype=bool)
      predicted = one_hot[outputs.argmax(axis=1)]
      self._scores = _of_classes(one_hot[target], predicted, outputs)
    else:  # targets may be smoothed
      self._scores = _of_classes(target > 0.5, outputs >= 0.5, outputs)
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


def _of_classes(
  true: Bool[np.ndarray, 'n k'],
  predicted: Bool[np.ndarray, 'n k'],
  outputs: Float[np.ndarray, 'n k'],
) -> dict[str, Float[np.ndarray, ' k']]:
  """Returns the scores of each class by name; NaN if one is not defined.

  Args:
    true: whether each class is a label of each image.
    predicted: whether each class is predicted for each image.
    outputs: probability of each class.
  """
  names = Evaluator.higher_is_better
  scores = {name: np.full(true.shape[1], np.nan) for name in names}
  # A class that is never predicted has the precision 0.
  options: Any = dict(average='binary', zero_division=0)
  # Without an image of the class, recall and average precision are not defined.
  for k in np.flatnonzero(true.any(axis=0)):
    has_class, output = true[:, k], outputs[:, k]
    precision, recall, f1, _ = metrics.precision_recall_fscore_support(
      has_class, predicted[:, k], **options
    )
    scores['precision'][k], scores['recall'][k] = precision, recall
    scores['f1'][k] = f1
    scores['mean_average_precision'][k] = metrics.average_precision_score(
      has_class, output
    )
    # AUC compares images with the class to those without it.
    if not has_class.all():
      scores['auc'][k] = metrics.roc_auc_score(has_class, output)
  return scores
