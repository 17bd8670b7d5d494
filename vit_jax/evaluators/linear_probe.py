"""Logistic regression on frozen features."""

from typing import Any

import numpy as np

from vit_jax.errors import UserError, check_range
from vit_jax.evaluators import contract, linear_fit
from vit_jax.evaluators.features import (
  Extractor,
  Labelled,
  OtherSource,
  open_pair,
)

PyTree = Any


class Evaluator:
  """Accuracy of a linear classifier trained on features of the train split.

  Features are computed once, from images preprocessed for evaluation. The
  protocols of DINO and MAE, which train on random crops, are those of the
  objective `linear_probe`. If `l2` has several values, a classifier for each of
  them is trained on one part of the train split and evaluated on the held-out
  part; the final classifier is trained on the whole split with the best value
  (the first of equal ones). With a single value, nothing is held out.

  The fit computes in float64 on the host. Its time must be below
  `recovery.watchdog_eval_s`.
  """

  higher_is_better = ('accuracy',)  # metrics for `checkpoint.best`

  own_classes = True

  def __init__(
    self,
    setting: contract.Setting,
    /,
    *,
    split: str,
    train_split: str | None = None,
    source: OtherSource = None,
    l2: tuple[float, ...] = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5),
    held_out: float = 0.1,
    seed: int = 0,
  ):
    """Opens both splits.

    Args:
      setting: setting of the run.
      split: split to evaluate; it is not used to choose among several values of
        `l2`.
      train_split: split to train on; by default the run's own.
      source: section of another source; by default the run's own.
      l2: regularization, above 0; see `linear_fit.fit`.
      held_out: fraction of the train split that is used to choose among several
        values.
      seed: seed of the held-out part.

    Raises:
      UserError: the data does not exist, or a value is out of range.
    """
    check_range('held_out', held_out, above=0, below=1)
    check_range('seed', seed, at_least=0)
    for each in l2:
      check_range('l2', each, above=0)
    if not l2:
      raise UserError('l2 is empty: give at least one value.')
    self._l2, self._held_out, self._seed = l2, held_out, seed
    self._check = setting.check
    self._train, self._test = open_pair(setting, split, train_split, source)
    self._extract = Extractor(setting, 'a linear probe').run

  def run(self, weights: PyTree) -> dict[str, float]:
    """Trains the classifier and evaluates it.

    Returns:
      'accuracy' and 'train_accuracy' in [0, 1]; 'l2', the chosen value.

    Raises:
      UserError: there are too few examples to hold out some, or there is a bad
        record and the reader's policy is to stop.
    """
    train = self._extract(weights, self._train)
    test = self._extract(weights, self._test)
    l2 = self._l2[0] if len(self._l2) == 1 else self._choose(train)
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
    count = round(n * self._held_out)
    if not 0 < count < n:
      raise UserError(
        f'{self._train.name} has {n} usable examples, but held_out is '
        f'{self._held_out}: use more examples, or a single l2.'
      )
    order = np.random.default_rng(self._seed).permutation(n)
    kept, held_out = np.sort(order[count:]), np.sort(order[:count])
    part = Labelled(train.features[kept], train.labels[kept])
    test = Labelled(train.features[held_out], train.labels[held_out])
    scores = [self._fit(part, each).accuracy(test) for each in self._l2]
    return self._l2[int(np.argmax(scores))]

  def _fit(self, data: Labelled, l2: float) -> linear_fit.Classifier:
    self._check()
    return linear_fit.fit(data, l2)
