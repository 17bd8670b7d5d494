"""Few-shot accuracy: ridge regression on frozen features.

Reference: Dosovitskiy et al., arXiv 2010.11929, section 4.1.
"""

import dataclasses
from typing import Any

import numpy as np
import scipy.linalg
from jaxtyping import Float, Int

from vit_jax.errors import UserError, check_range
from vit_jax.evaluators.features import Labelled, OnFeatures

PyTree = Any
_EPSILON = 1e-5  # added to the standard deviation of a feature
_CONSTANT = 100.0  # value of the feature that is the same for all examples


@dataclasses.dataclass(eq=False, kw_only=True)
class Evaluator(OnFeatures):
  """Accuracy of regularized least squares on few examples of each class.

  Targets are -1 or 1 for each class (the paper's section 4.1, "Metrics").
  Details that the paper does not specify are those of big_vision: features are
  standardized with the mean and standard deviation of the few examples, a
  constant feature of 100 serves as the bias, the regularization is 2^10, and
  the accuracy is the mean over random draws of the examples.

  Attributes:
    shots: numbers of examples per class.
    num_draws: number of random choices over which the accuracies are averaged.
    l2: regularization, above 0, see `fit`.

  Raises:
    UserError: the data does not exist, or a value is out of range.
  """

  higher_is_better = ('*shot',)
  who = 'few-shot evaluation'
  shots: tuple[int, ...] = (1, 5, 10, 25)
  num_draws: int = 3
  l2: float = 1024.0

  def __post_init__(self):
    check_range('l2', self.l2, above=0)
    check_range('num_draws', self.num_draws, at_least=1)
    check_range('the number of shots', len(self.shots), at_least=1)
    for each in self.shots:
      check_range('shots', each, at_least=1)
    super().__post_init__()

  def run(self, weights: PyTree) -> dict[str, float]:
    """Computes the accuracy for each number of shots.

    Returns:
      '5shot' and so on: mean accuracy over the draws, in [0, 1]; '5shot_std'
      and so on: standard deviation over the draws, if there are several.

    Raises:
      UserError: a class has fewer examples than shots, or there is a bad record
        and the reader's policy is to stop.
    """
    train, test = self.features(weights)
    self._check_enough(train)
    metrics = {}
    for shots in self.shots:
      accuracies = []
      for number in range(self.num_draws):
        rows = draw(train.labels, shots, number)
        few = Labelled(train.features[rows], train.labels[rows])
        scores = fit(few, self._num_classes, self.l2)
        predicted = scores(test.features).argmax(axis=1)
        accuracies.append((predicted == test.labels).mean())
      metrics[f'{shots}shot'] = float(np.mean(accuracies))
      if self.num_draws > 1:
        metrics[f'{shots}shot_std'] = float(np.std(accuracies, ddof=1))
    return metrics

  def _check_enough(self, train: Labelled) -> None:
    """Checks that each class has as many examples as the largest number."""
    counts = np.bincount(train.labels, minlength=self._num_classes)
    if counts.min() < max(self.shots):
      name = self._train.class_names[counts.argmin()]
      raise UserError(
        f'{self._train.name} has {counts.min()} example(s) of {name!r}: lower '
        f'shots={max(self.shots)}, or use a larger train_split.'
      )


def draw(
  labels: Int[np.ndarray, ' n'], shots: int, number: int
) -> Int[np.ndarray, ' few']:
  """Draws `shots` examples of each class.

  For the same `number`, a draw of more shots contains the draw of fewer shots.

  Args:
    labels: labels of all examples.
    shots: number of examples per class.
    number: number of the draw, used as the seed.

  Returns:
    Indices of the drawn examples, ascending.
  """
  # Examples in random order, sorted by class; the first `shots` of each class
  # are drawn.
  order = np.random.default_rng(number).permutation(len(labels))
  by_class = order[np.argsort(labels[order], kind='stable')]
  ordered = labels[by_class]
  start_of_class = np.searchsorted(ordered, ordered)
  number_in_class = np.arange(len(labels)) - start_of_class
  return np.sort(by_class[number_in_class < shots])


def fit(few: Labelled, num_classes: int, l2: float) -> Any:
  """Fits regularized least squares, exactly, in float64.

  Minimizes |X·W - T|² + l2·|W|², where X are the standardized features and the
  constant feature, and T is 1 for the class of an example and -1 for all
  others.

  Args:
    few: examples.
    num_classes: number of outputs.
    l2: regularization.

  Returns:
    Function from features `[n, d]` to scores of classes `[n, num_classes]`.
  """
  features = few.features.astype(np.float64)
  mean, std = features.mean(0), features.std(0) + _EPSILON

  def inputs(features: Float[np.ndarray, 'n d']) -> Float[np.ndarray, 'n D']:
    scaled = (features - mean) / std
    return np.pad(scaled, ((0, 0), (0, 1)), constant_values=_CONSTANT)

  x = inputs(features)  # [n, D], D = d + 1
  targets = np.where(few.labels[:, None] == np.arange(num_classes), 1.0, -1.0)
  n, d = x.shape
  if n >= d:
    gram = x.T @ x + l2 * np.eye(d)
    kernel = scipy.linalg.solve(gram, x.T @ targets, assume_a='pos')
  else:
    # (XᵀX + l2·1)⁻¹ Xᵀ = Xᵀ (XXᵀ + l2·1)⁻¹: the same solution, from a smaller
    # system of equations.
    gram = x @ x.T + l2 * np.eye(n)
    kernel = x.T @ scipy.linalg.solve(gram, targets, assume_a='pos')

  def scores(features: Float[np.ndarray, 'n d']) -> Float[np.ndarray, 'n k']:
    return inputs(features) @ kernel

  return scores
