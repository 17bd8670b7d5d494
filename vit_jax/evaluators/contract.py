"""Interface between the framework and its evaluators."""

import collections
import contextlib
import fnmatch
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh

from vit_jax.arrays import sharding
from vit_jax.config import direction, keys, schema
from vit_jax.config.keys import square
from vit_jax.data import progress
from vit_jax.data.contract import Preprocess, require
from vit_jax.data.pipeline import stream, workers
from vit_jax.errors import UserError, closest
from vit_jax.objectives.contract import Objective, metric_suffix

PyTree = Any
Batch = dict[str, jax.Array]
_IN_FLIGHT = 2  # batches dispatched after the one whose result is fetched


class Evaluator(Protocol):
  """Evaluator of weights, and the base class of evaluators.

  `vit_jax.evaluators.NAME` (or any module of your own) defines
  `Evaluator(setting, /, *, split, …)`, whose keyword-only parameters are keys
  of a section of `config.evals`. Every section also has the keys of
  `keys.evaluation`; they reach a constructor only if it has such a parameter.
  A subclass defines `run`.

  Attributes:
    higher_is_better: names of metrics whose higher values are better, which may
      contain wildcards ('top*'). Only metrics in this or the next list may
      select a checkpoint (`checkpoint.best`) or a setting of a sweep.
    lower_is_better: names of metrics whose lower values are better.
    own_classes: whether no head is needed: the command `evaluate` then passes
      data with any classes as the section `source`.
    measures: whether there are metrics; the command `evaluate` leaves other
      evaluators out.
  """

  higher_is_better: tuple[str, ...] = ()
  lower_is_better: tuple[str, ...] = ()
  own_classes: bool = False
  measures: bool = True

  def run(self, weights: PyTree) -> dict[str, float]:
    """Computes metrics by name.

    Args:
      weights: one of the values of `Objective.weights`.
    """
    ...

  def run_all(
    self, weights: dict[str, PyTree], step: int
  ) -> dict[str, dict[str, float]]:
    """Computes the metrics of all sets of weights during training.

    Args:
      weights: sets of weights by name, see `Trainer.weights`.
      step: number of updates completed.
    """
    return {name: self.run(each) for name, each in weights.items()}

  def tables(self) -> dict[str, str]:
    """Returns tables of the last `run`, as text by file name.

    `evaluate --tables=DIR` writes them.
    """
    return {}


