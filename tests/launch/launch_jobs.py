"""A job for each target, a substitute for `plan`, and recorded calls.

python tests/launch/launch_jobs.py writes the golden files again.
"""

import dataclasses
import json
import pathlib
import sys

from vit_jax.launch import __main__ as command
from vit_jax.launch import clusters
from vit_jax.launch.job import Job
from vit_jax.launch.shell import Shell

HERE = pathlib.Path(__file__).parent
GOLDEN = HERE / 'golden'
ROOT = HERE.parents[1]
GIB = 2**30
PLAN = {
  'topology': 'v3:4x4',
  'devices': 32,
  'fits': True,
  'peak_bytes_per_device': int(10.8 * GIB),
  'hbm_bytes_per_device': int(15.48 * GIB),
  'predicted_step_seconds': 1.137,
  'predicted_mfu': 0.68,
  'predicted_days': 4.05,
  'predicted_core_days': 129.4,
  'least_days': None,
  'paper_core_days': 230,
  'total_steps': 311_040,
  'bytes': {'parameters': 1.22 * GIB, 'optimizer': 0.1 * GIB, 'average': 0},
}
_GPU_PLAN = PLAN | {
  'topology': 'h100:4x8',
  'predicted_step_seconds': None,
  'predicted_days': None,
  'least_days': 0.14,
}
_COMMON = dict(
  name='l16-i21k',
  commit='0123456789abcdef0123456789abcdef01234567',
  config='configs/l16_i21k.py',
  workdir='gs://my-bucket/l16',
  data_dir='gs://my-bucket/tfds',
  overrides=('--config.batch_size=2048',),
)
_CLOUD = dict(zone='europe-west4-a', project='my-project')
JOBS = {
  'tpu-vm': Job(
    target='tpu-vm', topology=clusters.tpu('v3:4x4'), **_COMMON, **_CLOUD
  ),
  'queued': Job(
    target='queued',
    topology=clusters.tpu('v5e:4x8'),
    slices=2,
    spot=True,
    **_COMMON,
    **_CLOUD,
  ),
  'gke': Job(
    target='gke',
    topology=clusters.tpu('v6e:4x4'),
    slices=2,
    spot=True,
    image='europe-docker.pkg.dev/my-project/images/vit_jax',
    service_account='trainer',
    **_COMMON,
  ),
  'slurm': Job(
    target='slurm',
    topology=clusters.gpus('h100:4x8'),
    partition='gpu',
    account='vision',
    submit_flags=('--qos=high',),
    trainer_flags=('--profile=100:110',),
    **_COMMON,
  ),
}


def plan(job):
  """Replaces `planning.predict`, which compiles for a minute."""
  return _GPU_PLAN if job.target == 'slurm' else PLAN


def dry_run(job, plan=plan, **options):
  """Returns the output of a dry run."""
  lines = []
  shell = Shell(ROOT, dry_run=True, echo=lines.append)
  assert command.start(job, shell, plan=plan, **options) == 0
  return '\n'.join(lines).replace(sys.executable, 'PYTHON') + '\n'


def changed(target, **changes):
  """Returns the job of a target with other values."""
  return dataclasses.replace(JOBS[target], **changes)


def script_of(printed, path):
  """Returns a file that a dry run prints as a here-document."""
  start = f"cat >{path} <<'END_OF_FILE'\n"
  return printed.partition(start)[2].partition('\nEND_OF_FILE\n')[0]


# Records its arguments; its output and exit code are given by a file.
PROGRAM = """#!{python}
import json, os, pathlib, sys
here = pathlib.Path(__file__).parent
name = os.path.basename(sys.argv[0])
with (here / 'calls.jsonl').open('a') as file:
  file.write(json.dumps([name, *sys.argv[1:]]) + '\\n')
answers = here / (name + '.answers')
rows = json.loads(answers.read_text()) if answers.exists() else []
for row in rows:
  if row['has'] in sys.argv:
    text, code, error = row['turns'][0]
    if len(row['turns']) > 1:
      row['turns'].pop(0)
    answers.write_text(json.dumps(rows))
    print(text)
    print(error, file=sys.stderr)
    sys.exit(code)
"""


class Programs:
  """Substitutes for programs, in a directory for PATH."""

  def __init__(self, folder, *names):
    self.folder = folder
    folder.mkdir()
    for name in names:
      path = folder / name
      path.write_text(PROGRAM.format(python=sys.executable))
      path.chmod(0o755)

  def answer(self, name, has, *turns):
    """Sets the (text, code, error) of calls with the argument `has`.

    Each call uses the next item; the last one is repeated.
    """
    file = self.folder / f'{name}.answers'
    rows = json.loads(file.read_text()) if file.exists() else []
    file.write_text(json.dumps([*rows, {'has': has, 'turns': turns}]))

  def calls(self):
    """Returns [[program, argument, …], …]."""
    file = self.folder / 'calls.jsonl'
    text = file.read_text() if file.exists() else ''
    return [json.loads(line) for line in text.splitlines()]


if __name__ == '__main__':
  for name, job in JOBS.items():
    (GOLDEN / f'{name}.txt').write_text(dry_run(job))
