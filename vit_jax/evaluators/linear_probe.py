"""Logistic regression on frozen features, solved to convergence on the host."""

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import scipy.linalg
import scipy.optimize
import scipy.special
from jaxtyping import Float, Int

from vit_jax.errors import UserError, check_range
from vit_jax.evaluators.features import Labelled, OnFeatures

log = logging.getLogger('vit_jax')
PyTree = Any
_EPSILON = 1e-5  # added to the standard deviation of a feature
_BLOCK = 16_384  # number of examples that are converted to float64 at once
# Largest entry of the gradient after convergence, in the coordinates of L-BFGS.
_GRADIENT = 1e-8
_ITERATIONS = 10_000
_STEPS = 50  # iterations between two changes of coordinates, see `fit`


class Classifier(NamedTuple):
  """A linear classifier with scores ((x - mean) / scale)·W + b.

  Attributes:
    mean: mean that is subtracted from features.
    scale: divisor of features.
    kernel: W.
    bias: b.
    classes: label of each score, ascending.
  """

  mean: Float[np.ndarray, ' d']
  scale: Float[np.ndarray, ' d']
  kernel: Float[np.ndarray, 'd k']
  bias: Float[np.ndarray, ' k']
  classes: Int[np.ndarray, ' k']

  def inputs(self, features: Float[np.ndarray, 'n d']) -> np.ndarray:
    """Returns the normalized features, float64."""
    return (features.astype(np.float64) - self.mean) / self.scale

  def accuracy(self, data: Labelled) -> float:
    """Returns the fraction of examples whose label has the highest score.

    If scores are equal, the class with the lowest number is predicted. A class
    without training examples is never predicted.
    """
    correct = 0
    for rows in _blocks(len(data.labels)):
      scores = self.inputs(data.features[rows]) @ self.kernel + self.bias
      predicted = self.classes[scores.argmax(axis=1)]
      correct += int((predicted == data.labels[rows]).sum())
    return correct / len(data.labels)


def untrained(data: Labelled) -> Classifier:
  """Returns a classifier with zero weights for the classes of the examples."""
  classes, features = np.unique(data.labels), data.features
  mean = features.mean(axis=0, dtype=np.float64)
  squares = np.zeros(len(mean))
  for rows in _blocks(len(features)):
    squares += ((features[rows].astype(np.float64) - mean) ** 2).sum(axis=0)
  scale = np.sqrt(squares / len(features)) + _EPSILON
  kernel = np.zeros((len(mean), len(classes)))
  return Classifier(mean, scale, kernel, np.zeros(len(classes)), classes)


def fit(data: Labelled, l2: float) -> Classifier:
  """Minimizes mean cross-entropy + l2/2 · |W|² by L-BFGS, in float64.

  Features are normalized by mean and standard deviation, and the bias is not
  regularized. With n examples, scikit-learn's C is 1 / (n·l2). Features of
  networks are correlated, so that L-BFGS would need thousands of iterations for
  a small l2. Therefore, the coordinates are changed every 50 iterations so that
  the curvature is about 1 in all directions.

  Args:
    data: examples; classes without examples are never predicted.
    l2: regularization, above 0, so that the solution is unique.
  """
  classifier, gradient, steps = untrained(data), np.inf, 0
  while gradient > _GRADIENT and steps < _ITERATIONS:
    classifier, gradient, new_steps = _descend(classifier, data, l2)
    steps += new_steps
    if new_steps < _STEPS:  # converged, as far as rounding allows
      break
  if gradient > 10 * _GRADIENT:
    log.warning(
      'logistic regression with l2=%g did not converge: after %d iterations '
      'its gradient has an entry of %.1e; use a larger l2',
      l2,
      steps,
      gradient,
    )
  return classifier


def _descend(
  start: Classifier, data: Labelled, l2: float
) -> tuple[Classifier, float, int]:
  """Runs L-BFGS for up to `_STEPS` iterations, in new coordinates.

  The coordinates are Lᵀ·W, where L·Lᵀ is the curvature at the start and the
  last row of W is the bias.

  Returns:
    Classifier, largest absolute entry of the gradient in these coordinates, and
    number of iterations.
  """
  d, k = start.kernel.shape
  labels = np.searchsorted(start.classes, data.labels)
  root = _curvature_root(start, data.features, l2)

  def to_weights(flat: np.ndarray) -> np.ndarray:
    """Returns the kernel and, as the last row, the bias: `[d + 1, k]`."""
    return scipy.linalg.solve_triangular(root.T, flat.reshape(d + 1, k))

  def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
    kernel, bias = np.split(to_weights(flat), [d])
    value, gradient = 0.0, np.zeros((d + 1, k))
    for rows in _blocks(len(labels)):
      x = start.inputs(data.features[rows])
      part, error = _cross_entropy(x @ kernel + bias, labels[rows])
      value += part
      gradient[:d] += x.T @ error
      gradient[d] += error.sum(axis=0)
    gradient /= len(labels)
    gradient[:d] += l2 * kernel
    value = value / len(labels) + l2 / 2 * (kernel**2).sum()
    scaled = scipy.linalg.solve_triangular(root, gradient, lower=True)
    return value, scaled.ravel()

  weights = np.concatenate([start.kernel, start.bias[None]])  # [d + 1, k]
  result = scipy.optimize.minimize(
    loss,
    (root.T @ weights).ravel(),
    jac=True,
    method='L-BFGS-B',
    options=dict(maxiter=_STEPS, gtol=_GRADIENT, ftol=0),
  )
  kernel, (bias,) = np.split(to_weights(result.x), [d])
  largest = float(np.abs(result.jac).max())
  return start._replace(kernel=kernel, bias=bias), largest, result.nit


