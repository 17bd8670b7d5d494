"""Accuracy of each class, and the confusion matrix."""

import csv
import dataclasses
import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from vit_jax.evaluators import contract
from vit_jax.evaluators.features import OnSplit

PyTree = Any
_CLASSES = 30  # maximum number of classes of a readable confusion matrix
_ROWS = 20  # maximum number of rows of a table of `summary`
_NAME = 60  # maximum number of characters of `class_name`


class Counts(NamedTuple):
  """Numbers of images of pairs of label and prediction.

  Attributes:
    pairs: pairs of label and prediction that occur, ascending.
    images: number of images of each pair.
    per_class: number of images of each class.
    correct: number of images of each class that are classified correctly.
  """

  pairs: Int[np.ndarray, 'm 2']
  images: Int[np.ndarray, ' m']
  per_class: Int[np.ndarray, ' k']
  correct: Int[np.ndarray, ' k']


def count_pairs(
  labels: Int[np.ndarray, ' n'],
  predictions: Int[np.ndarray, ' n'],
  num_classes: int = 0,
) -> Counts:
  """Counts how often each class is predicted as each class.

  Args:
    labels: true class of each image.
    predictions: predicted class of each image.
    num_classes: minimum number of classes of the result.
  """
  pairs, images = np.unique(
    np.stack([labels, predictions], axis=-1), axis=0, return_counts=True
  )
  return Counts(
    pairs,
    images,
    np.bincount(labels, minlength=num_classes),
    np.bincount(labels[labels == predictions], minlength=num_classes),
  )


@dataclasses.dataclass(eq=False, kw_only=True)
class Evaluator(OnSplit):
  """Accuracy, mean accuracy of the classes, and the confusion matrix.

  The mean over classes gives every class the same weight, however many images
  it has. `tables` returns the accuracies of all classes and the confusion
  matrix.

  Raises:
    UserError: the model has no head; or the split does not exist, or it is
      empty.
  """

  higher_is_better = ('accuracy', 'mean_class_accuracy')

  def __post_init__(self):
    contract.check_head(self.setting, 'confusion')
    super().__post_init__()
    self._predict = self.setting.compiled(self._predictions)
    self._counts: Counts | None = None

  def _predictions(self, params: PyTree, batch: PyTree) -> dict[str, Array]:
    """Returns label, prediction, usability and mask of each example."""
    logits = self.setting.predict(params, batch)['logits']
    return {
      'label': batch['label'],
      'prediction': logits.argmax(axis=-1),
      'usable': ~jnp.isnan(logits).any(axis=-1),
      'mask': batch['mask'],
    }

  def run(self, params: PyTree) -> dict[str, float]:
    """Computes accuracies over the examples and over the classes.

    Returns:
      'accuracy' in [0, 1]; 'mean_class_accuracy' in [0, 1], over the classes
      that occur in the split; 'classes', the number of these classes; 'count',
      the number of examples used.

    Raises:
      UserError: there is a bad record and the reader's policy is to stop, no
        example could be used, or a logit is NaN.
    """
    values = self.setting.examples(params, self._source, self._predict)
    if not values['usable'].all():
      raise contract.not_finite_error('the logits', self._source)
    labels, predictions = values['label'], values['prediction']
    num_classes = max(self.setting.num_classes, len(self._source.class_names))
    self._counts = count_pairs(labels, predictions, num_classes)
    _, _, images, correct = self._counts
    accuracies = correct[images > 0] / images[images > 0]
    return {
      'accuracy': float(correct.sum() / images.sum()),
      'mean_class_accuracy': float(accuracies.mean()),
      'classes': len(accuracies),
      'count': int(images.sum()),
    }

  def tables(self) -> dict[str, str]:
    """Returns the tables of the last `run`, as CSV by file name.

    `classes.csv` has a line for each class: its name, the number of its images
    and the fraction that is classified correctly. `pairs.csv` has a line for
    each pair of label and prediction that occurs, with the number of images.
    """
    assert self._counts is not None, 'run() comes first'
    pairs, counts, images, correct = self._counts
    names = [*self._source.class_names]
    names += [str(label) for label in range(len(names), len(images))]
    classes = [
      (name, int(n), f'{right / n:.6f}' if n else '')
      for name, n, right in zip(names, images, correct, strict=True)
    ]
    confused = [
      (names[label], names[prediction], int(n))
      for (label, prediction), n in zip(pairs, counts, strict=True)
    ]
    return {
      'classes.csv': to_csv(('class', 'images', 'accuracy'), classes),
      'pairs.csv': to_csv(('label', 'prediction', 'images'), confused),
    }


def to_csv(head: tuple[Any, ...], lines: list[tuple]) -> str:
  """Returns CSV with the names of the columns in the first line."""
  out = io.StringIO()
  csv.writer(out, lineterminator='\n').writerows([head, *lines])
  return out.getvalue()


def summary(
  labels: Int[np.ndarray, ' n'],
  predictions: Int[np.ndarray, ' n'],
  names: Sequence[str],
) -> dict[str, Any]:
  """Returns the confusion of classes as JSON values, for the HTML report.

  Args:
    labels: true class of each image.
    predictions: predicted class of each image.
    names: names of the classes.

  Returns:
    `names` and `matrix` (rows: true classes), which are empty if there are more
    than 30 classes; `confused`, the most frequent errors: true class, predicted
    class, number of images and its fraction of the true class; and `worst`, the
    classes with the lowest accuracy: class, accuracy and number of images,
    which is empty if there are at most 30 classes.
  """
  size = 1 + int(max(labels.max(), predictions.max(), len(names) - 1))
  pairs, images, per_class, correct = count_pairs(labels, predictions, size)
  true, guessed = pairs.T
  errors = np.flatnonzero(true != guessed)
  most_frequent = errors[np.argsort(-images[errors], kind='stable')[:_ROWS]]
  confused = [
    [
      class_name(names, int(true[i])),
      class_name(names, int(guessed[i])),
      int(images[i]),
      f'{100 * images[i] / per_class[true[i]]:.1f} %',
    ]
    for i in most_frequent
  ]
  if size <= _CLASSES:
    matrix = np.zeros((size, size), int)
    matrix[true, guessed] = images
    return {
      'names': [class_name(names, i) for i in range(size)],
      'matrix': matrix.tolist(),
      'confused': confused,
      'worst': [],
    }
  present = np.flatnonzero(per_class)
  accuracy = correct[present] / per_class[present]
  worst = [
    [
      class_name(names, int(i)),
      f'{100 * correct[i] / per_class[i]:.1f} %',
      int(per_class[i]),
    ]
    for i in present[np.argsort(accuracy, kind='stable')[:_ROWS]]
  ]
  return {'names': [], 'matrix': [], 'confused': confused, 'worst': worst}


def class_name(names: Sequence[str], index: int) -> str:
  """Returns the name of a class, shortened if it is long."""
  full = names[index] if index < len(names) else f'class {index}'
  return full if len(full) <= _NAME else f'{full[: _NAME - 1]}…'
