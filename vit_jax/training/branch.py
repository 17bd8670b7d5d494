"""Begins a run from the whole state of a step of another run.

A branch has the parameters, optimizer, averages, objective's state and position
in the data of the step, and another schedule or length: for example, a run with
a constant rate can end with several cool-downs, or a finished run can be
continued. Metrics up to the step are copied. Up to the branch, and after it, a
run computes the same numbers as one that had its schedule from the start, if
the two schedules agree up to the step.
"""

import dataclasses
import logging
import re
import uuid
from collections.abc import Callable
from typing import Any

import jax
from etils import epath

from vit_jax.checkpoint import agreement, items, manifest, restore, steps
from vit_jax.checkpoint.agreement import CorruptError
from vit_jax.config import durations, identity, keys
from vit_jax.config.schema import Config, build_section
from vit_jax.errors import UserError
from vit_jax.files import jsonl, paths
from vit_jax.optim import optimizers
from vit_jax.run import ledger, lock, metrics, resume
from vit_jax.training.experiment import Experiment

log = logging.getLogger('vit_jax')


def begin(text: str, config: Config, workdir: epath.Path) -> None:
  """Copies the step to a new workdir, unless that was done before.

  All processes must call it, before the run is started.

  Args:
    text: value of --branch_from, 'WORKDIR@STEP'.
    config: completed config of the branch.
    workdir: directory of the branch.

  Raises:
    UserError: the step does not exist, the workdir has another run, or keys
      other than those of the schedule and the length differ.
    StorageError: the files cannot be read or written, even after retries.
  """
  match = re.fullmatch(r'(.+)@(\d+)', text)
  if match is None:
    raise UserError(
      f'--branch_from is {text!r}; give a workdir and a step of its '
      'checkpoints, as in runs/long@10000.'
    )
  source, step = paths.locate(match[1]), int(match[2])
  try:
    agreement.read_with_retries(
      lambda: agreement.on_main(_begin, source, step, config, workdir), text
    )
  except CorruptError as error:
    raise UserError(
      f'{text} cannot be branched: {error}. Give another step.'
    ) from error


def _begin(
  source: epath.Path, step: int, config: Config, workdir: epath.Path
) -> None:
  """Copies the step, on the main process only; see `begin`."""
  root = workdir / 'checkpoints'
  origin = {'workdir': str(source), 'step': step}
  paths.check_writable(workdir)
  with lock.hold(workdir):
    existing = steps.committed(root)  # steps of the branch
    events = ledger.read(workdir / 'events.jsonl')
    branches = [event for event in events if event['event'] == 'branch']
    if existing and branches and origin.items() <= branches[-1].items():
      return  # the same command was killed after it had copied the step
    if existing:
      raise UserError(
        f'{workdir} has checkpoints already (step {existing[-1]}): give '
        'another --workdir, or omit --branch_from to resume.'
      )
    step_dir = source / 'checkpoints' / str(step)  # of the other run
    available = steps.committed(step_dir.parent)
    if step not in available or step >= keys.length(config).total_steps:
      raise UserError(
        f'--branch_from={source}@{step}: give the workdir of a run and one of '
        f'its steps (here {available}), before the end of the branch '
        f'(config.total={config.total!r}).'
      )
    about = manifest.read_about(step_dir, manifest.read(step_dir))
    changes = identity.changes(about['config'], config)
    other = {
      key: pair for key, pair in changes.items() if not resume.may_branch(key)
    }
    if other:
      raise UserError(
        f'--branch_from={source}@{step}: a branch may change config.total and '
        f'config.schedule only:{resume.formatted(other)}\nGive these keys the '
        'values of the other run, or start from its parameters alone by '
        '--config.init_from.'
      )
    if moved := _moved(about['config']['total'], config):
      log.warning(
        'config.total is %r and was %r. This branch differs from a run with '
        'its schedule from the start in these durations (in %% of the training)'
        ':%s',
        config.total,
        about['config']['total'],
        resume.formatted(moved, 'steps before', 'steps now'),
      )
    # The step is copied last, because a workdir with a step has begun: if this
    # process is killed earlier, the same command copies everything again.
    ledger.Ledger(workdir / 'events.jsonl').event('branch', **origin)
    lines = [
      line
      for line, record in jsonl.read(source / 'metrics.jsonl')
      if record is not None and metrics.is_before(record, step)
    ]
    paths.write(workdir / 'metrics.jsonl', b''.join(lines))
    _copy_step(source / 'checkpoints', step, root, origin)


def _moved(total: str, config: Config) -> identity.Changes:
  """Returns the durations in % of objective and optimizer that a branch moves.

  Args:
    total: length of the other run.
    config: completed config of the branch.

  Returns:
    By section and duration: its number of updates in the other run, and in the
    branch.
  """
  experiment = Experiment.build(config, jax.devices())
  total_before = dataclasses.replace(experiment.length, total=total).total_steps
  found = {}

  def recorded(section: str) -> Callable[[str], int]:
    """Returns a function that converts durations, and records moved ones."""

    def steps_of(duration: str) -> int:
      now = experiment.steps(duration)
      number, unit = durations.parse(duration)
      before = round(number / 100 * total_before) if unit == '%' else now
      if before != now:
        found[f'{section} ({duration})'] = before, now
      return now

    return steps_of

  # Constructors convert all their durations, so building is enough.
  setting = experiment.setting._replace(steps=recorded('objective'))
  build_section(config, 'objective', setting)
  optimizer_setting = optimizers.Setting(
    recorded('optimizer'), experiment.objective.layers_above
  )
  schedule = experiment.trainer.schedule
  build_section(config, 'optimizer', schedule, optimizer_setting)
  return found


def _copy_step(
  source: epath.Path, step: int, root: epath.Path, origin: dict[str, Any]
) -> None:
  """Copies a step, which belongs to a new run from then on.

  The manifest of the copy contains a new id of the run, and `origin`. The
  arrays are compared with its checksums when they are restored.

  Args:
    source: directory of checkpoints of the other run.
    step: number of updates completed.
    root: directory of checkpoints of the new run.
    origin: `workdir` and `step`, to which the id of the other run is added.

  Raises:
    CorruptError: the manifest is damaged.
    OSError: a file cannot be read or written.
  """
  content = manifest.verified(
    items.read_json(source / str(step) / 'manifest'), 'the manifest'
  )
  run, origin = uuid.uuid4().hex, origin | {'run': content.get('run')}
  content |= {'run': run, 'origin': origin}
  identity = manifest.text_with_checksum({'run': run, 'origin': origin})
  paths.save(root / restore.RUN_ID_FILE, identity)
  with paths.new_folder(root / str(step)) as folder:
    _copy_folder(source / str(step), folder)
    path = folder / 'manifest' / 'metadata'
    path.write_text(manifest.text_with_checksum(content))
    # An object store has no directories to rename, so this file is the last.
    mark = source / str(step) / steps.COMMITTED
    if mark.exists():
      mark.copy(folder / mark.name)


def _copy_folder(source: epath.Path, target: epath.Path) -> None:
  """Copies a directory, without the mark of a committed step."""
  target.mkdir(parents=True, exist_ok=True)
  for path in source.iterdir():
    if path.is_dir():
      _copy_folder(path, target / path.name)
    elif path.name != steps.COMMITTED:
      path.copy(target / path.name)
