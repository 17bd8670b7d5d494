"""Runs on this machine, one after the other, each to its end once."""

import json
import logging
import os
import shlex
import signal
import subprocess
import sys
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
from vit_jax.processes import interruption
from vit_jax.sweeps.grid import Run

log = logging.getLogger('vit_jax')
_NEVER = float('-inf')  # the value of a run that diverged: chosen last


def value(run: Run) -> float | None:
  """What a finished run was judged by, told by its workdir.

  A training is finished when the metric and the checkpoint of the last step are
  there; an evaluation when its result is.

  Returns:
    None for a run that is not finished; minus infinity for one that diverged.

  Raises:
    UserError: it is finished and the metric is none of its own.
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
      f'{", ".join(sorted(found))}.'
    )
  score = found[run.metric]
  return _NEVER if score is None else float(score)  # None: not finite


def result_file(workdir: str) -> epath.Path:
  """Where an evaluation puts its result."""
  return paths.locate(workdir) / 'result.json'


def _trained(run: Run) -> dict[str, Any] | None:
  """The metrics of the last step of a training, or None before its end."""
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
  return found


def best_step(run: Run) -> int:
  """The step of a training whose checkpoint is there and whose metric is best.

  The first of equal ones; only where both are due at the same steps are all of
  them compared.
  """
  workdir = paths.locate(run.workdir)
  there = steps.committed(workdir / 'checkpoints')
  values = {
    record['step']: record[run.metric]
    for _, record in jsonl.read(workdir / 'metrics.jsonl')
    if record and record.get('step') in there and record.get(run.metric)
  }
  return min(values, key=lambda step: (-values[step], step))


def _diverged(workdir: epath.Path) -> epath.Path:
  """Says that a run diverged, which it would do again."""
  return workdir / 'diverged.json'


def _json(path: epath.Path) -> Any:
  return jsonl.parse(path.read_bytes()) if path.exists() else None


def line(run: Run) -> str:
  """The command of a run, for a shell."""
  words = ['python', '-m', f'vit_jax.{run.command}', *run.flags]
  return ' '.join(map(shlex.quote, words))


def check_same(workdir: str, runs: Sequence[Run]) -> None:
  """Writes down what each run is; refuses other runs of the same names.

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
  """Of flags that came twice the last one, which is the one that counts."""
  return {*{flag.partition('=')[0]: flag for flag in flags}.values()}


def finish(runs: Sequence[Run]) -> None:
  """Runs what is not finished, and resumes what was begun.

  Raises:
    PreemptedError: a signal came; the run in progress is saved.
    UserError: a run ended with an error, which its log tells.
  """
  for number, run in enumerate(runs, 1):
    if value(run) is None:
      log.info('%d of %d: %s', number, len(runs), run.name)
      _carry_out(run)
    log.info('%s: %s %s', run.name, run.metric, value(run))


def _carry_out(run: Run) -> None:
  """One run, in a process of its own, whose output goes to WORKDIR.log."""
  words = [sys.executable, '-m', f'vit_jax.{run.command}', *run.flags]
  output = run.workdir + '.log'
  os.makedirs(os.path.dirname(output), exist_ok=True)
  with open(output, 'ab') as file:
    process = subprocess.Popen(
      words, stdout=file, stderr=file, start_new_session=True
    )
    code = _wait(process)
  if code == EXIT_PREEMPTED:
    raise PreemptedError(f'stopped in {run.name}; the same command goes on')
  if code == EXIT_DIVERGED:
    log.warning('%s diverged: it will not be chosen', run.name)
    note = _diverged(paths.locate(run.workdir))
    note.parent.mkdir(parents=True, exist_ok=True)
    atomic.write(note, json.dumps({'exit': code}))
    return
  if code or value(run) is None:
    with open(output, 'rb') as file:
      last = file.read()[-1500:].decode(errors='replace').strip()
    raise UserError(
      f'{run.name} ended with exit code {code}. The end of {output}:\n{last}\n'
      'Mend it and run the same command again: finished runs are kept.'
    )


def _wait(process: subprocess.Popen) -> int:
  """Waits for a run; a signal is handed on to it, and it saves its state."""
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
