"""The jobs of sweeps and studies: commands, and the jobs that they need.

The tasks of a sweep are independent of each other; the final stage of a task
needs its dev stage. In a row of a study, the transfers need a pre-training.
Flags that depend on results, such as those of the best setting, are determined
when the needed jobs are finished. What is finished follows from the workdirs
alone, so resuming, and jobs that are printed for a cluster, need no other
state.
"""

import functools
import json
import math
import re
import statistics
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from vit_jax.checkpoint import steps
from vit_jax.config import direction
from vit_jax.errors import UserError
from vit_jax.files import jsonl, paths
from vit_jax.run import ledger
from vit_jax.run import metrics as metrics_lib
from vit_jax.sweeps import grid
from vit_jax.sweeps.grid import DEV, FINAL, Evaluation, Task

Metrics = Mapping[str, float | None]  # None: the value was not finite
DIVERGED = float('-inf')  # metric of a run that diverged; it is never the best
# Flags that `evaluate` accepts, too.
_DATA_FLAG = re.compile(r'--?config\.(source|reader)\.')


class Job:
  """A run of a command, with its state when the job was created.

  Attributes:
    command: 'train', 'finetune' or 'evaluate'.
    metric: metric of the run.
    stage: 'dev' or 'final'.
    seed: seed of the run.
    early_stopping: whether transfers of this job's weights start from its best
      checkpoint instead of the last one.
    is_left_out: whether the job never starts, because its pre-training
      diverged.
    setting: setting of the grid; the best of the dev stage if that is finished.
    name: name for messages and jobs.json.
    workdir: workdir of the run.
    flags: all flags of the command, including the workdir; none while the
      needed jobs are not finished.
    metrics: metrics at the end of the run; {} if it diverged, None if it is not
      finished.
  """

  def __init__(
    self,
    root: str,
    directory: str,
    command: str,
    definition: grid.Stage | Evaluation,
    extra_flags: Sequence[str],
    weights: 'Job | str | None' = None,
    *,
    stage: str = FINAL,
    setting: Mapping[str, Any] | None = None,
    seed: int = 0,
    dev: Sequence['Job'] = (),
    branch_step: int | None = None,
    early_stopping: bool = False,
  ):
    """Determines the flags of a run, and reads its state from its workdir.

    Args:
      root: directory of all runs.
      directory: directory of the task or evaluation in `root`.
      command: 'train', 'finetune' or 'evaluate'.
      definition: config, metric and flags.
      extra_flags: flags that are added at the end.
      weights: pre-training whose weights are transferred, or their path; None
        for initial weights.
      stage: 'dev' or 'final'.
      setting: setting of the grid, if there is no dev stage before.
      seed: seed of the run.
      dev: jobs of the dev stage, whose best setting is used.
      branch_step: step of the run `weights` whose whole state the run starts
        from; None if only weights are transferred.
      early_stopping: see `Job`.
    """
    self.command, self.stage, self.seed = command, stage, seed
    self.metric, self.early_stopping = definition.metric, early_stopping
    source = [weights] if isinstance(weights, Job) else []
    self.is_left_out = any(j.finished and j.value == DIVERGED for j in source)
    # Whether all results are known on which the flags depend.
    is_known = not self.is_left_out and all(j.finished for j in (*source, *dev))
    self.setting = setting or {}
    if dev and is_known:
      self.setting = _best(dev)
    self.name = f'{directory}/{stage}/{label(self.setting, seed)}'
    is_evaluation = isinstance(definition, Evaluation)
    self._evaluator = definition.evaluator if is_evaluation else ''
    self.workdir = f'{root}/{directory if is_evaluation else self.name}'
    self.flags: list[str] = []
    self.metrics: Metrics | None = None
    if not is_known:
      return
    self.metrics = outcome(command, self.workdir)
    path, start = weights, []
    if isinstance(weights, Job):
      # A branch continues the run itself, not its best checkpoint.
      is_branch = branch_step is not None
      path = weights.workdir if is_branch else weights.trained
    if isinstance(definition, Evaluation):
      flags = [
        f'--checkpoint={path}',
        f'--evaluator={definition.evaluator}',
        f'--split={definition.split}',
        f'--out={_result_file(self.workdir)}',
      ]
      if definition.dataset:
        flags.append(f'--dataset={definition.dataset}')
      keys = definition.flags
    else:
      flags = [f'--config={definition.config}', f'--workdir={self.workdir}']
      if branch_step is not None:
        start = [f'--branch_from={path}@{branch_step}']
      elif path is not None:
        start = [f'--config.init_from={path}']
      keys = {**definition.flags, **self.setting, 'seed': seed}
    # The start comes last, so that no other flag replaces it.
    self.flags = [*flags, *key_flags(keys), *extra_flags, *start]

  @property
  def finished(self) -> bool:
    """True if the run is finished or diverged."""
    return self.metrics is not None

  @property
  def is_ready(self) -> bool:
    """True if the job can start now."""
    return bool(self.flags) and not self.finished

  @property
  def value(self) -> float:
    """The metric of a finished run; minus infinity if it diverged.

    Raises:
      UserError: the workdir does not contain the metric.
    """
    if not self.metrics:
      return DIVERGED
    if self.metric not in self.metrics:
      raise UserError(
        f'{self.workdir} is finished without the metric {self.metric!r} of the '
        f'config; available: {", ".join(sorted(self.metrics))}.'
      )
    value = self.metrics[self.metric]
    return DIVERGED if value is None else float(value)

  @property
  def sign(self) -> int:
    """Sign of the metric of a finished run, see `config.direction.sign`."""
    if self.command == 'evaluate':
      return direction.sign_of(self._evaluator, self.metric.rpartition('/')[2])
    return direction.sign(_evals(self.workdir), self.metric)

  def check_direction(self) -> None:
    """Checks that values of the metric can be compared.

    Raises:
      UserError: neither higher nor lower values of the metric are better.
    """
    if not self.sign:
      raise UserError(
        f'the metric {self.metric!r} of {self.workdir} cannot select a setting '
        'or a step: use one that an evaluator lists in higher_is_better or '
        "lower_is_better, such as 'NAME/accuracy', or 'loss'."
      )

  @property
  def trained(self) -> str:
    """The path of the weights that are transferred."""
    if not self.early_stopping:
      return self.workdir
    self.check_direction()
    step = best_step(self.workdir, self.metric, self.sign)
    return f'{self.workdir}/checkpoints/{step}'


