r"""Starts a run on a cluster: python -m vit_jax.launch --target=tpu ….

  python -m vit_jax.launch --target=tpu --config=configs/l16_i21k.py \
    --topology=v3:4x4 --workdir=gs://BUCKET/l16 --data_dir=gs://BUCKET/tfds \
    --zone=europe-west4-a --project=PROJECT_ID --dry_run

The command first runs `plan`, and refuses a config that does not fit into the
memory of the devices. The run is restarted until it is finished. If machines or
jobs of an earlier launch exist, the same command uses them. Every key of the
config is a flag. Other flags of train follow after --.
"""

import functools
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

from absl import flags

import vit_jax
from vit_jax.cli import fields, process
from vit_jax.config import overrides
from vit_jax.errors import UserError, check_choice
from vit_jax.launch import gke, slurm, tpu
from vit_jax.launch.job import (
  FLAGS,
  RESUME,
  STOP,
  Job,
  State,
  check,
  commit_of,
  default_name,
)
from vit_jax.launch.shell import Shell
from vit_jax.processes import interruption

ROOT = pathlib.Path(vit_jax.__file__).parents[1]
TARGETS: dict[str, Any] = {'tpu': tpu, 'gke': gke, 'slurm': slurm}

POLL_S = 30  # between two requests for the state
RESTART_S = 60  # between the end of a run and its restart
_MAX_FAILURES = 20  # of a tool in a row, for example without network


def define_flags() -> None:
  """Defines the flags of this command."""
  flags.DEFINE_string('target', None, f'One of {", ".join(TARGETS)}.')
  for field in FLAGS.values():
    fields.define(field, f' ({field.metadata["targets"]})')
  flags.DEFINE_bool(
    'plan', True, 'First check by `plan` that the run fits; --noplan does not.'
  )
  flags.DEFINE_bool(
    'delete', False, 'End the run and delete its machines; keep the workdir.'
  )
  flags.DEFINE_bool(
    'dry_run', False, 'Print the commands and files, and start nothing.'
  )
  # From a copy, because `define_flag` has to extract them, too.
  extracted = overrides.extract([*sys.argv])
  overrides.define_flag(sys.argv)
  flags.DEFINE_multi_string(
    'overrides', extracted, 'Set by --config.KEY=VALUE.'
  )


def job_of(values: Any, arguments: tuple[str, ...], root: pathlib.Path) -> Job:
  """Returns the job that the flags describe.

  Args:
    values: parsed flags of this command.
    arguments: arguments after --.
    root: directory of the checkout to launch from.

  Raises:
    UserError: a flag is missing, invalid, or not used by the target.
  """
  target = values.target or ''
  check_choice('--target', target, TARGETS)
  # Only flags (of train) may follow after --.
  process.refuse_arguments([a for a in arguments if not a.startswith('--')])
  given = {name: values[name].value for name in FLAGS}
  given['name'] = given['name'] or default_name(values.config_path)
  given['submit_flags'] = tuple(given['submit_flags'])
  job = Job(
    target=target,
    commit=commit_of(root, values.config_path),
    config=values.config_path,
    overrides=tuple(values.overrides),
    trainer_flags=arguments,
    **given,
  )
  check(job)
  return job


def check_fit(job: Job, shell: Shell) -> None:
  """Plans a job, prints a summary of the plan, and checks that it fits.

  Raises:
    UserError: the job does not fit or cannot be planned.
  """
  options = [f'--topology={job.topology}', f'--slices={job.slices}']
  try:
    plan = process.plan([f'--config={job.config}', *job.overrides, *options])
  except UserError as error:
    raise UserError(f'{error} --noplan starts without it.') from error
  shell.note(plan['summary'])
  if not plan['fits']:
    raise UserError(
      'the run does not fit into memory (see above). Change the config or '
      '--topology; --noplan starts without this check.'
    )


def run_until_done(
  job: Job,
  shell: Shell,
  pause: Callable[[float], None] = time.sleep,
) -> int:
  """Restarts a run until it is finished, or the user has to look at it.

  Args:
    job: job to run.
    shell: shell that runs the commands.
    pause: function that waits for the given number of seconds.

  Returns:
    The exit code of the last attempt; 0 if a cluster restarts the run.

  Raises:
    UserError: a command failed, and would fail again.
  """
  target, restarts = TARGETS[job.target], 0
  while True:
    _wait_for_machines(target, job, shell, pause)
    code = target.run(job, shell)
    if code == 0:
      return code
    if code in STOP:
      shell.note(f'exit code {code} (see above); not restarted')
      return code
    # After a preemption without a notice, the processes on other slices end
    # with other codes.
    state = target.state(job, shell)
    if code == RESUME or state not in (State.READY, None):
      shell.note(f'exit code {code}: preempted; restarting')
    elif restarts < job.max_restarts:
      restarts += 1
      shell.note(
        f'exit code {code}; restarting ({restarts} of {job.max_restarts})'
      )
    else:
      shell.note(f'exit code {code} after {restarts} restarts; giving up')
      return code
    pause(RESTART_S)


def _wait_for_machines(
  target: Any, job: Job, shell: Shell, pause: Callable[[float], None]
) -> None:
  """Requests the machines of a job unless they exist, and waits for them.

  Args:
    target: module of the job's target.
    job: job to run.
    shell: shell that runs the commands; a dry run does not wait.
    pause: function that waits for the given number of seconds.

  Raises:
    UserError: a command failed, and would fail again, or failed too often.
  """
  failures = 0
  while True:
    state = target.state(job, shell)
    if state is State.ABSENT:
      state = target.create(job, shell)
    elif state is State.LOST and target.delete(job, shell) != 0:
      state = None  # not deleted, so it cannot be requested again
    if state is State.READY or shell.dry_run:
      return
    failures = failures + 1 if state is None else 0
    if failures == _MAX_FAILURES:
      raise UserError(
        f'{failures} commands failed (see above). The same command continues.'
      )
    pause(POLL_S)


def main(arguments: list[str]) -> None:
  """Checks, plans and starts the job that the flags describe.

  If the launch follows the run, the process ends with the exit code of the run.

  Raises:
    UserError: the job cannot be started.
  """
  values = flags.FLAGS
  job = job_of(values, tuple(arguments), ROOT)
  # Flushed, so that the lines appear before the output of the commands.
  echo = functools.partial(print, flush=True)
  shell = Shell(root=ROOT, dry_run=values.dry_run, echo=echo)
  interruption.HANDLER.release()  # this process has no state to save
  if values.delete:
    sys.exit(TARGETS[job.target].delete(job, shell))
  if values.plan:
    check_fit(job, shell)
  _, hosts, per_host = job.machines
  shell.note(
    f'{job.target}: commit {job.commit[:12]} on {hosts * job.slices} hosts of '
    f'{per_host} {"GPUs" if job.target == "slurm" else "chips"}\n'
    f'restarted after a preemption or exit code {RESUME}; after other failures '
    f'at most\n{job.max_restarts} times; never after exit code '
    f'{", ".join(map(str, STOP))}'
  )
  try:
    code = run_until_done(job, shell)
  except KeyboardInterrupt:
    raise UserError(
      'interrupted; the job continues. The same command follows it again.'
    ) from None
  if code:
    sys.exit(code)


if __name__ == '__main__':
  process.run(main, define_flags)
