"""Carries out runs on this machine, one after another, each once."""

import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from etils import epath

from vit_jax.checkpoint import steps
from vit_jax.config import durations
from vit_jax.errors import (
  EXIT_DIVERGED,
  EXIT_PREEMPTED,
  PreemptedError,
  UserError,
)
from vit_jax.files import atomic, jsonl, paths
from vit_jax.processes import interruption, parent
from vit_jax.run import lock
from vit_jax.sweeps.grid import Run

log = logging.getLogger('vit_jax')
_NEVER = float('-inf')  # the value of a run that diverged: chosen last
_LOCK_TIMEOUT_S, _LOCK_PAUSE_S = 300.0, 1.0


def value(run: Run) -> float | None:
  """Returns the metric of a finished run, as its workdir has it.

  A training is finished when the metric and the checkpoint of its last step
  are there; an evaluation when its result is. A training that was stopped
  during the last evaluation is not finished: resuming it evaluates again.

  Returns:
    None for a run that is not finished; minus infinity for one that diverged.

  Raises:
    UserError: the run is finished and does not have the metric.
  """
  if _diverged(paths.locate(run.workdir)).exists():
    return _NEVER
  if run.command == 'evaluate':
    found = _json(result_file(run.workdir))
  else:
    found = _trained(run)
  if found is None:
    return None
  if run.metric not in found:
    raise UserError(
      f'{run.workdir} is finished, and has no metric {run.metric!r}; it has '
      f'{", ".join(sorted(found))}. Correct the metric in the config.'
    )
  score = found[run.metric]
  return _NEVER if score is None else float(score)  # None: not finite


def split(run: Run) -> str:
  """Returns the split that a run's metric was computed on; '' if unknown."""
  if run.command == 'evaluate':
    flag = '--split='
    given = [f.removeprefix(flag) for f in run.flags if f.startswith(flag)]
    return given[-1] if given else ''
  config = _json(paths.locate(run.workdir) / 'config.json') or {}
  evaluator = run.metric.partition('/')[0]
  evals = config.get('evals', {})
  # The metric of an average or a teacher is EVALUATOR_ema/…
  names = [name for name in evals if f'{evaluator}_'.startswith(f'{name}_')]
  return evals[max(names, key=len)].get('split', '') if names else ''


def result_file(workdir: str) -> epath.Path:
  """Returns the file to which an evaluation writes its result."""
  return paths.locate(workdir) / 'result.json'


def _trained(run: Run) -> dict[str, Any] | None:
  """Returns the metrics of the last step of a training; None before its end."""
  workdir = paths.locate(run.workdir)
  config = _json(workdir / 'config.json')
  if config is None:
    return None
  last = durations.to_steps(
    config['total'],
    batch_size=config['batch_size'],
    num_examples=config['train']['num_examples'],
  )
  if last not in steps.committed(workdir / 'checkpoints'):
    return None
  found = {}
  for _, record in jsonl.read(workdir / 'metrics.jsonl'):
    if record and record.get('step') == last:
      found |= record
  # The results of all evaluators are one line. Without it, the run was stopped
  # after its last save and before the end of its last evaluation.
  return found if any('/' in key for key in found) else None


def best_step(run: Run) -> int:
  """Returns the step with the best metric among those with a checkpoint.

  Of equal values, the first step is returned. Steps at which only one of the
  two was due are not compared.
  """
  workdir = paths.locate(run.workdir)
  there = steps.committed(workdir / 'checkpoints')
  values = {
    record['step']: record[run.metric]
    for _, record in jsonl.read(workdir / 'metrics.jsonl')
    if record
    and record.get('step') in there
    and record.get(run.metric) is not None
  }
  return min(values, key=lambda step: (-values[step], step))


def _diverged(workdir: epath.Path) -> epath.Path:
  """Returns the file that marks a run that diverged and would do so again."""
  return workdir / 'diverged.json'


def _json(path: epath.Path) -> Any:
  return jsonl.parse(path.read_bytes()) if path.exists() else None


def line(run: Run) -> str:
  """Returns the command of a run, quoted for a shell."""
  words = ['python', '-m', f'vit_jax.{run.command}', *run.flags]
  return ' '.join(map(shlex.quote, words))


