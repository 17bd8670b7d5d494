"""Executes the runs of a sweep or study on this machine, one after another."""

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
from vit_jax.run import early_stopping, lock, metric_lines
from vit_jax.sweeps.grid import Run

log = logging.getLogger('vit_jax')
_DIVERGED = float('-inf')  # metric of a run that diverged; it is never the best
_ENDED_BY_SIGNAL = {
  EXIT_PREEMPTED,
  *(-number for number in interruption.SIGNALS),
}
_LOCK_TIMEOUT_S, _LOCK_PAUSE_S = 300.0, 1.0


def value(run: Run) -> float | None:
  """Reads the metric of a finished run from its workdir.

  A training run is finished if its workdir contains the metrics and the
  checkpoint of its last step (or of the step at which it has ended early); an
  evaluation, if its workdir contains the result. A training run that was
  stopped during its last evaluation is not finished, and repeats the evaluation
  when it is resumed.

  Returns:
    The metric; None for a run that is not finished, minus infinity for a run
    that diverged.

  Raises:
    UserError: the run is finished, but its workdir does not contain the metric.
  """
  if _diverged(paths.locate(run.workdir)).exists():
    return _DIVERGED
  if run.command == 'evaluate':
    found = _json(result_file(run.workdir))
  else:
    found = _trained(run)
  if found is None:
    return None
  if run.metric not in found:
    raise UserError(
      f'{run.workdir} is finished, but does not contain the metric '
      f'{run.metric!r}. Correct the metric in the config; available: '
      f'{", ".join(sorted(found))}.'
    )
  score = found[run.metric]
  # Numbers that are not finite are written as null.
  return _DIVERGED if score is None else float(score)


def split(run: Run) -> str:
  """Returns the split on which a run's metric is computed; '' if unknown."""
  if run.command == 'evaluate':
    flag = '--split='
    splits = [f.removeprefix(flag) for f in run.flags if f.startswith(flag)]
    return splits[-1] if splits else ''
  config = _json(paths.locate(run.workdir) / 'config.json') or {}
  evaluator = run.metric.partition('/')[0]
  evals = config.get('evals', {})
  # A metric of the average of the weights is named EVALUATOR_ema/…
  names = [name for name in evals if f'{evaluator}_'.startswith(f'{name}_')]
  return evals[max(names, key=len)].get('split', '') if names else ''


def result_file(workdir: str) -> epath.Path:
  """Returns the file to which an evaluation writes its result."""
  return paths.locate(workdir) / 'result.json'


def _trained(run: Run) -> dict[str, Any] | None:
  """Returns the metrics of the last step; None if training is not finished."""
  workdir = paths.locate(run.workdir)
  config = _json(workdir / 'config.json')
  if config is None:
    return None
  last = durations.to_steps(
    config['total'],
    batch_size=config['batch_size'],
    num_examples=config['train']['num_examples'],
  )
  plateau = early_stopping.plateau(workdir, config)
  if plateau is not None:
    last = min(last, plateau.step)
  if last not in steps.committed(workdir / 'checkpoints'):
    return None
  found = {}
  for step, metrics in metric_lines.read(workdir):
    if step == last:
      found |= metrics
  # The results of all evaluators are written as one line. If it is missing, the
  # run was stopped between its last save and the end of its last evaluation.
  return found if any('/' in key for key in found) else None


def best_step(run: Run) -> int:
  """Returns the step with the best metric among those with a checkpoint.

  The first of several steps with equal values is returned.
  """
  workdir = paths.locate(run.workdir)
  saved = steps.committed(workdir / 'checkpoints')
  values = {
    step: value
    for step, metrics in metric_lines.read(workdir)
    if step in saved and (value := metrics.get(run.metric)) is not None
  }
  return min(values, key=lambda step: (-values[step], step))


def _diverged(workdir: epath.Path) -> epath.Path:
  """Returns the path of the marker of a diverged run, which is not repeated."""
  return workdir / 'diverged.json'


def _json(path: epath.Path) -> Any:
  return jsonl.parse(path.read_bytes()) if path.exists() else None


def line(run: Run) -> str:
  """Returns the command of a run, quoted for a shell."""
  words = ['python', '-m', f'vit_jax.{run.command}', *run.flags]
  return ' '.join(map(shlex.quote, words))