def _curvature_root(
  start: Classifier, features: Float[np.ndarray, 'n d'], l2: float
) -> Float[np.ndarray, 'e e']:
  """Returns the Cholesky factor L of the curvature of the loss, L·Lᵀ.

  The curvature is that of the weights of one class, averaged over the classes:
  E[(1 - Σp²) · x·xᵀ] / k + l2, where p are the predicted probabilities, and the
  last entry of x is 1, for the bias.
  """
  d, k = start.kernel.shape
  total = np.zeros((d + 1, d + 1))
  for rows in _blocks(len(features)):
    x = start.inputs(features[rows])
    p = scipy.special.softmax(x @ start.kernel + start.bias, axis=1)
    x = np.pad(x, [(0, 0), (0, 1)], constant_values=1)
    total += x.T @ (x * (1 - (p**2).sum(axis=1, keepdims=True)))
  total /= len(features) * k
  # Keeps the matrix positive definite in spite of rounding.
  rounding = 1e-12 * np.trace(total)
  total[range(d + 1), range(d + 1)] += l2 + rounding
  return scipy.linalg.cholesky(total, lower=True)


def _cross_entropy(
  logits: Float[np.ndarray, 'n k'], labels: Int[np.ndarray, ' n']
) -> tuple[float, Float[np.ndarray, 'n k']]:
  """Returns the summed loss and its gradient with respect to the logits."""
  rows = np.arange(len(labels))
  total = np.asarray(scipy.special.logsumexp(logits, axis=1))
  value = float((total - logits[rows, labels]).sum())
  error = np.exp(logits - total[:, None])
  error[rows, labels] -= 1
  return value, error


def _blocks(n: int) -> Iterator[slice]:
  """Returns slices of up to `_BLOCK` rows, which cover n rows."""
  return (slice(start, start + _BLOCK) for start in range(0, n, _BLOCK))


@dataclasses.dataclass(eq=False, kw_only=True)
class Evaluator(OnFeatures):
  """Accuracy of a linear classifier trained on features of the train split.

  Features are computed once, from images preprocessed for evaluation. The
  protocols of DINO and MAE, which train on random crops, are those of the
  objective `linear_probe`. If `l2` has several values, a classifier for each of
  them is trained on one part of the train split and evaluated on the held-out
  part; the final classifier is trained on the whole split with the best value
  (the first of equal ones). With a single value, nothing is held out.

  The fit computes in float64 on the host. Its time must be below
  `recovery.watchdog_eval_s`.

  Attributes:
    l2: regularization, above 0; see `fit`. The evaluated split is not used to
      choose among several values.
    held_out: fraction of the train split that is used to choose among several
      values.
    seed: seed of the held-out part.

  Raises:
    UserError: the data does not exist, or a value is out of range.
  """

  higher_is_better = ('accuracy', 'train_accuracy')
  who = 'a linear probe'
  l2: tuple[float, ...] = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
  held_out: float = 0.1
  seed: int = 0

  def __post_init__(self):
    check_range('held_out', self.held_out, above=0, below=1)
    check_range('seed', self.seed, at_least=0)
    for each in self.l2:
      check_range('l2', each, above=0)
    check_range('the number of values of l2', len(self.l2), at_least=1)
    super().__post_init__()

  def run(self, weights: PyTree) -> dict[str, float]:
    """Trains the classifier and evaluates it.

    Returns:
      'accuracy' and 'train_accuracy' in [0, 1]; 'l2', the chosen value.

    Raises:
      UserError: there are too few examples to hold out some, or there is a bad
        record and the reader's policy is to stop.
    """
    train, test = self.features(weights)
    l2 = self.l2[0] if len(self.l2) == 1 else self._choose(train)
    classifier = self._fit(train, l2)
    return {
      'accuracy': classifier.accuracy(test),
      'train_accuracy': classifier.accuracy(train),
      'l2': l2,
    }

  def _choose(self, train: Labelled) -> float:
    """Returns the regularization with the best held-out accuracy.

    Raises:
      UserError: there are too few examples to hold out some.
    """
    n = len(train.labels)
    count = round(n * self.held_out)
    if not 0 < count < n:
      raise UserError(
        f'{self._train.name} has {n} usable examples, but held_out is '
        f'{self.held_out}: use more examples, or a single l2.'
      )
    order = np.random.default_rng(self.seed).permutation(n)
    kept, held_out = np.sort(order[count:]), np.sort(order[:count])
    part = Labelled(train.features[kept], train.labels[kept])
    test = Labelled(train.features[held_out], train.labels[held_out])
    scores = [self._fit(part, each).accuracy(test) for each in self.l2]
    return self.l2[int(np.argmax(scores))]

  def _fit(self, data: Labelled, l2: float) -> Classifier:
    """Fits one classifier, unless the evaluation should end early."""
    self.setting.check()
    return fit(data, l2)