def _best(dev: Sequence[Job]) -> Mapping[str, Any]:
  """Returns the setting with the best mean over seeds."""

  def score(setting: Mapping[str, Any]) -> tuple[bool, float]:
    values = [job.value for job in dev if job.setting == setting]
    mean = statistics.fmean(values)
    return math.isfinite(mean), sign * mean

  sign = next((job.sign for job in dev if job.metrics), 1)
  return max((job.setting for job in dev), key=score)


# Jobs of each column of each task of a sweep or row of a study. Columns that
# differ only in the metric contain the same jobs, except for the metric.
Columns = Mapping[str, Sequence[Job]]
Graph = Mapping[str, Columns]


def finished(jobs: Sequence[Job], stage: str | None = None) -> list[Job]:
  """Returns the finished jobs, only those of a stage if it is given."""
  return [job for job in jobs if stage in (None, job.stage) and job.finished]


def complete(jobs: Sequence[Job]) -> bool:
  """Returns whether there are jobs, and none of them remains to be run."""
  return bool(jobs) and all(job.finished or job.is_left_out for job in jobs)


def of_sweep(sweep: grid.Sweep, root: str, flags: Sequence[str]) -> Graph:
  """Returns the jobs of a sweep; each task is a column of its own.

  Args:
    sweep: sweep of a config.
    root: directory of all runs.
    flags: flags '--config.KEY=value' that are added to all jobs.
  """
  return {
    name: {name: _of_task(root, name, task, flags)}
    for name, task in sweep.tasks.items()
  }


def _of_task(
  root: str,
  name: str,
  task: Task,
  flags: Sequence[str],
  weights: Job | str | None = None,
) -> list[Job]:
  """Returns the jobs of a task: one for each setting and seed of each stage.

  Args:
    root: directory of all runs.
    name: directory of the task in `root`.
    task: task of a sweep or study.
    flags: flags that are added to all jobs.
    weights: see `Job`.
  """
  make = functools.partial(Job, root, name, task.command)
  dev = []
  if task.dev is not None:
    dev = [
      make(task.dev, flags, weights, stage=DEV, setting=setting, seed=seed)
      for setting in task.settings
      for seed in task.dev.seeds
    ]
    for job in dev:
      if job.metrics:
        job.check_direction()
  first, *_ = task.settings
  final = [
    make(task.final, flags, weights, setting=first, seed=seed, dev=dev)
    for seed in task.final.seeds
  ]
  return [*dev, *final]


def of_study(
  study: grid.Study,
  root: str,
  flags: Sequence[str],
  pretrain_flags: Sequence[str],
  weights: Mapping[str, str],
) -> Graph:
  """Returns the jobs of a study.

  Args:
    study: study of a config.
    root: directory of all runs.
    flags: flags '--config.KEY=value' that are added to all jobs; evaluations
      get only those of source and reader.
    pretrain_flags: flags '--config.KEY=value' for pre-trainings only.
    weights: paths of weights that replace pre-trainings, by row.
  """
  graph: dict[str, dict[str, list[Job]]] = {}
  for name, row in study.rows.items():
    folder, columns = directory(name), {}
    sources: dict[str, Job | str] = {}
    if name in weights:
      sources['given'] = weights[name]
    elif row.pretrain is not None:
      columns[grid.UPSTREAM] = [
        Job(
          root,
          f'{folder}/pretrain',
          'train',
          row.pretrain,
          [*flags, *pretrain_flags],
          _trunk(row, seed, graph, weights),
          seed=seed,
          branch_step=row.branch.step if row.branch else None,
          early_stopping=row.early_stopping,
        )
        for seed in row.pretrain.seeds
      ]
      for job in columns[grid.UPSTREAM]:
        sources[f'from-seed={job.seed}'] = job
    for key in row.transfers:
      columns[key] = [
        job
        for start, source in sources.items()
        for job in _of_transfer(
          root, f'{folder}/{start}', row, key, flags, source
        )
      ]
    graph[name] = columns
  return graph


