"""Target slurm: runs on GPU nodes, with a batch script that requeues itself.

The script is launch/sbatch.template.
"""

import sys

from vit_jax.launch import policy, templates
from vit_jax.launch.job import Job
from vit_jax.launch.shell import Shell, quote

_TIME_LIMIT = '24:00:00'


def _directives(job: Job, grace_s: int) -> list[str]:
  topology = job.topology
  options = [
    f'job-name={job.name}',
    f'nodes={topology.hosts}',
    # Under SLURM, JAX expects one process per GPU.
    f'ntasks-per-node={topology.per_host}',
    f'gpus-per-node={topology.per_host}',
    'exclusive',
    # 0 requests all memory of the node. --exclusive does not include memory.
    'mem=0',
    f'time={job.time_limit or _TIME_LIMIT}',
    # SLURM sends SIGTERM to the trainers, not to the script, early enough for
    # them to save.
    f'signal=TERM@{grace_s}',
    'requeue',
    'open-mode=append',
    f'output={job.folder}/log',
  ]
  options += [f'partition={job.partition}'] if job.partition else []
  options += [f'account={job.account}'] if job.account else []
  return [f'#SBATCH --{option}' for option in options]


def script(job: Job, grace_s: int) -> str:
  """Returns the batch script.

  Args:
    job: job whose target is SLURM.
    grace_s: seconds between the signal and the end of the time limit.
  """
  python = f'{job.folder}/venv/bin/python'
  step = [
    # Each task ends after it has saved, so the end of the first must not kill
    # the others. All tasks may use all processors of the node.
    'srun',
    '--kill-on-bad-exit=0',
    f'--wait={grace_s}',
    '--cpu-bind=none',
    python,
    '-m',
    'vit_jax.train',
    *job.trainer_arguments,
  ]
  data = ''
  if job.data_dir:
    data = f'export {quote([f"TFDS_DATA_DIR={job.data_dir}"])}\n'
  return templates.fill(
    'sbatch.template',
    directives='\n'.join(_directives(job, grace_s)),
    commit=job.commit,
    data=data,
    step=quote(step),
    folder=job.folder,
    stop='|'.join(map(str, policy.STOP)),
    resume=policy.RESUME,
    max_restarts=job.max_restarts,
  )


def start(
  job: Job, shell: Shell, grace_s: int, python: str = sys.executable
) -> int:
  """Installs the commit in build/ of the checkout and submits the script.

  Args:
    job: job whose target is SLURM.
    shell: shell that runs the commands, in a checkout that all nodes share.
    grace_s: seconds between the signal and the end of the time limit.
    python: interpreter that creates the environment.

  Returns:
    0; from now on, SLURM starts and restarts the job.
  """
  names = [f'--name={job.name}', '--me', '--noheader', '--format=%i']
  if queued := shell.query('squeue', *names):
    shell.note(f'already queued as {queued}; not started a second time')
    return 0
  folder = job.folder
  code, job_python = f'{folder}/code', f'{folder}/venv/bin/python'
  shell.check('rm', '-rf', code, f'{folder}/failures', f'{folder}/stop')
  shell.check('mkdir', '-p', code)
  archive = f'{folder}/code.tar'
  shell.check(
    'git', 'archive', '--format=tar', f'--output={archive}', job.commit
  )
  shell.check('tar', '-xf', archive, '-C', code)
  shell.check(python, '-m', 'venv', f'{folder}/venv')
  # As in launch/environment.sh: tested versions by the version of Python.
  is_new = sys.version_info >= (3, 12)
  constraints = 'constraints-3.13.txt' if is_new else 'constraints.txt'
  install = ['install', '--quiet', f'--constraint={code}/{constraints}']
  shell.check(job_python, '-m', 'pip', *install, f'--editable={code}[gpu]')
  shell.write(f'{folder}/job.sbatch', script(job, grace_s))
  shell.check('sbatch', *job.submit_flags, f'{folder}/job.sbatch')
  shell.note(
    f'log:  {folder}/log\n'
    f'stop: touch {folder}/stop && scancel --signal=TERM --name={job.name}  '
    '(saves the state; the same command resumes it)'
  )
  return 0
