"""Target queued: runs on Cloud TPU slices, requested as a queued resource.

A queued resource waits for capacity, and is requested again after a preemption.
Only this target runs several slices on Cloud TPU VMs.
"""

import time
from collections.abc import Callable

from vit_jax.errors import UserError
from vit_jax.launch import policy, tpu_vm
from vit_jax.launch.job import Job
from vit_jax.launch.shell import Shell

POLL_S = 30
_MAX_FAILURES = 20  # failures of gcloud in a row, for example without network
_READY = 'ACTIVE'
_WAITING = (
  'ACCEPTED',
  'PROVISIONING',
  'WAITING_FOR_RESOURCES',
  'CREATING',
  'SUSPENDING',
  'DELETING',
)
_ENDED = ('SUSPENDED', 'FAILED')  # requests that cannot be used again

# Default images, by accelerator type; the same as in launch/tpu_vm.sh.
_IMAGES = {
  'v2': 'tpu-ubuntu2204-base',
  'v3': 'tpu-ubuntu2204-base',
  'v4': 'tpu-ubuntu2204-base',
  'v5litepod': 'v2-alpha-tpuv5-lite',
  'v5p': 'v2-alpha-tpuv5',
  'v6e': 'v2-alpha-tpuv6e',
}


def _gcloud(job: Job, command: str, *arguments: str) -> list[str]:
  """Returns `gcloud compute tpus queued-resources COMMAND NAME` with flags."""
  start = ['gcloud', 'compute', 'tpus', 'queued-resources', command, job.name]
  return [*start, *arguments, f'--zone={job.zone}', f'--project={job.project}']


def nodes(job: Job) -> list[str]:
  """Returns the names that Cloud TPU gives to the slices."""
  if job.slices == 1:
    return [job.name]
  return [f'{job.name}-{number}' for number in range(job.slices)]


def create(job: Job) -> list[str]:
  """Returns the command that requests the slices."""
  kind = job.topology.accelerator_type
  image = job.version or _IMAGES[kind.partition('-')[0]]
  named = [f'--node-id={job.name}']
  if job.slices > 1:
    named = [f'--node-count={job.slices}', f'--node-prefix={job.name}']
  spot = ['--spot'] if job.spot else []
  options = [f'--accelerator-type={kind}', f'--runtime-version={image}']
  return _gcloud(job, 'create', *named, *options, *spot, *job.submit_flags)


def describe(job: Job) -> list[str]:
  """Returns the command that prints the state of the request."""
  return _gcloud(job, 'describe', '--format=value(state.state)')


def remove(job: Job) -> list[str]:
  """Returns the command that deletes the request and its slices."""
  return _gcloud(job, 'delete', '--force', '--quiet')


def _wait(job: Job, shell: Shell, pause: Callable[[float], None]) -> None:
  """Requests the slices if necessary, and waits until they exist.

  Raises:
    UserError: the state is unknown, or gcloud fails repeatedly.
  """
  failures = 0
  while True:
    state = shell.query(*describe(job))
    if state == _READY:
      return
    if state in _ENDED:
      shell.check(*remove(job))
      state = ''
    if state == '':
      shell.check(*create(job))
      if shell.dry_run:
        shell.note(f'Repeated every {POLL_S} s until the state is {_READY}:')
        shell.query(*describe(job))
        return
    elif state is not None and state not in _WAITING:
      raise UserError(
        f'the queued resource {job.name} is in the unknown state {state!r}. '
        'Inspect or delete it, then launch again.'
      )
    failures = failures + 1 if state is None else 0
    if failures == _MAX_FAILURES:
      raise UserError(
        f'gcloud failed {failures} times (see above). Fix the cause; the same '
        'command continues.'
      )
    pause(POLL_S)


def start(
  job: Job,
  shell: Shell,
  grace_s: int,
  pause: Callable[[float], None] = time.sleep,
) -> int:
  """Runs the job until it is finished; returns the exit code of the trainer.

  Args:
    job: job on one or several slices.
    shell: shell that runs the commands.
    grace_s: not used, because Google's notice before a preemption is fixed.
    pause: function that waits for the given number of seconds.
  """
  del grace_s
  slices = nodes(job)

  def attempt() -> int:
    _wait(job, shell, pause)
    commands = [
      [*tpu_vm.on_slice(job, 'start', name), *tpu_vm.run_options(job)]
      for name in slices
    ]
    # All slices must start at the same time, because their processes wait for
    # each other.
    code = shell.run_concurrently(commands)
    if code == 0:
      code = shell.run(*tpu_vm.on_slice(job, 'log', slices[0]))
    if code in (0, *policy.STOP) or shell.dry_run:
      return code
    is_preempted = shell.query(*describe(job)) not in (_READY, None)
    return policy.RESUME if is_preempted else code

  if shell.dry_run:
    attempt()
    shell.note(tpu_vm.restart_rule(job))
    return 0
  return policy.restart_until_done(attempt, job.max_restarts, shell.note, pause)