def check_flags(workdir: str, runs: Sequence[Run]) -> None:
  """Compares the flags of runs with those of earlier starts, and records them.

  Args:
    workdir: workdir of the sweep or study; the flags are in jobs.json.
    runs: runs to compare.

  Raises:
    UserError: an earlier start used other flags for a run.
  """
  file = paths.locate(workdir) / 'jobs.json'
  recorded = _json(file) or {}
  for run in runs:
    previous = recorded.setdefault(run.name, run.flags)
    differing = sorted(_effective(previous) ^ _effective(run.flags))
    if differing:
      raise UserError(
        f'{workdir} contains {run.name} with other flags '
        f'({" ".join(differing)}). Give the same flags, or another --workdir.'
      )
  atomic.save(file, json.dumps(recorded, indent=1))


def _effective(flags: Sequence[str]) -> set[str]:
  """Returns the last flag of each name, which overrides earlier ones."""
  return {*{flag.partition('=')[0]: flag for flag in flags}.values()}


def finish(runs: Sequence[Run], *, done: int = 0, total: int = 0) -> None:
  """Executes the runs that are not finished, or resumes them.

  Args:
    runs: runs to execute, in order.
    done: number of other runs of the sweep or study that are finished.
    total: number of all runs of the sweep or study; 0 if there are only these.

  Raises:
    PreemptedError: a signal arrived; the state of the current run is saved.
    UserError: a run ended with an error; its log contains the message.
  """
  for number, run in enumerate(runs, done + 1):
    if value(run) is None:
      log.info('%d of %d: %s', number, total or len(runs), run.name)
      _execute(run)
    name = split(run)
    log.info(
      '%s: %s%s %s', run.name, run.metric, name and f' on {name}', value(run)
    )


def _execute(run: Run) -> None:
  """Executes a run in its own process; writes its output to a log file."""
  words = [sys.executable, '-m', f'vit_jax.{run.command}', *run.flags]
  output = run.workdir + '.log'
  os.makedirs(os.path.dirname(output), exist_ok=True)
  _wait_for_lock(run)
  with open(output, 'ab') as file:
    start = file.tell()  # the end of the output of earlier starts
    process = subprocess.Popen(
      words,
      stdout=file,
      stderr=file,
      start_new_session=True,
      env=os.environ | {parent.VARIABLE: str(os.getpid())},
    )
    code, signalled = _wait(process)
  # A signal to a whole group of processes can end a run before it handles
  # signals, or twice, so that its exit code is not that of a preemption.
  if code in _ENDED_BY_SIGNAL or (signalled and code):
    raise PreemptedError(f'stopped in {run.name}; the same command resumes it')
  if code == EXIT_DIVERGED:
    log.warning('%s diverged, so its setting will not be selected', run.name)
    marker = _diverged(paths.locate(run.workdir))
    atomic.save(marker, json.dumps({'exit': code}))
  elif code or value(run) is None:
    with open(output, 'rb') as file:
      file.seek(start)
      last = file.read()[-1500:].decode(errors='replace').strip()
    raise UserError(
      f'{run.name} ended with exit code {code}. The end of {output}:\n{last}\n'
      'Fix the cause and run the same command again: finished runs are kept.'
    )
  if signalled:
    # The run had already written its results, so it ended with code 0.
    raise PreemptedError(
      f'stopped after {run.name}; the same command continues with the next run'
    )


def _wait_for_lock(run: Run) -> None:
  """Waits until an earlier process of a run has released its workdir.

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
      log.info('waiting for an earlier process of %s: %s', run.name, error)
    time.sleep(_LOCK_PAUSE_S)


def _wait(process: subprocess.Popen) -> tuple[int, bool]:
  """Waits for a run, and forwards signals to it so that it saves its state.

  Returns:
    The exit code, and whether a signal arrived.
  """
  received = []

  def forward(number: int) -> None:
    received.append(number)
    process.send_signal(signal.SIGTERM)

  earlier_reaction = interruption.HANDLER.react
  interruption.HANDLER.react = forward
  try:
    return process.wait(), bool(received)
  except BaseException:
    process.terminate()
    process.wait()
    raise
  finally:
    interruption.HANDLER.react = earlier_reaction
