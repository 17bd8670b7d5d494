"""Opens the data of a run, for training and for the evaluators."""

import functools
from collections.abc import Callable, Sequence

from etils import epath

from vit_jax.config.schema import build_section
from vit_jax.data import filters
from vit_jax.data.balanced import Balanced
from vit_jax.data.pipeline import stream
from vit_jax.data.pipeline.stream import BadRecordLimit
from vit_jax.data.sources import folder
from vit_jax.data.storage import class_folders
from vit_jax.errors import UserError
from vit_jax.evaluators import contract
from vit_jax.run import ledger as ledger_lib
from vit_jax.run.ledger import Ledger
from vit_jax.training.experiment import Experiment


def open_source(experiment: Experiment, split: str) -> stream.Source:
  """Opens a split of the config's source.

  Args:
    experiment: experiment of the run.
    split: split in TFDS syntax, such as 'train[:90%]'.

  Raises:
    UserError: the split has more classes than the objective has outputs, or the
      source cannot be opened.
  """
  source = build_section(experiment.config, 'source', split)
  objective = experiment.objective
  if 0 < objective.num_classes < source.num_classes:
    section = 'objective.' if objective.classes_key else ''
    key = section + (objective.classes_key or 'num_classes')
    raise UserError(
      f'{source.name} has {source.num_classes} classes, but config.{key} is '
      f'{objective.num_classes}: set --config.{key}={source.num_classes}.'
    )
  return source


def _open_matched(
  experiment: Experiment, class_names: Sequence[str], split: str
) -> stream.Source:
  """Opens a split, and matches its labels with the training classes."""
  source = open_source(experiment, split)
  return filters.matched(source, class_names, 'the training data')


def open_train(experiment: Experiment) -> stream.Source:
  """Opens the training split, leaves listed examples out, checks its size.

  Args:
    experiment: experiment of the run.

  Raises:
    UserError: the number of examples is not `train.num_examples`; the objective
      learns labels, but the data has none, or the folder or mixture has only
      one class;
      `train.leave_out` is not a list of examples of this source; or the classes
      cannot be balanced.
  """
  config = experiment.config
  train = config.train
  source = open_source(experiment, train.split)
  # Where classes are folders, a wrong path may give only one class, which is
  # enough for MAE and DINO, because they have no outputs for classes.
  is_unlabelled = list(source.class_names) == [class_folders.UNLABELLED]
  has_folders = is_unlabelled or config.source.name in ('folder', 'mixture')
  if has_folders and experiment.objective.num_classes:
    folder.check_classes(source.class_names, source.name)
  source = filters.without_listed(source, train.leave_out)
  if len(source) != train.num_examples:
    raise UserError(
      f'{source.name} has {len(source)} examples, but config.train.'
      f'num_examples, which defines the length of an epoch, is '
      f'{train.num_examples}: set --config.train.num_examples={len(source)}.'
    )
  return Balanced(source) if train.balanced else source


def train_batches(
  experiment: Experiment,
  source: stream.Source,
  start_step: int,
  ledger: Ledger | None = None,
  skipped: tuple[int, ...] = (),
  limit: BadRecordLimit | None = None,
) -> stream.Stream:
  """Opens the stream of training batches after `start_step` updates.

  Args:
    experiment: experiment of the run.
    source: source of the training examples.
    start_step: number of updates completed.
    ledger: destination of events about bad records.
    skipped: indices of batches to leave out, ascending.
    limit: limit on bad records; it also stores each bad record.
  """
  report = ledger_lib.report_to(ledger)
  return stream.train_batches(
    source,
    experiment.augment,
    experiment.config.batch_size,
    experiment.config.seed,
    start_step,
    experiment.mesh,
    reader=experiment.reader,
    skipped=skipped,
    repeats=experiment.config.train.repeats,
    report=limit.reporting(report) if limit else report,
  )


def evaluation_setting(
  experiment: Experiment,
  class_names: Sequence[str],
  ledger: Ledger | None = None,
  check: Callable[[], None] = lambda: None,
  workdir: epath.Path | None = None,
) -> contract.Setting:
  """Returns the arguments that every evaluator of a run is built with.

  Args:
    experiment: experiment of the run.
    class_names: class names of the training data, to which labels are matched.
    ledger: destination of events about bad records.
    check: function called at every batch.
    workdir: directory in which evaluators may write files.
  """
  return contract.Setting(
    open_source=functools.partial(_open_matched, experiment, class_names),
    transform=experiment.preprocess,
    objective=experiment.objective,
    mesh=experiment.mesh,
    batch_size=experiment.config.batch_size,
    reader=experiment.reader,
    report=ledger_lib.report_to(ledger),
    check=check,
    train_split=experiment.config.train.split,
    leave_out=experiment.config.train.leave_out,
    preprocess=experiment.config.preprocess.to_dict(),
    workdir=workdir,
  )
