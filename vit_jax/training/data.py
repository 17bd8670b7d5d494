"""The data of a run: what is trained on, and what evaluators look at."""

import functools
from collections.abc import Callable, Sequence

from etils import epath

from vit_jax.config import sections
from vit_jax.config.completion import Config
from vit_jax.config.sections import build_section
from vit_jax.data import matching
from vit_jax.data.pipeline import stream
from vit_jax.data.pipeline.bad_record_limit import BadShare
from vit_jax.errors import UserError
from vit_jax.evaluators import contract
from vit_jax.run import bad_records
from vit_jax.run.ledger import Ledger
from vit_jax.training.experiment import Experiment


def open_source(
  config: Config, split: str, class_names: Sequence[str] | None = None
) -> stream.Source:
  """Opens a split of the config's source.

  Args:
    config: completed.
    split: in the TFDS way.
    class_names: of the training data, to which labels are matched.

  Raises:
    UserError: it has more classes than the head, or others than those of
      the training data; what the source raises.
  """
  source = build_section(config, 'source', split)
  if 0 < config.num_classes < source.num_classes:
    raise UserError(
      f'{source.name} has {source.num_classes} classes and the head '
      f'{config.num_classes}: set --config.num_classes='
      f'{source.num_classes}.'
    )
  if class_names is None:
    return source
  return matching.matched(source, class_names, 'the training data')


def bad_share(config: Config) -> BadShare:
  """What judges the bad records of a training, from its start."""
  train = config.train
  return BadShare(
    config.reader.max_bad_share, train.num_examples, train.repeats
  )


def open_train(config: Config) -> stream.Source:
  """Opens the training split and checks its size.

  Raises:
    UserError: its size is not `train.num_examples`.
  """
  train = config.train
  source = open_source(config, train.split)
  if len(source) != train.num_examples:
    raise UserError(
      f'{source.name} has {len(source)} examples, and config.train.'
      f'num_examples is {train.num_examples}, of which epochs and the '
      f'schedule are made: set --config.train.num_examples={len(source)}.'
    )
  return source


def train_batches(
  experiment: Experiment,
  source: stream.Source,
  start_step: int,
  ledger: Ledger | None = None,
  skipped: tuple[int, ...] = (),
) -> stream.Stream:
  """The stream of training batches after `start_step` updates."""
  return stream.train_batches(
    source,
    experiment.augment(),
    experiment.config.batch_size,
    experiment.config.seed,
    start_step,
    experiment.mesh,
    reader=build_section(experiment.config, 'reader'),
    skipped=skipped,
    repeats=experiment.config.train.repeats,
    report=bad_records.report_to(ledger),
  )


def evaluator(
  experiment: Experiment, name: str, setting: contract.Setting
) -> contract.Evaluator:
  """Builds one of the config's evaluators; see `evaluators.contract`.

  Args:
    experiment: of the run.
    name: in `config.evals`.
    setting: from `setting`.

  Raises:
    UserError: what the evaluator raises, with its name.
  """
  try:
    return sections.build('evals', experiment.config.evals[name], setting)
  except UserError as error:  # an evaluator does not know its name
    raise UserError(f'config.evals.{name}: {error}') from error


def setting(
  experiment: Experiment,
  class_names: Sequence[str],
  ledger: Ledger | None = None,
  check: Callable[[], None] = lambda: None,
  workdir: epath.Path | None = None,
  judging: Callable[[], str] = lambda: '',
) -> contract.Setting:
  """What every evaluator of a run gets.

  Args:
    experiment: of the run.
    class_names: of the training data; labels are matched with them.
    ledger: where bad records are listed.
    check: called with every batch.
    workdir: of the run.
    judging: says which weights are judged.
  """
  return contract.Setting(
    open_source=functools.partial(
      open_source, experiment.config, class_names=class_names
    ),
    transform=experiment.preprocess(),
    predict=experiment.objective.predict,
    num_classes=experiment.config.num_classes,
    mesh=experiment.mesh,
    batch_size=experiment.config.batch_size,
    reader=build_section(experiment.config, 'reader'),
    report=bad_records.report_to(ledger),
    check=check,
    model=experiment.model,
    objective=experiment.objective,
    workdir=workdir,
    judging=judging,
  )
