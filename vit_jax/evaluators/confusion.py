"""Accuracy of each class, and the confusion matrix."""

import csv
import functools
import io
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from vit_jax.config import plugins
from vit_jax.data.contract import require
from vit_jax.evaluators import contract
from vit_jax.evaluators.features import open_split

PyTree = Any


@plugins.operational('every', 'batch_size')
class Evaluator:
  """Accuracy, mean accuracy of the classes, and the confusion matrix.

  The mean over classes gives every class the same weight, however many images
  it has. `tables` returns the accuracies of all classes and the confusion
  matrix.
  """

  # metrics for `checkpoint.best`
  higher_is_better = ('accuracy', 'mean_class_accuracy')

  def __init__(
    self,
    setting: contract.Setting,
    /,
    *,
    split: str,
    every: str = '1 epochs',
    batch_size: int | None = None,
  ):
    """Opens the split.

    Args:
      setting: setting of the run.
      split: split of the config's source, in TFDS notation.
      every: duration between evaluations, used by the training loop.
      batch_size: global batch size; by default that of training.

    Raises:
      UserError: the model has no head; the split does not exist, or it is
        empty; or a value is out of range.
    """
    contract.check_common(every, batch_size)
    contract.check_head(setting)
    require(setting.transform.spec, 'image', 'label', who='confusion')
    self._setting, self._batch_size = setting, batch_size
    self._source = open_split(setting, split)
    self._predictions = setting.compiled(
      functools.partial(_predictions, setting.predict)
    )
    self._pairs = np.zeros((0, 2), np.int64)

  def run(self, params: PyTree) -> dict[str, float]:
    """Computes accuracies over the examples and over the classes.

    Returns:
      'accuracy' in [0, 1]; 'mean_class_accuracy' in [0, 1], over the classes
      that occur in the split; 'classes', the number of these classes; 'count',
      the number of examples used.

    Raises:
      UserError: there is a bad record and the reader's policy is to stop, or no
        example could be used.
    """
    results = self._setting.sweep(
      params, self._source, self._predictions, self._batch_size
    )
    values = contract.joined(results)
    self._pairs = values['pairs'][values['mask']]
    if not len(self._pairs):
      raise contract.no_example_error(self._source)
    images, correct = self._by_class()
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
    images, correct = self._by_class()
    names = [*self._source.class_names]
    names += [str(label) for label in range(len(names), len(images))]
    classes = [
      (name, int(n), f'{right / n:.6f}' if n else '')
      for name, n, right in zip(names, images, correct, strict=True)
    ]
    pairs, counts = np.unique(self._pairs, axis=0, return_counts=True)
    confused = [
      (names[label], names[prediction], int(n))
      for (label, prediction), n in zip(pairs, counts, strict=True)
    ]
    return {
      'classes.csv': _csv(('class', 'images', 'accuracy'), classes),
      'pairs.csv': _csv(('label', 'prediction', 'images'), confused),
    }

  def _by_class(self) -> tuple[Int[np.ndarray, ' k'], Int[np.ndarray, ' k']]:
    """Returns the numbers of images and of correct predictions per class."""
    num_classes = max(self._setting.num_classes, len(self._source.class_names))
    labels, predictions = self._pairs.T
    images = np.bincount(labels, minlength=num_classes)
    correct = labels[labels == predictions]
    return images, np.bincount(correct, minlength=num_classes)


def _predictions(predict, params: PyTree, batch: PyTree) -> dict[str, Array]:
  """Returns label and prediction of each example, `[n, 2]`, and the mask."""
  prediction = predict(params, batch)['logits'].argmax(axis=-1)
  pairs = jnp.stack([batch['label'], prediction], axis=-1)
  return {'pairs': pairs, 'mask': batch['mask']}


def _csv(head: tuple[str, ...], lines: list[tuple]) -> str:
  out = io.StringIO()
  csv.writer(out, lineterminator='\n').writerows([head, *lines])
  return out.getvalue()
