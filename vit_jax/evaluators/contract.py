"""Interface between the framework and its evaluators."""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax.arrays import sharding
from vit_jax.config import durations, sections
from vit_jax.config.completion import MAX_BATCH_SIZE
from vit_jax.data import progress
from vit_jax.data.pipeline import stream
from vit_jax.errors import UserError, check_range
from vit_jax.evaluators.bad_record_count import Share

PyTree = Any
Batch = dict[str, jax.Array]
_IN_FLIGHT = 2  # batches dispatched ahead of the one waited for


class Evaluator(Protocol):
  """Evaluates weights.

  `vit_jax.evaluators.NAME` (or any module of your own) defines
  `Evaluator(setting, /, *, split, every, …)`, whose keyword-only parameters are
  the keys of a section of `config.evals`; the training loop uses `every`.
  `higher_is_better` lists the metrics that `checkpoint.best` may name; an
  evaluator without it accepts any of its metrics. An evaluator with
  `own_classes = True` needs no head: the command `evaluate` passes it the data,
  whatever its classes, as its own section `source`. An evaluator may have a
  method `tables()`, which returns tables of the last `run` as text by file
  name; `evaluate --tables=DIR` writes them.
  """

  def run(self, weights: PyTree) -> dict[str, float]:
    """Computes metrics by name.

    Args:
      weights: one of those that `Objective.weights` returns.
    """
    ...


class Setting(NamedTuple):
  """Properties of a run that its evaluators may use.

  Attributes:
    open_source: (split) → that split of the run's source; its labels are
      matched with those of the training data by the names of the classes.
    transform: preprocessing of images.
    predict: (params, batch) → {'features', 'logits'}, see `Objective.predict`.
    num_classes: number of outputs of the head; 0 if there is none, and logits
      are then the features.
    mesh: the devices.
    batch_size: batch size of training.
    reader: workers, prefetching and the policy for bad records.
    report: is called with bad records.
    check: is called with every batch on every process; it may raise to end the
      evaluation early.
    train_split: split that an evaluator fits on if its section does not name
      one: the training split of the run.
  """

  open_source: Callable[[str], stream.Source]
  transform: stream.Transform
  predict: Callable[[PyTree, PyTree], dict[str, jax.Array]]
  num_classes: int
  mesh: Mesh
  batch_size: int
  reader: stream.Reader
  report: stream.Report = None
  check: Callable[[], None] = lambda: None
  train_split: str = 'train'

  def open_other(self, section: Mapping[str, Any], split: str) -> stream.Source:
    """Opens a split of any source, given a section like `config.source`.

    Its labels are not matched with the classes of the run.

    Raises:
      UserError: the source or the split does not exist.
    """
    return sections.build('source', section, split)

  def compiled(
    self, function: Callable[[PyTree, Batch], PyTree]
  ) -> Callable[[PyTree, Batch], PyTree]:
    """Jits a function for `sweep`, with a result that is replicated."""
    return jax.jit(function, out_shardings=sharding.replicated(self.mesh))  # pyright: ignore[reportReturnType]

  def sweep(
    self,
    weights: PyTree,
    source: stream.Source,
    function: Callable[[PyTree, Batch], PyTree],
    batch_size: int | None = None,
  ) -> Iterator[PyTree]:
    """Applies a function to every example of a source once, in order.

    The last batch is padded, and `batch['mask']` is False for padding and for
    bad records that are skipped. Sums over the mask, added up over the batches,
    do not depend on the batch size or the number of devices or processes.

    Args:
      weights: first argument of the function.
      source: source of the examples.
      function: function of weights and a batch, from `compiled`.
      batch_size: size of the global batch; by default that of training. It is
        rounded up to a multiple of the number of devices.

    Yields:
      The result of the function for each batch, on the host.

    Raises:
      UserError: there is a bad record, and the reader's policy is to stop.
    """
    size = batch_size or self.batch_size
    size = -(-size // self.mesh.size) * self.mesh.size
    pending: collections.deque[PyTree] = collections.deque()
    share = Share(source, self.reader, self.mesh, size)
    with stream.eval_batches(
      source,
      self.transform,
      size,
      self.mesh,
      reader=self.reader,
      report=self.report,
    ) as batches:
      told = batches
      if jax.process_index() == 0:
        count = -(-len(source) // size)
        told = progress.shown(batches, count, f'judging {source.name}')
      for batch in told:
        self.check()
        pending.append((function(weights, batch), share.count(batch)))
        if len(pending) > _IN_FLIGHT:
          yield share.judged(*pending.popleft())
    while pending:
      yield share.judged(*pending.popleft())


def check_common(every: str, batch_size: int | None) -> None:
  """Checks the keys that all evaluators have.

  Raises:
    UserError: a value is not allowed.
  """
  durations.check('every', every)
  check_range('batch_size', batch_size, at_least=1, at_most=MAX_BATCH_SIZE)


def check_head(setting: Setting) -> None:
  """Checks that the model predicts classes.

  Raises:
    UserError: it has no head.
  """
  if not setting.num_classes:
    raise UserError(
      'the model has no head (num_classes is 0), so it predicts no '
      'classes: use another evaluator, or fine-tune the model first.'
    )


def joined(results: Iterable[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
  """Concatenates the arrays of a sweep by name."""
  each = list(results)
  return {key: np.concatenate([r[key] for r in each]) for key in each[0]}


def total(results: Iterator[dict[str, np.ndarray]]) -> dict[str, float]:
  """Adds up the scalars of a sweep."""
  sums: dict[str, float] = collections.defaultdict(int)
  for result in results:
    for key, value in result.items():
      sums[key] += value.item()
  return sums