def check_same(workdir: str, runs: Sequence[Run]) -> None:
  """Records the flags of each run, and compares them with those recorded.

  Raises:
    UserError: a run was begun with other flags.
  """
  file = paths.locate(workdir) / 'jobs.json'
  known = _json(file) or {}
  for run in runs:
    before = known.setdefault(run.name, run.flags)
    other = sorted(_effective(before) ^ _effective(run.flags))
    if other:
      raise UserError(
        f'{workdir} holds other runs: {run.name} was begun otherwise '
        f'({" ".join(other)}). Give another --workdir.'
      )
  with jsonl.access(file, 'written'):
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic.write(file, json.dumps(known, indent=1))


def _effective(flags: Sequence[str]) -> set[str]:
  """Returns the flags that take effect: of repeated ones the last."""
  return {*{flag.partition('=')[0]: flag for flag in flags}.values()}


def finish(runs: Sequence[Run], *, done: int = 0, total: int = 0) -> None:
  """Carries out the runs that are not finished, and resumes those that began.

  Args:
    runs: runs to carry out, in order.
    done: number of runs of the sweep or study that were finished before.
    total: number of all runs that are known; 0 for these alone.

  Raises:
    PreemptedError: a signal arrived; the run in progress is saved.
    UserError: a run ended with an error, which its log contains.
  """
  for number, run in enumerate(runs, done + 1):
    if value(run) is None:
      log.info('%d of %d: %s', number, total or len(runs), run.name)
      _carry_out(run)
    where = split(run)
    log.info(
      '%s: %s%s %s', run.name, run.metric, where and f' on {where}', value(run)
    )


def _carry_out(run: Run) -> None:
  """Carries out a run in a process of its own; its output goes to a log."""
  words = [sys.executable, '-m', f'vit_jax.{run.command}', *run.flags]
  output = run.workdir + '.log'
  os.makedirs(os.path.dirname(output), exist_ok=True)
  _wait_for_lock(run)
  with open(output, 'ab') as file:
    begin = file.tell()  # what earlier starts wrote is not of interest
    process = subprocess.Popen(
      words,
      stdout=file,
      stderr=file,
      start_new_session=True,
      env=os.environ | {parent.VARIABLE: str(os.getpid())},
    )
    code = _wait(process)
  if code == EXIT_PREEMPTED:
    raise PreemptedError(
      f'stopped in {run.name}; the same command continues it'
    )
  if code == EXIT_DIVERGED:
    log.warning('%s diverged: it will not be chosen', run.name)
    note = _diverged(paths.locate(run.workdir))
    note.parent.mkdir(parents=True, exist_ok=True)
    atomic.write(note, json.dumps({'exit': code}))
    return
  if code or value(run) is None:
    with open(output, 'rb') as file:
      file.seek(begin)
      last = file.read()[-1500:].decode(errors='replace').strip()
    raise UserError(
      f'{run.name} ended with exit code {code}. The end of {output}:\n{last}\n'
      'Fix the cause and run the same command again: finished runs are kept.'
    )


def _wait_for_lock(run: Run) -> None:
  """Waits until an earlier start of a run has released its workdir.

  After a sweep was killed, its run may still be saving its state.

  Raises:
    UserError: the workdir is still locked after some minutes.
  """
  workdir = paths.locate(run.workdir)
  if not workdir.exists():
    return
  deadline = time.monotonic() + _LOCK_TIMEOUT_S
  while True:
    try:
      with lock.hold(workdir):
        return
    except UserError as error:
      if time.monotonic() > deadline:
        raise
      log.info('waiting for an earlier start of %s: %s', run.name, error)
    time.sleep(_LOCK_PAUSE_S)


def _wait(process: subprocess.Popen) -> int:
  """Waits for a run; passes signals on to it, so that it saves its state."""
  before = interruption.HERE.react
  interruption.HERE.react = lambda number: process.send_signal(signal.SIGTERM)
  try:
    return process.wait()
  except BaseException:
    process.terminate()
    process.wait()
    raise
  finally:
    interruption.HERE.react = before
