r"""Runs on a cluster until done: python -m vit_jax.launch --target=tpu-vm ….

  python -m vit_jax.launch --target=tpu-vm --config=configs/l16_i21k.py \
    --topology=v3:4x4 --workdir=gs://BUCKET/l16 --data_dir=gs://BUCKET/tfds \
    --zone=europe-west4-a --project=PROJECT_ID --dry_run

`plan` is asked first, and what does not fit is not started. The same line again
goes on with what is there. Every key of the config is a flag; other flags of
train go after --.
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
  gke,
  planning,
  queued,
  slurm,
  topology,
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
    'topology', None, 'v3:4x4, in chips; for slurm h100:4x8, NODESxGPUS.'
  )
  flags.DEFINE_string(
    'workdir', None, 'Of the run, on gs:// (slurm: or a shared path).'
  )
  flags.DEFINE_string(
    'data_dir', None, 'TFDS directory; default: that of the hosts.'
  )
  flags.DEFINE_string(
    'name', None, 'Of slice, JobSet or job; default: that of the config.'
  )
  flags.DEFINE_string(
    'zone', None, 'Of Cloud TPU, such as europe-west4-a (tpu-vm, queued).'
  )
  flags.DEFINE_string('project', None, 'Google Cloud project (tpu-vm, queued).')
  flags.DEFINE_string(
    'version', None, 'Runtime image, if not that of the type (same).'
  )
  flags.DEFINE_string(
    'image', None, 'Where the container goes, without a tag (gke).'
  )
  flags.DEFINE_string(
    'service_account', None, "Kubernetes', for the buckets (gke)."
  )
  flags.DEFINE_string('partition', None, 'Of SLURM.')
  flags.DEFINE_string('account', None, 'Of SLURM.')
  flags.DEFINE_string('time_limit', None, 'Of one SLURM job; default 24:00:00.')
  flags.DEFINE_multi_string(
    'submit_flags',
    [],
    'A further flag of the command that submits: sbatch (slurm), gcloud '
    '(queued) or kubectl apply (gke); --submit_flags=--qos=high. Repeatable.',
  )
  flags.DEFINE_integer('slices', 1, 'Of TPUs (queued, gke).')
  flags.DEFINE_bool('spot', False, 'Cheaper, may be taken away (all TPUs).')
  flags.DEFINE_integer('max_restarts', 20, 'After failures.')
  flags.DEFINE_bool('force', False, 'Start whatever plan says.')
  flags.DEFINE_bool('dry_run', False, 'Print what would be run, and end.')
  given = overrides.take([*sys.argv])
  overrides.define_flag(sys.argv)
  flags.DEFINE_multi_string('overrides', given, 'Set by --config.KEY=VALUE.')


def main(arguments: list[str]) -> None:
  """Checks, plans and starts the job; follows it and returns its exit code.

  Raises:
    UserError: the job cannot be started as it is.
  """
  job = job_of(flags.FLAGS, tuple(arguments), ROOT)
  values = flags.FLAGS
  say = functools.partial(print, flush=True)  # in order with the commands'
  shell = Shell(ROOT, dry_run=values.dry_run, say=say)
  interruption.HERE.release()  # there is nothing to save here
  try:
    code = start(job, shell, force=values.force)
  except KeyboardInterrupt:
    raise UserError(
      'interrupted: what was started runs on; the same launch goes on with it.'
    ) from None
  if code:
    sys.exit(code)


def start(
  job: Job,
  shell: Shell,
  *,
  force: bool = False,
  plan: Callable[[Job], dict[str, Any]] = planning.ask,
) -> int:
  """Asks for a plan, then starts the job on its target.

  Args:
    job: checked.
    shell: to run it in.
    force: whatever the plan says, and if it says nothing.
    plan: function that asks `plan`.

  Returns:
    The exit code of the run where the launch follows it; else 0.

  Raises:
    UserError: the plan says that it does not fit.
  """
  result = None
  try:
    result = plan(job)
    shell.note(planning.summary(result))
    planning.refuse_what_does_not_fit(result)
  except UserError as error:
    if not force:
      raise
    shell.note(f'--force, although {error}')
  hosts = job.topology.hosts * job.slices
  kind = 'chips' if job.topology.tpu else 'GPUs'
  shell.note(
    f'{job.target}: commit {job.commit[:12]} on {hosts} hosts of '
    f'{job.topology.per_host} {kind}'
  )
  per_host = job.topology.devices // job.topology.hosts
  return TARGETS[job.target](job, shell, planning.grace_s(result, per_host))


def _value(value: Any) -> Any:
  """Returns the value of a flag, repeated ones as a tuple."""
  return tuple(value) if isinstance(value, list) else value


def job_of(values: Any, arguments: tuple[str, ...], root: pathlib.Path) -> Job:
  """Returns the job that the flags describe.

  Args:
    values: parsed flags.
    arguments: arguments after --.
    root: the checkout that is launched from.

  Raises:
    UserError: a flag is missing, wrong, or not used by the target.
  """
  target = values.target
  if target not in TARGETS:
    came = f'{target!r}' if target else 'not given'
    raise UserError(f'--target is {came}; {closest(target or "", TARGETS)}.')
  needed, taken = job_lib.FLAGS[target]
  for key in (*needed, 'topology', 'workdir'):
    if not values[key].value:
      example = job_lib.EXAMPLES[key]
      if target == 'slurm' and key == 'topology':
        example = 'h100:4x8'
      raise UserError(
        f'--target={target} needs --{key} and it did not come; add '
        f'--{key}={example}.'
      )
  allowed = sorted((*needed, *taken))
  for key in sorted({*_OPTIONAL, 'zone', 'project', 'image'} - {*allowed}):
    if values[key].value != values[key].default:
      raise UserError(
        f'--{key} is of no use to --target={target}, which takes '
        f'{", ".join(allowed)}. Leave it out.'
      )
  stray = [text for text in arguments if not text.startswith('--')]
  if stray:
    raise UserError(
      f'{stray[0]!r} is no flag; flags of train go after --, as in '
      '-- --profile=10:15.'
    )
  commit = checkout.commit(root)
  checkout.check_config(root, commit, values.config_path)
  find = topology.gpus if target == 'slurm' else topology.tpu
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
