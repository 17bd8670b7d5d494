"""Describes a run on a cluster, and checks the description."""

import dataclasses
import pathlib
import re

from vit_jax.errors import UserError, check_range
from vit_jax.launch.clusters import Topology


@dataclasses.dataclass(frozen=True)
class Job:
  """One run on a cluster.

  Attributes:
    target: 'tpu-vm', 'queued', 'gke' or 'slurm'.
    name: name of the slice, the JobSet or the SLURM job.
    commit: commit to install.
    config: value of --config of train.
    workdir: workdir of the run, visible to all hosts.
    topology: topology of one slice, or of the GPU cluster.
    overrides: flags of the form --config.KEY=VALUE.
    trainer_flags: other flags of train.
    data_dir: TFDS directory; None for the default of the hosts.
    slices: number of slices.
    spot: whether to use preemptible machines.
    max_restarts: maximum number of restarts after failures; restarts after
      preemptions are not counted.
    zone, project: Google Cloud zone and project.
    version: runtime image of the TPU VMs.
    image: name of the container image, without a tag.
    service_account: Kubernetes service account that may read and write the
      buckets.
    partition, account, time_limit: options of the SLURM job.
    submit_flags: further flags of the command that requests the machines:
      gcloud … create, kubectl apply or sbatch.
  """

  target: str
  name: str
  commit: str
  config: str
  workdir: str
  topology: Topology
  overrides: tuple[str, ...] = ()
  trainer_flags: tuple[str, ...] = ()
  data_dir: str | None = None
  slices: int = 1
  spot: bool = False
  max_restarts: int = 20
  zone: str | None = None
  project: str | None = None
  version: str | None = None
  image: str | None = None
  service_account: str | None = None
  partition: str | None = None
  account: str | None = None
  time_limit: str | None = None
  submit_flags: tuple[str, ...] = ()

  @property
  def trainer_arguments(self) -> tuple[str, ...]:
    """Returns the arguments of `python -m vit_jax.train`."""
    required = (f'--config={self.config}', f'--workdir={self.workdir}')
    return (*required, *self.overrides, *self.trainer_flags)

  @property
  def folder(self) -> str:
    """Returns the folder in the checkout for files of this job."""
    return f'build/{self.name}'


# Required and optional flags of each target.
_COMMON = ('data_dir', 'max_restarts')
FLAGS = {
  'tpu-vm': (
    ('zone', 'project'),
    (*_COMMON, 'spot', 'version', 'submit_flags'),
  ),
  'queued': (
    ('zone', 'project'),
    (*_COMMON, 'spot', 'version', 'slices', 'submit_flags'),
  ),
  'gke': (
    ('image',),
    (*_COMMON, 'spot', 'slices', 'service_account', 'submit_flags'),
  ),
  'slurm': (
    (),
    (*_COMMON, 'partition', 'account', 'time_limit', 'submit_flags'),
  ),
}
EXAMPLES = {
  'zone': 'europe-west4-a',
  'project': 'PROJECT_ID',
  'image': 'europe-docker.pkg.dev/PROJECT_ID/REPOSITORY/vit_jax',
  'workdir': 'gs://BUCKET/DIRECTORY',
  'topology': 'v3:4x4',
}
_NAME = r'[a-z]([a-z0-9-]*[a-z0-9])?'
_SLURM_WORD = r'[A-Za-z0-9_][\w.,-]*'
_TIME = r'(\d+-)?\d+(:\d\d){0,2}'
_IMAGE = r'[a-z0-9][a-z0-9._/:-]*/[a-z0-9][a-z0-9._-]*'
# Kubernetes appends slice, host and a hash to the names of pods, which have at
# most 63 characters.
_NAME_LENGTH = 40


def default_name(config: str) -> str:
  """Returns the default name of a job: 'l16-i21k' for configs/l16_i21k.py."""
  path, _, argument = config.partition(':')
  words = f'{pathlib.PurePath(path).stem} {argument}'.lower()
  name = re.sub('[^a-z0-9]+', '-', words).strip('-')[:_NAME_LENGTH].strip('-')
  return name if re.fullmatch(_NAME, name) else f'vit-{name}'.strip('-')


def check(job: Job) -> None:
  """Checks the values of a job before anything is started.

  Raises:
    UserError: a value is not allowed.
  """
  if not re.fullmatch(_NAME, job.name) or len(job.name) > _NAME_LENGTH:
    raise UserError(
      f'--name is {job.name!r}; allowed: a lower-case letter, then lower-case '
      f'letters, digits and hyphens, at most {_NAME_LENGTH} characters. Choose '
      'a name such as vit-l16.'
    )
  check_range('--slices', job.slices, at_least=1)
  check_range('--max_restarts', job.max_restarts, at_least=0)
  if job.slices > 1 and not (job.topology.tpu and job.topology.tpu.multislice):
    raise UserError(
      f'--slices is {job.slices} and --topology is {job.topology.name}, but '
      'only slices of v4 and later versions can train together. Give another '
      '--topology, or --slices=1.'
    )
  if job.target in ('tpu-vm', 'queued'):
    _ = job.topology.accelerator_type  # raises if there are no such TPU VMs
  if job.target == 'gke' and job.topology.tpu and not job.topology.tpu.gke:
    raise UserError(
      f'--topology is {job.topology.name}; GKE does not offer '
      f'{job.topology.name.partition(":")[0]}. Use --target=tpu-vm.'
    )
  _check_paths(job)
  for key, pattern in (
    ('image', _IMAGE),
    ('service_account', _NAME),
    ('partition', _SLURM_WORD),
    ('account', _SLURM_WORD),
    ('time_limit', _TIME),
  ):
    value = getattr(job, key)
    if value is not None and not re.fullmatch(pattern, value, re.ASCII):
      example = {'image': EXAMPLES['image'], 'time_limit': '2-00:00:00'}
      raise UserError(
        f'--{key} is {value!r}; give a value such as {example.get(key, "vit")}.'
      )


def _check_paths(job: Job) -> None:
  """Checks that every host can reach the workdir and the data."""
  shared = 'a path on gs://'
  if job.target == 'slurm':
    shared = 'a path on gs://, or an absolute path that all nodes share'
  for key, path in (('workdir', job.workdir), ('data_dir', job.data_dir)):
    if path is None or re.fullmatch(r'gs://[^/].*', path, re.DOTALL):
      continue
    if job.target == 'slurm' and path.startswith('/'):
      continue
    raise UserError(
      f'--{key} is {path!r}; it must be {shared}, because the disks of the '
      f'machines are temporary. Give --{key}=gs://BUCKET/DIRECTORY.'
    )
