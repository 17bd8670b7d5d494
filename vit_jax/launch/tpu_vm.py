"""One Cloud TPU VM slice, by launch/tpu_vm.sh.

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
  place = (f'--name={name}', f'--zone={job.zone}', f'--project={job.project}')
  return ['bash', SCRIPT, command, *place]


def of_run(job: Job) -> list[str]:
  """Returns the options that describe the run; they come last in a command."""
  data = [f'--data_dir={job.data_dir}'] if job.data_dir else []
  more = [*job.overrides, *job.trainer_flags]
  run = [f'--workdir={job.workdir}', f'--config={job.config}', *data]
  return [*run, *(['--', *more] if more else [])]


def up(job: Job) -> list[str]:
  """Returns the command that creates, installs, trains and follows."""
  options = [f'--type={job.topology.accelerator_type}']
  options += [f'--version={job.version}'] if job.version else []
  options += ['--spot'] if job.spot else []
  return [*on_slice(job, 'up', job.name), *options, *of_run(job)]


def _is_gone(job: Job, shell: Shell) -> bool:
  """Tells whether the slice was preempted."""
  command = ['gcloud', 'compute', 'tpus', 'tpu-vm', 'describe', job.name]
  place = [f'--zone={job.zone}', f'--project={job.project}']
  state = shell.ask(*command, '--format=value(state)', *place)
  return state not in ('READY', None)  # None: it cannot be known


def start(
  job: Job,
  shell: Shell,
  grace_s: int,
  pause: Callable[[float], None] = time.sleep,
) -> int:
  """Runs it until it is done; returns the trainer's exit code.

  Args:
    job: one slice.
    shell: to run it in.
    grace_s: not asked for: Google's own notice cannot be made longer.
    pause: waits for some seconds.
  """
  del grace_s
  command = up(job)
  if shell.dry_run:
    shell.run(*command)
    shell.note('which runs:')
    at = command.index('--') if '--' in command else len(command)
    commands = Shell(shell.root, dry_run=False, say=lambda line: None).ask(
      *command[:at], '--dry_run', *command[at:]
    )
    if commands is None:
      raise UserError(
        f'`{quote(command)}` refuses this; run it by hand to see why.'
      )
    shell.say(commands)
    shell.note(rule(job))
    return 0

  def attempt() -> int:
    code = shell.run(*command)
    if code in (0, *policy.STOP):
      return code
    return policy.RESUME if _is_gone(job, shell) else code

  return policy.until_done(attempt, job.max_restarts, shell.note, pause)


def rule(job: Job) -> str:
  """Describes when the run is started again."""
  stop = ', '.join(map(str, policy.STOP))
  return (
    f'and again after a preemption or exit code {policy.RESUME}; after other '
    f'failures {job.max_restarts} times at most; never after {stop}'
  )
