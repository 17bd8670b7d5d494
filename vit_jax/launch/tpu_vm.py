"""Target tpu-vm: runs on one Cloud TPU VM slice, through launch/tpu_vm.sh.

The slice is created again after a preemption.
"""

import time
from collections.abc import Callable

from vit_jax.errors import UserError
from vit_jax.launch import policy
from vit_jax.launch.job import Job
from vit_jax.launch.shell import Shell, quote

SCRIPT = 'launch/tpu_vm.sh'


def on_slice(job: Job, command: str, name: str) -> list[str]:
  """Returns a command of launch/tpu_vm.sh for one slice."""
  assert job.zone is not None and job.project is not None
  options = (f'--name={name}', f'--zone={job.zone}', f'--project={job.project}')
  return ['bash', SCRIPT, command, *options]


def run_options(job: Job) -> list[str]:
  """Returns the options that describe the run; they must come last."""
  data = [f'--data_dir={job.data_dir}'] if job.data_dir else []
  trainer = [*job.overrides, *job.trainer_flags]
  run = [f'--commit={job.commit}', f'--workdir={job.workdir}']
  run += [f'--config={job.config}', *data]
  if trainer:
    run += ['--', *trainer]
  return run


def up(job: Job) -> list[str]:
  """Returns the command that creates the slice, trains, and follows the log."""
  options = [f'--type={job.topology.accelerator_type}']
  options += [f'--version={job.version}'] if job.version else []
  options += ['--spot'] if job.spot else []
  options += [f'--create_flag={flag}' for flag in job.submit_flags]
  return [*on_slice(job, 'up', job.name), *options, *run_options(job)]


def _is_preempted(job: Job, shell: Shell) -> bool:
  """Returns whether the slice was preempted."""
  command = ['gcloud', 'compute', 'tpus', 'tpu-vm', 'describe', job.name]
  options = [f'--zone={job.zone}', f'--project={job.project}']
  state = shell.query(*command, '--format=value(state)', *options)
  return state not in ('READY', None)  # None: gcloud failed


def start(
  job: Job,
  shell: Shell,
  grace_s: int,
  pause: Callable[[float], None] = time.sleep,
) -> int:
  """Runs the job until it is finished; returns the exit code of the trainer.

  Args:
    job: job on one slice.
    shell: shell that runs the commands.
    grace_s: not used, because Google's notice before a preemption is fixed.
    pause: function that waits for the given number of seconds.
  """
  del grace_s
  command = up(job)
  if shell.dry_run:
    shell.run(*command)
    shell.note('The script runs:')
    at = command.index('--') if '--' in command else len(command)
    commands = Shell(shell.root, dry_run=False, echo=lambda line: None).query(
      *command[:at], '--dry_run', *command[at:]
    )
    if commands is None:
      raise UserError(
        f'`{quote(command)}` failed; run it by hand to see its message.'
      )
    shell.echo(commands)
    shell.note(restart_rule(job))
    return 0

  def attempt() -> int:
    code = shell.run(*command)
    if code in (0, *policy.STOP):
      return code
    return policy.RESUME if _is_preempted(job, shell) else code

  return policy.restart_until_done(attempt, job.max_restarts, shell.note, pause)


def restart_rule(job: Job) -> str:
  """Describes when the run is restarted."""
  stop = ', '.join(map(str, policy.STOP))
  return (
    f'restarted after a preemption or exit code {policy.RESUME}; after other '
    f'failures at most {job.max_restarts} times; never after exit code {stop}'
  )
