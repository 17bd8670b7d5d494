r"""Starts a run on a cluster: python -m vit_jax.launch --target=tpu-vm ….

  python -m vit_jax.launch --target=tpu-vm --config=configs/l16_i21k.py \
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
from collections.abc import Callable
from typing import Any

from absl import flags

import vit_jax
from vit_jax.cli import process
from vit_jax.config import overrides
from vit_jax.errors import UserError, closest
from vit_jax.launch import (
  checkout,
  clusters,
  gke,
  planning,
  queued,
  slurm,
  tpu_vm,
)
from vit_jax.launch import job as job_lib
from vit_jax.launch.job import Job
from vit_jax.launch.shell import Shell
from vit_jax.processes import interruption

ROOT = pathlib.Path(vit_jax.__file__).parents[1]
TARGETS: dict[str, Callable[[Job, Shell, int], int]] = {
  'tpu-vm': tpu_vm.start,
  'queued': queued.start,
  'gke': gke.start,
  'slurm': slurm.start,
}
_OPTIONAL = sorted({key for _, keys in job_lib.FLAGS.values() for key in keys})


def define_flags() -> None:
  """Defines the flags of this command."""
  flags.DEFINE_string('target', None, f'One of {", ".join(TARGETS)}.')
  flags.DEFINE_string(
    'topology',
    None,
    'TPU slice in chips, such as v3:4x4; for slurm h100:4x8, NODESxGPUS.',
  )
  flags.DEFINE_string(
    'workdir', None, 'Workdir on gs:// (for slurm also a shared path).'
  )
  flags.DEFINE_string(
    'data_dir',
    None,
    'TFDS directory; default: ~/tensorflow_datasets of the hosts.',
  )
  flags.DEFINE_string(
    'name', None, 'Name of the slice, JobSet or job; default: from --config.'
  )
  flags.DEFINE_string(
    'zone', None, 'Google Cloud zone, such as europe-west4-a (tpu-vm, queued).'
  )
  flags.DEFINE_string('project', None, 'Google Cloud project (tpu-vm, queued).')
  flags.DEFINE_string(
    'version',
    None,
    'Runtime image; default: that of the accelerator type (tpu-vm, queued).',
  )
  flags.DEFINE_string(
    'image', None, 'Name of the container image, without a tag (gke).'
  )
  flags.DEFINE_string(
    'service_account',
    None,
    'Kubernetes service account that may use the buckets (gke).',
  )
  flags.DEFINE_string('partition', None, 'SLURM partition (slurm).')
  flags.DEFINE_string('account', None, 'SLURM account (slurm).')
  flags.DEFINE_string(
    'time_limit', None, 'Time limit of the SLURM job (slurm); default 24:00:00.'
  )
  flags.DEFINE_multi_string(
    'submit_flags',
    [],
    'Further flag of the command that requests the machines: gcloud … create '
    '(tpu-vm, queued), kubectl apply (gke) or sbatch (slurm), for example '
    '--submit_flags=--qos=high. May be repeated.',
  )
  flags.DEFINE_integer('slices', 1, 'Number of TPU slices (queued, gke).')
  flags.DEFINE_bool(
    'spot', False, 'Use preemptible machines (tpu-vm, queued, gke).'
  )
  flags.DEFINE_integer(
    'max_restarts', 20, 'Maximum number of restarts after failures.'
  )
  flags.DEFINE_bool(
    'force', False, 'Start even if plan reports that it does not fit.'
  )
  flags.DEFINE_bool(
    'dry_run', False, 'Print the commands and files, and start nothing.'
  )
  extracted = overrides.extract([*sys.argv])
  overrides.define_flag(sys.argv)
  flags.DEFINE_multi_string(
    'overrides', extracted, 'Set by --config.KEY=VALUE.'
  )


def main(arguments: list[str]) -> None:
  """Checks, plans and starts the job that the flags describe.

  If the launch follows the run, the process ends with the exit code of the run.

  Raises:
    UserError: the job cannot be started.
  """
  job = job_of(flags.FLAGS, tuple(arguments), ROOT)
  values = flags.FLAGS
  # Flushed, so that the lines appear before the output of the commands.
  echo = functools.partial(print, flush=True)
  shell = Shell(ROOT, dry_run=values.dry_run, echo=echo)
  interruption.HANDLER.release()  # this process has no state to save
  try:
    code = start(job, shell, force=values.force)
  except KeyboardInterrupt:
    raise UserError(
      'interrupted; the job continues on its machines. Run the same command to '
      'follow it again.'
    ) from None
  if code:
    sys.exit(code)


def start(
  job: Job,
  shell: Shell,
  *,
  force: bool = False,
  plan: Callable[[Job], dict[str, Any]] = planning.predict,
) -> int:
  """Plans the job, then starts it on its target.

  Args:
    job: job whose values are valid.
    shell: shell that runs the commands.
    force: whether to start the job even if it does not fit or cannot be
      planned.
    plan: function that returns the plan of a job.

  Returns:
    The exit code of the run if the launch follows it, else 0.

  Raises:
    UserError: the job does not fit or cannot be planned, and `force` is False.
  """
  result = None
  try:
    result = plan(job)
    shell.note(planning.summary(result))
    planning.check_fit(result)
  except UserError as error:
    if not force:
      raise
    shell.note(f'started because of --force, in spite of this error: {error}')
  hosts = job.topology.hosts * job.slices
  kind = 'chips' if job.topology.tpu else 'GPUs'
  shell.note(
    f'{job.target}: commit {job.commit[:12]} on {hosts} hosts of '
    f'{job.topology.per_host} {kind}'
  )
  per_host = job.topology.devices // job.topology.hosts
  return TARGETS[job.target](job, shell, planning.grace_s(result, per_host))


def _value(value: Any) -> Any:
  """Returns the value of a flag; the list of a repeated flag as a tuple."""
  return tuple(value) if isinstance(value, list) else value


def job_of(values: Any, arguments: tuple[str, ...], root: pathlib.Path) -> Job:
  """Returns the job that the flags describe.

  Args:
    values: parsed flags of this command.
    arguments: arguments after --.
    root: directory of the checkout to launch from.

  Raises:
    UserError: a flag is missing, invalid, or not used by the target.
  """
  target = values.target
  if target not in TARGETS:
    text = f'{target!r}' if target else 'not given'
    raise UserError(f'--target is {text}; {closest(target or "", TARGETS)}.')
  required, optional = job_lib.FLAGS[target]
  for key in (*required, 'topology', 'workdir'):
    if not values[key].value:
      example = job_lib.EXAMPLES[key]
      if target == 'slurm' and key == 'topology':
        example = 'h100:4x8'
      raise UserError(
        f'--target={target} needs --{key}; add --{key}={example}.'
      )
  allowed = sorted((*required, *optional))
  for key in sorted({*_OPTIONAL, 'zone', 'project', 'image'} - {*allowed}):
    if values[key].value != values[key].default:
      raise UserError(
        f'--{key} has no effect with --target={target}. Remove it; allowed: '
        f'{", ".join(allowed)}.'
      )
  not_flags = [text for text in arguments if not text.startswith('--')]
  if not_flags:
    raise UserError(
      f'got the argument {not_flags[0]!r}; only flags are allowed. Flags of '
      'train follow after --, for example: -- --profile=10:15.'
    )
  commit = checkout.commit(root)
  checkout.check_config(root, commit, values.config_path)
  find = clusters.gpus if target == 'slurm' else clusters.tpu
  job = Job(
    target=target,
    name=values.name or job_lib.default_name(values.config_path),
    commit=commit,
    config=values.config_path,
    workdir=values.workdir,
    topology=find(values.topology),
    overrides=tuple(values.overrides),
    trainer_flags=arguments,
    **{key: _value(values[key].value) for key in allowed},
  )
  job_lib.check(job)
  return job


if __name__ == '__main__':
  process.run(main, define_flags)
