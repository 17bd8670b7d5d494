"""Linear classifiers of frozen features: logistic, or as in DINO or MAE."""

from typing import Any

import numpy as np

from vit_jax.config import plugins
from vit_jax.errors import UserError, check_choice, check_range
from vit_jax.evaluators import contract, linear_descent, linear_fit
from vit_jax.evaluators.features import (
  Extractor,
  Labelled,
  OtherSource,
  open_pair,
)
from vit_jax.evaluators.linear_descent import Recipe

PyTree = Any
# Defaults of each solver, except for learning rate and seed: arXiv 2104.14294
# (sgd), 2111.06377 (lars).
_RECIPES = {
  'lbfgs': Recipe('lbfgs', 'standard', lr=0, epochs=0, batch_size=0, seed=0),
  'sgd': Recipe('sgd', 'none', lr=0, epochs=100, batch_size=1024, seed=0),
  'lars': Recipe('lars', 'batch', lr=0, epochs=90, batch_size=16_384, seed=0),
}
_RATES = {'sgd': (0.001,), 'lars': (0.1,)}
_NORMS = ('standard', 'batch', 'none')


@plugins.operational('every', 'batch_size')
class Evaluator:
  """Accuracy of a linear classifier trained on features of the train split.

  Features are computed once, from images preprocessed for evaluation. DINO and
  MAE train on random crops, so the results are not exactly comparable with
  theirs. If `l2` (or `lr`) has several values, a classifier for each of them is
  trained on one part of the train split and evaluated on the held-out part; the
  final classifier is trained on the whole split with the best value (the first
  of equal ones). With a single value, nothing is held out.

  `lbfgs` computes in float64 on the host. For data as large as ImageNet, use
  `sgd` or `lars`; all features must fit into the memory of each device. The
  time of one fit by `lbfgs`, or of one epoch, must be below
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
    solver: str = 'lbfgs',
    l2: tuple[float, ...] = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5),
    lr: tuple[float, ...] | None = None,
    epochs: int | None = None,
    probe_batch_size: int | None = None,
    norm: str | None = None,
    held_out: float = 0.1,
    seed: int = 0,
    every: str = '1 epochs',
    batch_size: int | None = None,
  ):
    """Opens both splits.

    Args:
      setting: setting of the run.
      split: split to evaluate; it is not used to choose among several values of
        `l2` or `lr`.
      train_split: split to train on; by default the run's own.
      source: section of another source; by default the run's own.
      solver: 'lbfgs', 'sgd' (as in DINO, momentum .9) or 'lars' (as in MAE);
        the last two have no weight decay.
      l2: regularization of 'lbfgs', above 0; see `linear_fit.fit`.
      lr: learning rate of 'sgd' and 'lars' for a batch of 256; by default .001
        and .1.
      epochs: epochs of 'sgd' and 'lars'; by default 100 and 90.
      probe_batch_size: batch size of 'sgd' and 'lars'; by default 1,024 and
        16,384.
      norm: normalization of the features: 'standard' (mean 0 and standard
        deviation 1 over the train split), 'batch' (batch norm without scale and
        shift; not with 'lbfgs') or 'none'. The default is 'standard' for
        'lbfgs', 'none' for 'sgd' and 'batch' for 'lars'.
      held_out: fraction of the train split that is used to choose among several
        values.
      seed: seed of the held-out part, the initial weights and the order.
      every: duration between evaluations, used by the training loop.
      batch_size: batch size of the features; by default that of training.

    Raises:
      UserError: the data does not exist, or a value is out of range.
    """
    contract.check_common(every, batch_size)
    check_range('held_out', held_out, above=0, below=1)
    check_range('seed', seed, at_least=0)
    self._recipe = _recipe(solver, norm, epochs, probe_batch_size, seed)
    self._key, grid = 'l2', l2
    if solver != 'lbfgs':
      self._key, grid = 'lr', _RATES[solver] if lr is None else lr
    for each in grid:
      check_range(self._key, each, above=0)
    if not grid:
      raise UserError(f'{self._key} is empty: give at least one value.')
    self._grid, self._held_out, self._setting = grid, held_out, setting
    self._train, self._test = open_pair(setting, split, train_split, source)
    self._extract = Extractor(setting, batch_size, 'a linear probe').run

  def run(self, weights: PyTree) -> dict[str, float]:
    """Trains the classifier and evaluates it.

    Returns:
      'accuracy' and 'train_accuracy' in [0, 1]; 'l2' or 'lr', the chosen value.

    Raises:
      UserError: there are too few examples to hold out some, or there is a bad
        record and the reader's policy is to stop.
    """
    train = self._extract(weights, self._train)
    test = self._extract(weights, self._test)
    value = self._grid[0]
    if len(self._grid) > 1:
      value = self._choose(train)
    classifier = self._fit(train, value)
    return {
      'accuracy': classifier.accuracy(test),
      'train_accuracy': classifier.accuracy(train),
      self._key: value,
    }

  def _choose(self, train: Labelled) -> float:
    """Returns the value of the grid with the best held-out accuracy.

    Raises:
      UserError: there are too few examples to hold out some.
    """
    n = len(train.labels)
    count = round(n * self._held_out)
    if not 0 < count < n:
      raise UserError(
        f'{self._train.name} has {n} usable examples, but held_out is '
        f'{self._held_out}: use more examples, or a single {self._key}.'
      )
    order = np.random.default_rng(self._recipe.seed).permutation(n)
    kept, held_out = np.sort(order[count:]), np.sort(order[:count])
    part = Labelled(train.features[kept], train.labels[kept])
    test = Labelled(train.features[held_out], train.labels[held_out])
    scores = [self._fit(part, each).accuracy(test) for each in self._grid]
    return self._grid[int(np.argmax(scores))]

  def _fit(self, data: Labelled, value: float) -> linear_fit.Classifier:
    """Trains a classifier with a value of l2 or lr."""
    recipe, check = self._recipe, self._setting.check
    if recipe.solver == 'lbfgs':
      check()
      return linear_fit.fit(data, value, recipe.norm == 'standard')
    recipe = recipe._replace(lr=value)
    return linear_descent.fit(data, recipe, self._setting.mesh, check)


def _recipe(
  solver: str,
  norm: str | None,
  epochs: int | None,
  batch_size: int | None,
  seed: int,
) -> Recipe:
  """Returns the recipe without learning rate; None selects a solver's default.

  Raises:
    UserError: a value is out of range.
  """
  check_choice('solver', solver, _RECIPES)
  check_range('epochs', epochs, at_least=1)
  check_range('probe_batch_size', batch_size, at_least=1)
  changes = dict(norm=norm, epochs=epochs, batch_size=batch_size)
  changes = {key: value for key, value in changes.items() if value is not None}
  recipe = _RECIPES[solver]._replace(seed=seed, **changes)
  allowed = [each for each in _NORMS if each != 'batch' or solver != 'lbfgs']
  if recipe.norm not in allowed:
    raise UserError(
      f'norm is {norm!r}; allowed with {solver}: {", ".join(allowed)}.'
    )
  return recipe
