"""k nearest neighbours of frozen features, weighted as in DINO."""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from vit_jax.errors import UserError, check_range
from vit_jax.evaluators.features import Labelled, OnFeatures

PyTree = Any
_BLOCK = 256  # evaluated examples per comparison with all training examples


@dataclasses.dataclass(eq=False, kw_only=True)
class Evaluator(OnFeatures):
  """Accuracy of a weighted vote of the nearest training examples.

  Features are scaled to length 1. Each of the k neighbours with the highest
  cosine similarity s votes for its class with the weight exp(s / temperature)
  (arXiv 2104.14294, section 4.1, and its code), relative to that of the
  nearest one, so that no vote is infinite.

  Attributes:
    ks: numbers of neighbours.
    temperature: temperature of the votes, above 0.

  Raises:
    UserError: the data does not exist, a value is out of range, or there are
      fewer training examples than neighbours.
  """

  higher_is_better = ('*nn',)
  who = 'nearest neighbours'
  ks: tuple[int, ...] = (10, 20, 100, 200)
  temperature: float = 0.07

  def __post_init__(self):
    check_range('temperature', self.temperature, above=0)
    check_range('the number of ks', len(self.ks), at_least=1)
    for each in self.ks:
      check_range('ks', each, at_least=1)
    super().__post_init__()
    self._check_enough(len(self._train))

  def run(self, weights: PyTree) -> dict[str, float]:
    """Computes the accuracy for each number of neighbours.

    Returns:
      '10nn' and so on, in [0, 1].

    Raises:
      UserError: there are fewer training examples than neighbours, or there is
        a bad record and the reader's policy is to stop.
    """
    train, test = self.features(weights)
    self._check_enough(len(train.labels))
    correct = dict.fromkeys(self.ks, 0)
    for start in range(0, len(test.labels), _BLOCK):
      block = Labelled(*(part[start : start + _BLOCK] for part in test))
      labels, votes = nearest(
        train, block.features, max(self.ks), self.temperature
      )
      for k in self.ks:
        predicted = elected(labels[:, :k], votes[:, :k], self._num_classes)
        correct[k] += int((predicted == block.labels).sum())
    return {f'{k}nn': n / len(test.labels) for k, n in correct.items()}

  def _check_enough(self, examples: int) -> None:
    """Checks that there are as many training examples as neighbours."""
    if max(self.ks) > examples:
      raise UserError(
        f'{self._train.name} has {examples} usable examples, but ks contains '
        f'{max(self.ks)}: lower ks (--config.evals.NAME.ks={examples}).'
      )


def nearest(
  train: Labelled,
  features: Float[np.ndarray, 'm d'],
  k: int,
  temperature: float,
) -> tuple[Int[np.ndarray, 'm k'], Float[np.ndarray, 'm k']]:
  """Finds the k nearest training examples of each example.

  Args:
    train: training examples.
    features: features of the examples.
    k: number of neighbours.
    temperature: temperature of the votes, above 0.

  Returns:
    Labels and votes of the neighbours, the nearest first, whose vote is 1.
  """
  similarity = _unit(features) @ _unit(train.features).T  # [m, train]
  # The k nearest in any order, and then sorted.
  rows = np.argpartition(-similarity, k - 1, axis=1)[:, :k]
  near = np.take_along_axis(similarity, rows, axis=1)
  order = np.argsort(-near, axis=1, kind='stable')
  rows = np.take_along_axis(rows, order, axis=1)
  near = np.take_along_axis(near, order, axis=1)
  return train.labels[rows], np.exp(
    (near - near[:, :1]) / np.float64(temperature)
  )


def elected(
  labels: Int[np.ndarray, 'n k'],
  votes: Float[np.ndarray, 'n k'],
  num_classes: int,
) -> Int[np.ndarray, ' n']:
  """Returns the class with the highest sum of votes for each example.

  Args:
    labels: labels of the neighbours.
    votes: votes of the neighbours.
    num_classes: number of classes.
  """
  totals = np.zeros((len(labels), num_classes))
  np.add.at(totals, (np.arange(len(labels))[:, None], labels), votes)
  return totals.argmax(axis=1)


def _unit(features: Float[np.ndarray, 'n d']) -> Float[np.ndarray, 'n d']:
  """Scales features to length 1; zeros stay zeros."""
  lengths = np.linalg.norm(features, axis=1, keepdims=True)
  return features / np.maximum(lengths, 1e-12)
