"""Executes the jobs of a sweep or study on this machine, one after another.

It also contains the flags of both commands.
"""

import contextlib
import json
import logging
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from absl import flags

from vit_jax.config import overrides
from vit_jax.errors import (
  EXIT_DIVERGED,
  EXIT_PREEMPTED,
  PreemptedError,
  UserError,
)
from vit_jax.files import jsonl, paths
from vit_jax.processes import interruption
from vit_jax.run import lock
from vit_jax.sweeps import grid
from vit_jax.sweeps.jobs import Graph, Job, diverged_file, outcome

log = logging.getLogger('vit_jax')
T = TypeVar('T')
_ENDED_BY_SIGNAL = {
  EXIT_PREEMPTED,
  *(-number for number in interruption.SIGNALS),
}
_LOCK_TRIES, _LOCK_PAUSE_S = 300, 1.0


def execute(
  load: Callable[[], Graph],
  results: Callable[[Graph], Mapping[str, str]],
  workdir: str,
  print_jobs: bool,
) -> None:
  """Executes the jobs that are not finished, or prints their commands.

  If a job fails, the remaining jobs of its task or row are skipped, and the
  others are executed.

  Args:
    load: function that returns the jobs as they are now.
    results: function that returns the files of results: content by name.
    workdir: local directory of all runs.
    print_jobs: whether to print the commands of the jobs that can start now
      instead of executing them.

  Raises:
    UserError: jobs failed, or the workdir belongs to another sweep or study.
    PreemptedError: a signal arrived; the state of the current run is saved.
  """
  failed: dict[str, UserError] = {}  # first error of each task or row
  while True:
    graph = load()
    jobs = {
      job.name: (row, job)  # columns can contain the same jobs
      for row, columns in graph.items()
      for column in columns.values()
      for job in column
    }
    check_flags(workdir, [job for _, job in jobs.values()])
    for file, content in results(graph).items():
      paths.save(paths.locate(workdir) / file, content)
    ready = [
      (row, job)
      for row, job in jobs.values()
      if row not in failed and job.is_ready
    ]
    if print_jobs or not ready:
      break
    row, job = ready[0]
    number = 1 + sum(each.finished for _, each in jobs.values())
    log.info('%d of %d: %s', number, len(jobs), job.name)
    try:
      _execute(job)
    except UserError as error:
      log.warning('the other jobs of %s are skipped: %s', row, error)
      failed[row] = error
  for _, job in ready:
    print(line(job))
  if failed:
    lines = [f'{row}: {error}' for row, error in failed.items()]
    raise UserError('\n'.join(lines))
  if not print_jobs:
    print((paths.locate(workdir) / 'results.md').read_text())
  log.info('tables in %s', workdir)


def line(job: Job) -> str:
  """Returns the command of a run, quoted for a shell."""
  return shlex.join(['python', '-m', f'vit_jax.{job.command}', *job.flags])


def check_flags(workdir: str, jobs: Sequence[Job]) -> None:
  """Compares the flags of runs with those of earlier starts, and records them.

  Args:
    workdir: workdir of the sweep or study; the flags are in jobs.json.
    jobs: jobs to compare, if their flags are known.

  Raises:
    UserError: an earlier start used other flags for a job.
  """
  file = paths.locate(workdir) / 'jobs.json'
  recorded = jsonl.read_object(file)
  for job in jobs:
    if not job.flags:
      continue
    previous = recorded.setdefault(job.name, job.flags)
    differing = sorted({*previous} ^ {*job.flags})
    if differing:
      raise UserError(
        f'{job.name} was started with other flags ({" ".join(differing)}): '
        f'give the same flags, or another --workdir than {workdir}.'
      )
  paths.save(file, json.dumps(recorded, indent=1))


def _execute(job: Job) -> None:
  """Executes a run in its own process; writes its output to a log file."""
  words = [sys.executable, '-m', f'vit_jax.{job.command}', *job.flags]
  output = job.workdir + '.log'
  os.makedirs(os.path.dirname(output), exist_ok=True)
  _wait_for_lock(job)
  with open(output, 'ab') as file:
    start = file.tell()  # the end of the output of earlier starts
    process = subprocess.Popen(
      words,
      stdout=file,
      stderr=file,
      start_new_session=True,
      env=os.environ | {interruption.PARENT_VARIABLE: str(os.getpid())},
    )
    code, signalled = _wait(process)
  # A signal to a whole group of processes can end a run before it handles
  # signals, or twice, so that its exit code is not that of a preemption.
  if code in _ENDED_BY_SIGNAL or (signalled and code):
    raise PreemptedError(f'stopped in {job.name}; the same command resumes it')
  if code == EXIT_DIVERGED:
    log.warning('%s diverged, so its setting will not be selected', job.name)
    marker = diverged_file(job.workdir)
    paths.save(marker, json.dumps({'exit': code}))
  job.metrics = outcome(job.command, job.workdir)
  if job.metrics is None or code not in (0, EXIT_DIVERGED):
    with open(output, 'rb') as file:
      file.seek(start)
      last = file.read()[-1500:].decode(errors='replace').strip()
    raise UserError(
      f'{job.name} ended with exit code {code}. The end of {output}:\n{last}\n'
      'Fix the cause and run the same command again: finished runs are kept.'
    )
  log.info('%s: %s %s', job.name, job.metric, job.value)
  if signalled:
    # The run had already written its results, so it ended with code 0.
    raise PreemptedError(f'stopped after {job.name}; start again to continue')


def _wait_for_lock(job: Job) -> None:
  """Waits until an earlier process of a run has released its workdir.

  After a sweep was killed, its run may still be saving its state. After some
  minutes, the new process is started, and reports the lock.
  """
  workdir = paths.locate(job.workdir)
  for _ in range(_LOCK_TRIES):
    if not workdir.exists():
      return
    with contextlib.suppress(UserError), lock.hold(workdir):
      return
    log.info('waiting for an earlier process of %s', job.name)
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


def define_flags() -> None:
  """Defines the flags of `sweep` and `study`."""
  flags.DEFINE_string('config', None, 'Path of the file, with its argument.')
  flags.DEFINE_string(
    'workdir', None, 'Directory of all runs; default runs/FOLDER/NAME.'
  )
  flags.DEFINE_bool(
    'print_jobs', False, 'Print the commands instead of running them.'
  )
  flags.DEFINE_multi_string(
    'overrides', overrides.extract(sys.argv), 'Set by --config.KEY=….'
  )


def load(arguments: list[str], folder: str, kind: type[T]) -> tuple[T, str]:
  """Loads the sweep or study that the flags specify.

  Args:
    arguments: arguments that are not flags; there must be none.
    folder: folder of the configs, 'sweeps' or 'studies'.
    kind: `Sweep` or `Study`.

  Returns:
    The content of the config, and the workdir: by default runs/FOLDER/NAME,
    with the argument of the config if it has one.

  Raises:
    UserError: there are arguments, --config is missing, or the workdir is
      remote.
  """
  values = flags.FLAGS
  if arguments or not values.config:
    raise UserError(
      f'give --config=configs/{folder}/NAME.py; got {arguments or "no config"}.'
    )
  file, _, argument = values.config.partition(':')
  name = pathlib.Path(file).stem
  if argument:  # 'model=B/16,seed=1' → '-model=B16-seed=1'
    name += '-' + re.sub(r'[^\w.=-]', '-', argument.replace('/', ''))
  workdir = values.workdir or f'runs/{folder}/{name}'
  if paths.is_remote(workdir):
    raise UserError(f'--workdir is {workdir!r}; give a local directory.')
  return grid.load(values.config, kind), workdir
