"""Begins a run from the whole state of a step of another run.

A branch has the parameters, optimizer, averages, objective's state and position
in the data of the step, and another schedule or length: for example, a run with
a constant rate can end with several cool-downs, or a finished run can be
continued. Metrics up to the step are copied. Up to the branch, and after it, a
run computes the same numbers as one that had its schedule from the start, if
the two schedules agree up to the step.
"""

import re
import time

from etils import epath

from vit_jax.checkpoint import branch, items, steps
from vit_jax.config.schema import Config
from vit_jax.errors import UserError
from vit_jax.files import jsonl, paths
from vit_jax.run import ledger, lock, metrics, resume
from vit_jax.training.experiment import total_steps


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
  items.with_retries(
    lambda: items.on_main(_begin, source, step, config, workdir),
    f'{source} at step {step}',
    time.sleep,
  )


def _begin(
  source: epath.Path, step: int, config: Config, workdir: epath.Path
) -> None:
  root = workdir / 'checkpoints'
  origin = {'workdir': str(source), 'step': step}
  paths.check_writable(workdir)
  with lock.hold(workdir):
    existing, known = steps.committed(root), branch.origin(root) or {}
    if existing and {k: known.get(k) for k in origin} == origin:
      return
    if existing:
      raise UserError(
        f'--branch_from starts a new run, and {workdir} has checkpoints '
        f'already (step {existing[-1]}): give another --workdir, or omit '
        '--branch_from to resume.'
      )
    about = branch.read_about(source / 'checkpoints', step)
    changes = resume.config_changes(about['config'], config)
    resume.check_branch(f'{source}@{step}', changes)
    if step >= (total := total_steps(config)):
      raise UserError(
        f'--branch_from={source}@{step} is at the end of the {total} steps of '
        f'config.total={config.total!r}: give a longer total.'
      )
    events = ledger.Ledger(workdir / 'events.jsonl')
    events.event('branch', **origin)
    events.event('config_change', changes=resume.digests(changes))
    _copy_metrics(source, workdir, step)
    branch.copy_step(source / 'checkpoints', step, root, origin)


def _copy_metrics(source: epath.Path, workdir: epath.Path, step: int) -> None:
  lines = [
    line
    for line, record in jsonl.read(source / 'metrics.jsonl')
    if record is not None and metrics.is_before(record, step)
  ]
  paths.write(workdir / 'metrics.jsonl', b''.join(lines))
