"""A run on a cluster: its description, its checks, and what a target does.

A target is one of the modules `tpu`, `gke` and `slurm`. It has these functions
of a job and a shell, through which all commands go:
- `state` returns the `State`; None if a tool failed and may succeed later.
- `create` requests the machines or submits the job; returns the state after it.
- `run` starts the run unless it is running, and returns its exit code.
- `delete` deletes the machines or ends the job, and keeps the workdir; returns
  0, or another number if a tool failed and may succeed later.

`launch` asks for the state until it is READY, and deletes and requests the
machines if necessary. It then calls `run`, and starts again from the state
unless the exit code ends the run. For example, this happens if one of two TPU
slices is preempted:

| call | result |
|---|---|
| `state` | ABSENT |
| `create` | WAITING: both slices are requested as one queued resource |
| `state`, every 30 s | WAITING …, READY |
| `run` | installs and starts on all hosts, and follows host 0: exit code 45 |
| `state` | WAITING: the slices are being deleted, so it was a preemption, |
| | which does not count as a failure |
| `state`, every 30 s | WAITING …, LOST |
| `delete`, `state` | ABSENT: both slices are deleted |
| `create` | WAITING: both slices are requested again |
| `state`, every 30 s | WAITING …, READY |
| `run` | the trainer resumes from its workdir, and finishes: exit code 0 |

A cluster that restarts jobs itself (GKE, SLURM) is READY when `create` has
submitted the job. Then `run` prints how to follow it, and returns 0.
"""

import dataclasses
import enum
import math
import pathlib
import re
import sys
from typing import Any

from vit_jax.arrays.devices import GPUS, TPUS, parse_gpus
from vit_jax.cli import fields
from vit_jax.errors import (
  EXIT_DIVERGED,
  EXIT_PREEMPTED,
  EXIT_USER_ERROR,
  UserError,
  check_range,
  closest,
)
from vit_jax.launch.shell import Shell

# Exit codes after which a run is not restarted, because it would end in the
# same way, or because the user has to look at it.
STOP = (EXIT_USER_ERROR, EXIT_DIVERGED)
# Exit code after which a run is restarted without a limit, because the state is
# saved. The number of restarts after other codes (a crash, a storage error, a
# stuck or lost process, a lost connection) is limited. A process is usually
# stuck because of the network or a host, so restarting helps.
RESUME = EXIT_PREEMPTED

_CHIPS_PER_HOST = 4  # in slices of several hosts, of every version
_ONE_SLICE = ('v2', 'v3')  # their slices cannot train together

# Kubernetes appends slice, host and a hash to the names of pods, which have at
# most 63 characters.
_NAME = r'[a-z]([a-z0-9-]{0,38}[a-z0-9])?'


def _flag(
  help: str,
  default: Any = '',
  targets: str = 'tpu gke slurm',
  example: str = '',
) -> Any:
  """Declares a field of `Job` that is a flag of `launch`.

  Args:
    help: help text.
    default: value if the flag is not given.
    targets: names of the targets that use the flag, separated by spaces.
    example: value that the message about a missing flag suggests; '' if the
      flag is optional.
  """
  return fields.flag(help, default, targets=targets, example=example)


@dataclasses.dataclass(frozen=True)
class Job:
  """One run on a cluster.

  Attributes:
    target: 'tpu', 'gke' or 'slurm'.
    commit: commit to install.
    config: value of --config of train.
    overrides: flags of the form --config.KEY=VALUE.
    trainer_flags: other flags of train.

  The other fields are flags of `launch`, with the help texts below.
  """

  target: str
  commit: str
  config: str
  overrides: tuple[str, ...] = ()
  trainer_flags: tuple[str, ...] = ()
  topology: str = _flag(
    'TPU slice in chips, such as v3:4x4; for slurm h100:4x8, NODESxGPUS.',
    example='v3:4x4 (for slurm h100:4x8)',
  )
  workdir: str = _flag(
    'Workdir on gs:// (for slurm also a shared path).',
    example='gs://BUCKET/DIRECTORY',
  )
  data_dir: str = _flag(
    'TFDS directory; default: ~/tensorflow_datasets of the hosts.'
  )
  name: str = _flag(
    'Name of the slices, JobSet or job; default: from --config.'
  )
  zone: str = _flag('Google Cloud zone.', '', 'tpu', 'europe-west4-a')
  project: str = _flag('Google Cloud project.', '', 'tpu', 'PROJECT_ID')
  version: str = _flag(
    'Runtime image; default: that of the accelerator type.', '', 'tpu'
  )
  image: str = _flag(
    'Name of the container image, without a tag.',
    targets='gke',
    example='europe-docker.pkg.dev/PROJECT_ID/REPOSITORY/vit_jax',
  )
  service_account: str = _flag(
    'Kubernetes service account that may use the buckets.', 'default', 'gke'
  )
  partition: str = _flag('SLURM partition.', '', 'slurm')
  account: str = _flag('SLURM account.', '', 'slurm')
  time_limit: str = _flag('Time limit of the job.', '24:00:00', 'slurm')
  submit_flags: tuple[str, ...] = _flag(
    'Further flag of the command that requests the machines: gcloud … create '
    '(tpu), kubectl apply (gke) or sbatch (slurm), for example '
    '--submit_flags=--qos=high. May be repeated.',
    (),
  )
  slices: int = _flag('Number of TPU slices.', 1, 'tpu gke')
  spot: bool = _flag('Use preemptible machines.', False, 'tpu gke')
  max_restarts: int = _flag('Maximum number of restarts after failures.', 20)

  @property
  def machines(self) -> tuple[str, int, int]:
    """Returns the machines of one slice, or of the GPU cluster.

    Returns:
      TPU version or kind of GPU; number of hosts; chips or GPUs per host.

    Raises:
      UserError: the target does not offer the topology, or only for one slice.
    """
    if self.target == 'slurm':
      if parsed := parse_gpus(self.topology):
        return parsed
      known, form = [f'{kind}:4x8' for kind in GPUS], 'KIND:NODESxGPUS'
    else:
      known = []
      for name, tpu in TPUS.items():
        # Name of the version in this service; '' if it is not offered.
        offered_as = tpu.gke if self.target == 'gke' else tpu.accelerator
        if offered_as and (self.slices == 1 or name not in _ONE_SLICE):
          known += [f'{name}:{shape}' for shape in tpu.shapes.split()]
      kind, _, shape = self.topology.partition(':')
      if self.topology in known:
        chips = math.prod(map(int, shape.split('x')))
        is_one_host = chips <= TPUS[kind].single_host
        per_host = chips if is_one_host else _CHIPS_PER_HOST
        return kind, chips // per_host, per_host
      form = f'VERSION:SHAPE in chips (slices: {self.slices})'
    raise UserError(
      f'--topology is {self.topology!r}; give {form} for '
      f'--target={self.target}; {closest(self.topology, known)}.'
    )

  @property
  def trainer_arguments(self) -> tuple[str, ...]:
    """Returns the arguments of `python -m vit_jax.train`."""
    required = (f'--config={self.config}', f'--workdir={self.workdir}')
    return (*required, *self.overrides, *self.trainer_flags)

  @property
  def folder(self) -> str:
    """Returns the folder in the checkout for files of this job."""
    return f'build/{self.name}'