def _trunk(
  row: grid.Row, seed: int, graph: Graph, weights: Mapping[str, str]
) -> Job | str | None:
  """Returns the run of a row before that a pre-training branches from.

  Args:
    row: row of the pre-training.
    seed: seed of both runs.
    graph: jobs of the rows before.
    weights: paths that replace pre-trainings, by row.
  """
  if row.branch is None:
    return None
  runs = graph[row.branch.row].get(grid.UPSTREAM, ())
  trunk = {run.seed: run for run in runs}
  return trunk[seed] if trunk else weights[row.branch.row]


def _of_transfer(
  root: str,
  folder: str,
  row: grid.Row,
  key: str,
  flags: Sequence[str],
  weights: Job | str,
) -> list[Job]:
  """Returns the jobs that transfer weights.

  Args:
    root: directory of all runs.
    folder: directory of the transfers of these weights in `root`.
    row: row of a study.
    key: key of the transfer in `row.transfers`.
    flags: flags that are added to all jobs.
    weights: see `Job`.
  """
  transfer = row.transfers[key]
  if isinstance(transfer, Task):
    name = f'{folder}/{directory(key)}'
    return _of_task(root, name, transfer, flags, weights)
  # The name does not depend on the metric, so that columns share a workdir.
  content = json.dumps(transfer._replace(metric=''), default=str).encode()
  name = f'{folder}/{transfer.evaluator}-{zlib.crc32(content):08x}'
  flags = [flag for flag in flags if _DATA_FLAG.match(flag)]
  return [Job(root, name, 'evaluate', transfer, flags, weights)]


def key_flags(keys: Mapping[str, Any]) -> list[str]:
  """Returns flags '--config.KEY=value' for values by key."""
  return [f'--config.{key}={value}' for key, value in keys.items()]


def label(setting: Mapping[str, Any], seed: int) -> str:
  """Returns a run's directory name: 'schedule.base_lr=0.003,seed=0'."""
  keys = {**setting, 'seed': seed}
  return directory(','.join(f'{key}={value}' for key, value in keys.items()))


def directory(name: str) -> str:
  """Returns a name with '-' for slashes and characters special to shells."""
  return name.translate(str.maketrans({sign: '-' for sign in '/[]*?() '}))


def outcome(command: str, workdir: str) -> Metrics | None:
  """Returns the metrics of a finished run.

  A training run is finished if its last event is `finished`, and its workdir
  contains the metrics and the checkpoint of that step; an evaluation, if its
  workdir contains the result.

  Args:
    command: 'train', 'finetune' or 'evaluate'.
    workdir: workdir of the run.

  Returns:
    The metrics; {} for a run that diverged, None for a run that is not
    finished.
  """
  if diverged_file(workdir).exists():
    return {}
  if command == 'evaluate':
    return jsonl.read_object(_result_file(workdir)) or None
  return _of_training(paths.locate(workdir))


def _of_training(workdir: epath.Path) -> Metrics | None:
  """Returns the metrics of the last step; None if training is not finished."""
  end = ledger.finished(ledger.read(workdir / 'events.jsonl'))
  if not end or end['step'] not in steps.committed(workdir / 'checkpoints'):
    return None
  found = {}
  for step, values in metrics_lib.read(workdir):
    if step == end['step']:
      found |= values
  return found if found.keys() >= set(end['metrics']) else None


def best_step(workdir: str, metric: str, sign: int) -> int:
  """Returns the step with the best metric among those with a checkpoint.

  The first of several steps with equal values is returned.

  Args:
    workdir: workdir of a run.
    metric: name of the metric.
    sign: -1 if lower values are better.
  """
  path = paths.locate(workdir)
  saved = steps.committed(path / 'checkpoints')
  values = {
    step: value
    for step, metrics in metrics_lib.read(path)
    if step in saved and (value := metrics.get(metric)) is not None
  }
  return min(values, key=lambda step: (-sign * values[step], step))


def _evals(workdir: str) -> Mapping[str, Any]:
  """Returns the sections of the evaluators of a training run, by name."""
  config = jsonl.read_object(paths.locate(workdir) / 'config.json')
  return config.get('evals', {})


def split(workdir: str, metric: str) -> str:
  """Returns the split of a training run's metric; '' if it is unknown."""
  section = direction.section_of(_evals(workdir), metric)
  return section.get('split', '')


def _result_file(workdir: str) -> epath.Path:
  """Returns the file to which an evaluation writes its result."""
  return paths.locate(workdir) / 'result.json'


def diverged_file(workdir: str) -> epath.Path:
  """Returns the path of the marker of a diverged run, which is not repeated."""
  return paths.locate(workdir) / 'diverged.json'
