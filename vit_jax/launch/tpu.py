"""Target tpu: one or several Cloud TPU slices, requested as a queued resource.

A queued resource waits for capacity. After a preemption, all its slices are
deleted and requested again. launch/tpu_vm_worker.sh runs on each host.
"""

import shlex

from vit_jax.arrays.devices import TPUS
from vit_jax.launch.job import Job, State
from vit_jax.launch.shell import Shell, check_curable

# By the name that gcloud prints; '' without a request. All other states are
# followed by one of these.
_STATES = {
  '': State.ABSENT,
  'ACTIVE': State.READY,
  'SUSPENDED': State.LOST,
  'FAILED': State.LOST,
}
_PACKED = 'vit_jax_code.tar.gz'
_NEW = 'vit_jax_job/code.new'  # the worker's script moves it to code/
_WORKER = 'launch/tpu_vm_worker.sh'
_INSTALLED = f'bash vit_jax_job/code/{_WORKER}'
_INSTALL = (
  f'rm -rf {_NEW} && mkdir -p {_NEW} && tar -xzf {_PACKED} -C {_NEW} && '
  f'bash {_NEW}/{_WORKER} install'
)
_IS_RUNNING = (
  'mkdir -p vit_jax_job && if flock --shared --nonblock vit_jax_job/lock true; '
  'then echo idle; else echo running; fi'
)


def _queued(job: Job, command: str, *words: str) -> list[str]:
  """Returns a command of gcloud for queued resources, with its location."""
  location = [f'--zone={job.zone}', f'--project={job.project}']
  start = 'gcloud compute tpus queued-resources'.split()
  return [*start, command, *words, *location]


def _hosts(index: str) -> list[str]:
  """Returns the flags that select hosts; see `_ssh` for the index."""
  return [f'--node={index}', f'--worker={index}']


def _ssh(job: Job, line: str, index: str = 'all') -> list[str]:
  """Returns the command that runs a line of shell code on hosts.

  Args:
    job: job of the slices.
    line: line, quoted for the shell of the hosts.
    index: 'all' for all hosts of all slices, '0' for the first of the first.
  """
  return _queued(job, 'ssh', job.name, *_hosts(index), f'--command={line}')


def state(job: Job, shell: Shell) -> State | None:
  """Returns the state of the request; None if gcloud fails.

  Raises:
    UserError: the request failed for a reason that will not change.
  """
  fields = '--format=value(state.state,state.failedData.error.message)'
  command = _queued(job, 'describe', job.name, fields)
  answer = shell.query(*command, absent='NOT_FOUND')
  if answer is None:
    return None
  name, _, error = answer.partition('\t')
  if name not in ('', 'ACTIVE'):
    shell.note(f'{name} {error}')
  check_curable(f'the queued resource {job.name}', error)
  return _STATES.get(name, State.WAITING)


def create(job: Job, shell: Shell) -> State | None:
  """Requests the slices; returns None if gcloud fails."""
  kind, hosts, per_host = job.machines
  version = TPUS[kind]
  names = [f'--node-id={job.name}']
  if job.slices > 1:
    names = [f'--node-count={job.slices}', f'--node-prefix={job.name}']
  # Types of machines count cores (v2 to v4, v5p) or chips (v5e, v6e).
  units = hosts * per_host * version.counted
  options = [
    f'--accelerator-type={version.accelerator}-{units}',
    f'--runtime-version={job.version or version.image}',
    *(['--spot'] if job.spot else []),
    *job.submit_flags,
  ]
  answer = shell.query(*_queued(job, 'create', job.name, *names, *options))
  return None if answer is None else State.WAITING


def delete(job: Job, shell: Shell) -> int:
  """Deletes the request and its slices; returns 1 if gcloud fails."""
  command = _queued(job, 'delete', job.name, '--force', '--quiet')
  return int(shell.query(*command) is None)


def run(job: Job, shell: Shell) -> int:
  """Installs and starts unless the job is running; follows its log.

  If the job runs on some of the hosts only, it is not started on the others.
  Without them, it ends within minutes with a code after which it is restarted,
  and the next attempt starts it on all hosts.
  """
  answer = shell.query(*_ssh(job, _IS_RUNNING))
  if answer is None:
    return 1
  if 'running' in answer.split():
    shell.note('already running; not started a second time')
  elif code := _start(job, shell):
    return code
  stop = shlex.join(_ssh(job, f'{_INSTALLED} stop'))
  shell.note(
    f'stop:   {stop} (saves the state)\n'
    'delete: this command with --delete; until then, the slices cost money'
  )
  # The first host has JAX's process 0, which reports the progress.
  return shell.run(*_ssh(job, f'{_INSTALLED} follow', index='0'))


def _start(job: Job, shell: Shell) -> int:
  """Installs the commit on all hosts, and only then starts the trainers."""
  archive = shell.archive(job.folder, job.commit)
  files, hosts = [archive, f'{job.name}:{_PACKED}'], _hosts('all')
  data = [f'TFDS_DATA_DIR={job.data_dir}'] if job.data_dir else []
  start = shlex.join(['env', *data]) + f' {_INSTALLED} start '
  return (
    shell.run(*_queued(job, 'scp', *files, *hosts))
    or shell.run(*_ssh(job, _INSTALL))
    or shell.run(*_ssh(job, start + shlex.join(job.trainer_arguments)))
  )
