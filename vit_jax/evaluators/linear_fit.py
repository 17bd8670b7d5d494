"""Multinomial logistic regression, solved to convergence on the host."""

import logging
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import scipy.optimize
import scipy.special
from jaxtyping import Float, Int

from vit_jax.evaluators.features import Labelled

log = logging.getLogger('vit_jax')
_EPSILON = 1e-5  # added to the standard deviation of a feature
_BLOCK = 16_384  # examples that are computed on at once, in float64
_GRADIENT = 1e-8  # largest entry at the end; of the mean loss, in nats
_ITERATIONS = 10_000


class Classifier(NamedTuple):
  """Class scores that are linear in features: ((x - mean) / scale)·W + b."""

  mean: Float[np.ndarray, ' d']
  scale: Float[np.ndarray, ' d']
  kernel: Float[np.ndarray, 'd k']
  bias: Float[np.ndarray, ' k']
  classes: Int[np.ndarray, ' k']

  def inputs(self, features: Float[np.ndarray, 'n d']) -> np.ndarray:
    """Normalised features, float64."""
    return (features.astype(np.float64) - self.mean) / self.scale

  def accuracy(self, data: Labelled) -> float:
    """The share in [0, 1] of examples that have the highest score.

    Of equal scores the class with the lowest number has it; a class that the
    classifier has never met is never predicted.
    """
    right = 0
    for rows in _blocks(len(data.labels)):
      scores = self.inputs(data.features[rows]) @ self.kernel + self.bias
      found = self.classes[scores.argmax(axis=1)]
      right += int((found == data.labels[rows]).sum())
    return right / len(data.labels)


def standardisation(
  features: Float[np.ndarray, 'n d'],
) -> tuple[Float[np.ndarray, ' d'], Float[np.ndarray, ' d']]:
  """Mean, and standard deviation with a little added, of each feature."""
  mean = features.mean(axis=0, dtype=np.float64)
  squares = np.zeros(features.shape[1])
  for rows in _blocks(len(features)):
    squares += ((features[rows].astype(np.float64) - mean) ** 2).sum(axis=0)
  return mean, np.sqrt(squares / len(features)) + _EPSILON


def untrained(data: Labelled, standardise: bool) -> Classifier:
  """Zeros for the classes that occur in some examples.

  Args:
    data: the examples.
    standardise: by their mean and deviation; else features stay as they are.
  """
  classes, (n, d) = np.unique(data.labels), data.features.shape
  mean, scale = np.zeros(d), np.ones(d)
  if standardise and n:
    mean, scale = standardisation(data.features)
  k = len(classes)
  return Classifier(mean, scale, np.zeros((d, k)), np.zeros(k), classes)


def fit(data: Labelled, l2: float, standardise: bool = True) -> Classifier:
  """Minimises mean cross-entropy + l2/2 · |W|² by L-BFGS, in float64.

  The bias is not regularised. With n examples it is what others call
  C = 1 / (n · l2).

  Args:
    data: examples; of classes that do not occur among them nothing is learnt.
    l2: above 0, so that there is one solution.
    standardise: features by their mean and deviation.
  """
  start = untrained(data, standardise)
  d, k = start.kernel.shape
  labels = np.searchsorted(start.classes, data.labels)

  def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
    kernel, bias = flat[: d * k].reshape(d, k), flat[d * k :]
    value, at_kernel, at_bias = 0.0, np.zeros((d, k)), np.zeros(k)
    for rows in _blocks(len(labels)):
      x = start.inputs(data.features[rows])
      part, error = _cross_entropy(x @ kernel + bias, labels[rows])
      value += part
      at_kernel += x.T @ error
      at_bias += error.sum(axis=0)
    n = len(labels)
    at_kernel = at_kernel / n + l2 * kernel
    value = value / n + l2 / 2 * (kernel**2).sum()
    return value, np.concatenate([at_kernel.ravel(), at_bias / n])

  found = scipy.optimize.minimize(
    *(loss, np.zeros(d * k + k)),
    jac=True,
    method='L-BFGS-B',
    options=dict(
      maxiter=_ITERATIONS, maxfun=2 * _ITERATIONS, gtol=_GRADIENT, ftol=0
    ),
  )
  left = np.abs(found.jac).max()
  if left > 10 * _GRADIENT:
    log.warning(
      'logistic regression with l2=%g did not converge: after %d iterations '
      'its gradient has an entry of %.1e (%s); take a larger l2',
      *(l2, found.nit, left, found.message),
    )
  kernel, bias = found.x[: d * k].reshape(d, k), found.x[d * k :]
  return start._replace(kernel=kernel, bias=bias)


def _cross_entropy(
  logits: Float[np.ndarray, 'n k'], labels: Int[np.ndarray, ' n']
) -> tuple[float, Float[np.ndarray, 'n k']]:
  """The sum of the losses, and its derivative."""
  rows = np.arange(len(labels))
  total = np.asarray(scipy.special.logsumexp(logits, axis=1))
  value = float((total - logits[rows, labels]).sum())
  error = np.exp(logits - total[:, None])
  error[rows, labels] -= 1
  return value, error


def _blocks(n: int) -> Iterator[slice]:
  return (slice(start, start + _BLOCK) for start in range(0, n, _BLOCK))