FLAGS = {
  field.name: field for field in dataclasses.fields(Job) if field.metadata
}
# Time in which every run can save its state after SIGTERM, in seconds. First
# the processes agree, within 120 s, on the step to save, and finish it. Then
# each host writes its part of the state: at 100 MB/s, which all known buckets
# exceed, 42 GB, or 3.5 billion parameters with Adam on one host.
GRACE_S = 600


def default_name(config: str) -> str:
  """Returns the default name of a job: 'l16-i21k' for configs/l16_i21k.py."""
  path, _, argument = config.partition(':')
  words = f'{pathlib.PurePath(path).stem} {argument}'.lower()
  name = re.sub('[^a-z0-9]+', '-', words).strip('-')
  name = name if re.match('[a-z]', name) else f'vit-{name}'
  return name[:40].strip('-')


def check(job: Job) -> None:
  """Checks the values of a job before anything is started.

  Raises:
    UserError: a value is missing, not allowed, or not used by the target.
  """
  for key, field in FLAGS.items():
    value, flag = getattr(job, key), field.metadata
    problem = ''
    if job.target not in flag['targets'].split():
      if value != field.default:
        problem = f'has no effect with --target={job.target}; remove it'
    elif flag['example'] and not value:
      problem = f'is missing; add --{key}={flag["example"]}'
    elif key in ('workdir', 'data_dir') and value:
      is_shared = job.target == 'slurm' and value.startswith('/')
      if not (is_shared or re.match('gs://[^/]', value)):
        problem = (
          f'is {value!r}; allowed: a path on gs:// (for slurm also an absolute '
          'path that all nodes share), because the disks of the machines are '
          'temporary'
        )
    elif key == 'name' and not re.fullmatch(_NAME, value):
      problem = (
        f'is {value!r}; allowed: a lower-case letter, then lower-case letters, '
        'digits and hyphens, at most 40 characters'
      )
    elif isinstance(value, str) and re.search(r'\s', value):
      problem = f'is {value!r}; it must not contain white space'
    if problem:
      raise UserError(f'--{key} {problem}.')
  check_range('--slices', job.slices, at_least=1)
  check_range('--max_restarts', job.max_restarts, at_least=0)
  _ = job.machines  # raises if they do not exist


def commit_of(root: pathlib.Path, config: str) -> str:
  """Returns the current commit, after a check that it contains the config.

  Args:
    root: directory of the checkout to launch from.
    config: value of --config, with or without an argument after a colon.

  Raises:
    UserError: the directory is not a git checkout of this project, or the
      config is not in the commit.
  """
  git = Shell(root=root, dry_run=False, echo=lambda line: None)
  commit = git.query('git', 'rev-parse', 'HEAD') or ''
  file = pathlib.PurePath(config.partition(':')[0]).as_posix()
  # An installed package may be inside of the checkout of another project.
  needed = [f'{commit}:{name}' for name in ('launch/jobset.template', file)]
  if None in [git.query('git', 'cat-file', '-e', name) for name in needed]:
    raise UserError(
      f'--config is {config!r}, which is not in the commit to install, '
      f'{commit[:12] or "none"} of {root}. Launch from a clone of the '
      'repository, commit the config, and give its path in it.'
    )
  if git.query('git', 'status', '--porcelain', '--untracked-files=no'):
    print('note: uncommitted changes are not installed', file=sys.stderr)
  return commit


class State(enum.Enum):
  """State of the machines of a job, or of a job that a cluster manages."""

  ABSENT = 'nothing is requested'
  WAITING = 'requested and not usable yet, or being deleted'
  READY = 'the machines exist, or the cluster manages the job'
  LOST = 'preempted or failed; has to be deleted and requested again'
