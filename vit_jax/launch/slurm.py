"""Target slurm: GPU nodes, with a batch script that requeues itself.

The script is launch/sbatch.template.
"""

import shlex
import sys

from vit_jax.errors import UserError
from vit_jax.launch.job import GRACE_S, RESUME, STOP, Job, State
from vit_jax.launch.shell import Shell, fill


def script(job: Job) -> str:
  """Returns the batch script."""
  _, nodes, gpus = job.machines
  data = shlex.quote(job.data_dir)
  values = vars(job) | dict(
    nodes=nodes,
    gpus=gpus,
    grace_s=GRACE_S,
    folder=job.folder,
    data=f'export TFDS_DATA_DIR={data}' if job.data_dir else '',
    arguments=shlex.join(job.trainer_arguments),
    stop='|'.join(map(str, STOP)),
    resume=RESUME,
  )
  return fill('sbatch.template', **values)


def state(job: Job, shell: Shell) -> State:
  """Returns whether the job is queued or running.

  Raises:
    UserError: squeue failed.
  """
  options = [f'--name={job.name}', '--me', '--noheader', '--format=%i']
  queued = shell.query('squeue', *options)
  if queued is None:
    raise UserError('squeue failed (see above); launch from a login node.')
  if not queued:
    return State.ABSENT
  shell.note(f'already queued as {queued}; not started a second time')
  return State.READY


def create(job: Job, shell: Shell) -> State:
  """Installs the commit in build/ of the checkout and submits the script.

  All nodes must share the checkout.
  """
  folder, python = job.folder, f'{job.folder}/venv/bin/python'
  code = shell.unpack(folder, job.commit)
  shell.check('rm', '-f', f'{folder}/failures', f'{folder}/stop')
  shell.check(sys.executable, '-m', 'venv', f'{folder}/venv')
  # As in launch/environment.sh: tested versions by the version of Python.
  is_new = sys.version_info >= (3, 12)
  constraints = 'constraints-3.13.txt' if is_new else 'constraints.txt'
  install = ['install', '--quiet', f'--constraint={code}/{constraints}']
  shell.check(python, '-m', 'pip', *install, f'--editable={code}[gpu]')
  shell.write(f'{folder}/job.sbatch', script(job))
  given = dict(
    partition=job.partition, account=job.account, time=job.time_limit
  )
  options = [f'--{key}={value}' for key, value in given.items() if value]
  shell.check('sbatch', *options, *job.submit_flags, f'{folder}/job.sbatch')
  return State.READY


def run(job: Job, shell: Shell) -> int:
  """Prints how to follow the job, which SLURM starts and restarts."""
  shell.note(
    f'log:    {job.folder}/log\n'
    'delete: this command with --delete (saves the state; the same command '
    'resumes it)'
  )
  return 0


def delete(job: Job, shell: Shell) -> int:
  """Ends the job after its trainers have saved their state."""
  # The batch script requeues itself unless this file exists.
  shell.check('touch', f'{job.folder}/stop')
  jobs = (f'--name={job.name}', '--me')
  shell.check('scancel', '--state=PENDING', *jobs)
  return shell.run('scancel', '--signal=TERM', *jobs)