class Setting(NamedTuple):
  """Properties of a run that its evaluators may use.

  Attributes:
    open_source: function that opens a split of the run's source; labels are
      matched with those of the training data by the names of the classes.
    transform: preprocessing of images.
    objective: objective, which computes results of the weights.
    mesh: mesh of the devices.
    batch_size: global batch size: that of the evaluator's section, or else that
      of training. It is rounded up to a multiple of the number of devices.
    reader: workers, prefetching and the policy for bad records.
    report: function that is called with bad records.
    check: function that is called for every batch on every process; it may
      raise to end the evaluation early.
    train_split: training split of the run, which an evaluator fits on if its
      section does not contain another split.
    leave_out: list of examples that the training leaves out, see
      `data.filters`; evaluators do not fit on them either.
    preprocess: config section of `transform`, from which an evaluator with
      images of another size builds its own.
    workdir: directory of the run; None outside of training, where evaluators
      write no files.
  """

  open_source: Callable[[str], stream.Source]
  transform: Preprocess
  objective: Objective
  mesh: Mesh
  batch_size: int
  reader: stream.Reader
  report: stream.Report = None
  check: Callable[[], None] = lambda: None
  train_split: str = 'train'
  leave_out: str | None = None
  preprocess: Mapping[str, Any] = {}
  workdir: epath.Path | None = None

  @property
  def num_classes(self) -> int:
    """Number of outputs of the head; 0 without one (logits are features)."""
    return self.objective.num_classes

  def predict(
    self, weights: PyTree, batch: Batch, want: tuple[str, ...] = ()
  ) -> dict[str, jax.Array]:
    """Computes results of a batch; see `Objective.predict`."""
    return self.objective.predict(weights, batch, want)

  def for_section(self, section: Any) -> 'Setting':
    """Returns the setting of the evaluator that a section describes.

    Args:
      section: config section or dict with the keys of `keys.evaluation`.

    Raises:
      UserError: a value of one of these keys is invalid.
    """
    schema.construct(keys.evaluation, section)  # checks the values
    own = self._replace(batch_size=section['batch_size'] or self.batch_size)
    size, preprocess = section.get('image_size'), section.get('preprocess')
    if not size and not preprocess:
      return own
    size = square(size) if size else self.objective.setting.image_size
    self.objective.setting.model_for(size)  # raises if it does not fit
    values = preprocess or self.preprocess
    return own._replace(transform=schema.build('preprocess', values, size))

  def open_other(self, section: Mapping[str, Any], split: str) -> stream.Source:
    """Opens a split of another source.

    Its labels are not matched with the classes of the run.

    Args:
      section: section like `config.source`.
      split: split of this source.

    Raises:
      UserError: the source or the split does not exist.
    """
    return schema.build('source', section, split)

  def compiled(
    self, function: Callable[[PyTree, Batch], PyTree]
  ) -> Callable[[PyTree, Batch], PyTree]:
    """Compiles a function for `sweep` by `jax.jit`, with replicated results."""
    return jax.jit(function, out_shardings=sharding.replicated(self.mesh))  # pyright: ignore[reportReturnType]

  def sweep(
    self,
    weights: PyTree,
    source: stream.Source,
    function: Callable[[PyTree, Batch], PyTree],
  ) -> Generator[PyTree]:
    """Applies a function to every example of a source once, in order.

    The last batch is padded, and `batch['mask']` is False for padding and for
    bad records that are skipped. Sums over the mask, added up over the batches,
    do not depend on the batch size or the number of devices or processes.

    Args:
      weights: first argument of the function.
      source: source of the examples.
      function: function of weights and a batch, from `compiled`.

    Yields:
      Result of the function for each batch, on the host.

    Raises:
      UserError: there is a bad record and the reader's policy is to stop, or
        there are too many bad records.
    """
    # A batch larger than the source would be padding that is computed too.
    needed = max(min(self.batch_size, len(source)), 1)
    size = -(-needed // self.mesh.size) * self.mesh.size
    pending: collections.deque[PyTree] = collections.deque()
    # The reader of a single process counts bad records. With several processes,
    # the rows that the global mask leaves out are counted, so that all
    # processes stop at the same batch.
    counted = jax.process_count() > 1 and self.reader.on_bad_record == 'skip'
    usable = self.compiled(lambda _, batch: batch['mask'].sum())
    bad, remaining = 0, len(source)

    def fetch() -> PyTree:
      """Fetches the oldest result, and counts the bad records of its batch."""
      nonlocal bad, remaining
      result, examples = jax.device_get(pending.popleft())
      rows = min(size, remaining)  # without padding
      remaining -= rows
      if examples is not None:
        bad += rows - int(examples)
        limit = self.reader.max_bad_share
        workers.check_share(bad, len(source), source.name, limit)
      return result

    with stream.eval_batches(
      source,
      self.transform,
      size,
      self.mesh,
      reader=self.reader,
      report=self.report,
    ) as batches:
      shown = batches
      if jax.process_index() == 0:
        count = -(-len(source) // size)
        shown = progress.shown(batches, count, f'evaluating {source.name}')
      for batch in shown:
        self.check()
        examples = usable(None, batch) if counted else None
        pending.append((function(weights, batch), examples))
        # Fetching a result blocks, so later batches are dispatched first.
        if len(pending) > _IN_FLIGHT:
          yield fetch()
    while pending:
      yield fetch()

  def examples(
    self,
    weights: PyTree,
    source: stream.Source,
    function: Callable[[PyTree, Batch], PyTree],
    finite: Mapping[str, str] = {},
  ) -> dict[str, np.ndarray]:
    """Returns the results of `sweep` for all usable examples, by name.

    Args:
      weights: first argument of the function.
      source: source of the examples.
      function: function of weights and a batch, from `compiled`, which returns
        arrays with a row for each example, among them `mask`.
      finite: names of the arrays whose values must be finite, and their content
        for the message, such as 'the features'.

    Raises:
      UserError: see `sweep`; no example could be used; or a value is not
        finite, which ends the sweep at its batch.
    """
    usable, count = [], 0
    # The readers end as soon as an error is raised.
    with contextlib.closing(self.sweep(weights, source, function)) as results:
      for result in results:
        mask = result.pop('mask')
        rows = {name: array[mask] for name, array in result.items()}
        for name, content in finite.items():
          if not np.isfinite(rows[name]).all():
            raise not_finite_error(content, source)
        usable.append(rows)
        count += mask.sum()
    if not count:
      raise no_example_error(source)
    return joined(usable)


def check_head(setting: Setting, who: str) -> None:
  """Checks that the model predicts classes, and that batches have labels.

  Args:
    setting: setting of the run.
    who: name of the evaluator, for messages.

  Raises:
    UserError: the model has no head, or batches lack images or labels.
  """
  require(setting.transform.spec, 'image', 'label', who=who)
  if not setting.num_classes:
    raise UserError(
      'the model has no head (num_classes is 0), so it does not predict '
      'classes: use another evaluator, or fine-tune the model first.'
    )


def check_results(setting: Setting, *names: str, who: str) -> None:
  """Checks that the objective has named results; see `Objective.results`.

  Args:
    setting: setting of the run.
    *names: names of results.
    who: name of the evaluator, for messages.

  Raises:
    UserError: a result is missing.
  """
  there = setting.objective.results
  if missing := [name for name in names if name not in there]:
    raise UserError(
      f'{who} needs {", ".join(missing)} of the objective, which has '
      f'{", ".join(there) or "none"}: use another model or objective.'
    )


def no_example_error(source: stream.Source) -> UserError:
  """Returns the error for a source whose examples are all bad records."""
  return UserError(
    f'{source.name}: none of its {len(source)} examples could be used: earlier '
    'messages list bad ones, the others have no labels. Use another split.'
  )


def not_finite_error(what: str, source: stream.Source) -> UserError:
  """Returns the error for features or logits that are not finite."""
  return UserError(
    f'{what} of {source.name} are not finite: use an earlier checkpoint, or '
    '--config.model.dtype=float32.'
  )


def joined(results: Iterable[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
  """Concatenates the arrays of all batches of a sweep, by name."""
  batches = list(results)
  return {
    key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]
  }


def total(results: Iterator[dict[str, np.ndarray]]) -> dict[str, Any]:
  """Adds up the results of all batches of a sweep, by name, in 64 bits."""
  sums: dict[str, Any] = collections.defaultdict(int)
  for result in results:
    for key, value in result.items():
      wide = np.float64 if value.dtype.kind == 'f' else np.int64
      sums[key] += value.astype(wide) if value.ndim else value.item()
  return sums


def averages(
  results: Iterator[dict[str, np.ndarray]], source: stream.Source
) -> dict[str, Any]:
  """Returns the means over all examples of a sweep, and `count`.

  Args:
    results: results of `Setting.sweep`: sums over the examples of a batch, and
      the number of examples as `count`.
    source: source of the examples, for messages.

  Raises:
    UserError: no example could be used.
  """
  sums = total(results)
  count = sums.pop('count', 0)
  if not count:
    raise no_example_error(source)
  means = {name: value / count for name, value in sums.items()}
  return means | {'count': count}


def check_best(config: schema.Config, weights: Iterable[str]) -> None:
  """Checks that the run computes the metric that selects its best checkpoint.

  The evaluator must specify which of its values are better, see `Evaluator`.

  Args:
    config: completed config.
    weights: names of the evaluated weights, see `Objective.weights`.

  Raises:
    UserError: no evaluator of the config computes the metric, or it is missing
      although `early_stop_patience` needs it.
  """
  best, patience = config.checkpoint.best, config.early_stop_patience
  if best is None and patience is None:
    return
  allowed = [
    f'{name}{metric_suffix(kind)}/{pattern}'
    for name, section in config.evals.items()
    for kind in weights
    for pattern in direction.patterns(section.name)
  ]
  if not any(fnmatch.fnmatchcase(str(best), pattern) for pattern in allowed):
    raise UserError(
      f'checkpoint.best is {best!r} and early_stop_patience is {patience}; '
      f'{closest(str(best), allowed)}. Set checkpoint.best to a metric that an '
      'evaluator of config.evals lists in higher_is_better or lower_is_better, '
      'or both to None.'
    )
