"""Cloud TPU slices by a queued resource: it waits, and comes back if preempted.

The one way to several slices on Cloud TPU VMs.
"""

import time
from collections.abc import Callable

from vit_jax.errors import UserError
from vit_jax.launch import policy, tpu_vm
from vit_jax.launch.job import Job
from vit_jax.launch.shell import Shell

POLL_S = 30
_MAX_SILENT = 20  # failures in a row, of a network perhaps
_READY = 'ACTIVE'
_WAITING = (
  *('ACCEPTED', 'PROVISIONING', 'WAITING_FOR_RESOURCES', 'CREATING'),
  *('SUSPENDING', 'DELETING'),
)
_ENDED = ('SUSPENDED', 'FAILED')  # such a request cannot be used again

# The images of launch/tpu_vm.sh, for what --topology gives.
_IMAGES = {
  'v2': 'tpu-ubuntu2204-base',
  'v3': 'tpu-ubuntu2204-base',
  'v4': 'tpu-ubuntu2204-base',
  'v5litepod': 'v2-alpha-tpuv5-lite',
  'v5p': 'v2-alpha-tpuv5',
  'v6e': 'v2-alpha-tpuv6e',
}


def _gcloud(job: Job, command: str, *arguments: str) -> list[str]:
  """gcloud compute tpus queued-resources COMMAND NAME …"""
  start = ['gcloud', 'compute', 'tpus', 'queued-resources', command, job.name]
  return [*start, *arguments, f'--zone={job.zone}', f'--project={job.project}']


def nodes(job: Job) -> list[str]:
  """Returns the names of the slices, which Cloud TPU derives from a prefix."""
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
  more = job.submit_flags
  return _gcloud(job, 'create', *named, *options, *spot, *more)


def describe(job: Job) -> list[str]:
  """Returns the command that prints the state of the request."""
  return _gcloud(job, 'describe', '--format=value(state.state)')


def remove(job: Job) -> list[str]:
  """Returns the command that deletes the request and its slices."""
  return _gcloud(job, 'delete', '--force', '--quiet')


def _wait(job: Job, shell: Shell, pause: Callable[[float], None]) -> None:
  """Waits until the slices exist.

  They are requested, and requested again if needed.

  Raises:
    UserError: the state is unknown, or gcloud fails repeatedly.
  """
  silent = 0
  while True:
    state = shell.ask(*describe(job))
    if state == _READY:
      return
    if state in _ENDED:
      shell.check(*remove(job))
      state = ''
    if state == '':
      shell.check(*create(job))
      if shell.dry_run:
        shell.note(f'asked every {POLL_S} s until it says {_READY}:')
        shell.ask(*describe(job))
        return
    elif state is not None and state not in _WAITING:
      raise UserError(
        f'the queued resource {job.name} is {state!r}, which is not known '
        'here; look at it, or delete it, then launch again.'
      )
    silent = silent + 1 if state is None else 0
    if silent == _MAX_SILENT:
      raise UserError(
        f'gcloud failed {silent} times, see above; the same launch goes on.'
      )
    pause(POLL_S)


def start(
  job: Job,
  shell: Shell,
  grace_s: int,
  pause: Callable[[float], None] = time.sleep,
) -> int:
  """Runs it until it is done; returns the trainer's exit code.

  Args:
    job: one slice or several.
    shell: to run it in.
    grace_s: not asked for: Google's own notice cannot be made longer.
    pause: waits for some seconds.
  """
  del grace_s
  slices = nodes(job)

  def attempt() -> int:
    _wait(job, shell, pause)
    each = [
      [*tpu_vm.on_slice(job, 'start', name), *tpu_vm.of_run(job)]
      for name in slices
    ]
    code = shell.run_together(each)  # at once: the processes await each other
    if code == 0:
      code = shell.run(*tpu_vm.on_slice(job, 'log', slices[0]))
    if code in (0, *policy.STOP) or shell.dry_run:
      return code
    gone = shell.ask(*describe(job)) not in (_READY, None)
    return policy.RESUME if gone else code

  if shell.dry_run:
    attempt()
    shell.note(tpu_vm.rule(job))
    return 0
  return policy.until_done(attempt, job.max_restarts, shell.note, pause)
