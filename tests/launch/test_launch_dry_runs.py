"""Tests of dry runs, and of how a shell, Kubernetes and SLURM read them."""

import os
import pathlib
import shutil
import subprocess
import sys

import failure_policy
import launch_jobs
import pytest
import yaml
from launch_jobs import NASTY, Programs

from vit_jax.launch import gke, slurm

ROOT = launch_jobs.ROOT


@pytest.fixture
def programs(tmp_path, monkeypatch):
  return Programs(tmp_path, monkeypatch)


# Parts of the commands that request the machines, install, and start, in this
# order.
COMMANDS = {
  'tpu': [
    'create l16-i21k --node-id=l16-i21k --accelerator-type=v3-32 '
    '--runtime-version=tpu-ubuntu2204-base --zone=europe-west4-a',
    'scp build/l16-i21k/code.tar.gz l16-i21k:vit_jax_code.tar.gz --node=all',
    "--worker=all '--command=env TFDS_DATA_DIR=gs://my-bucket/tfds bash "
    'vit_jax_job/code/launch/tpu_vm_worker.sh start --config=',
  ],
  'slices': [
    '--node-count=2 --node-prefix=l16-i21k --accelerator-type=v5litepod-32 '
    '--runtime-version=v2-alpha-tpuv5-lite --spot',
  ],
  'gke': [
    'docker build --file=build/l16-i21k/code/launch/Dockerfile.tpu --tag=',
    'docker push europe-docker.pkg.dev/my-project/images/vit_jax:0123456789ab',
    'kubectl apply --filename=build/l16-i21k/jobset.yaml',
  ],
  'slurm': [
    "--constraint=build/l16-i21k/code/constraints.txt '--editable=build/",
    'build/l16-i21k/venv/bin/python -m vit_jax.train --config=',
    'sbatch --partition=gpu --account=vision --time=24:00:00 --qos=high build/',
  ],
}


@pytest.mark.parametrize('name', launch_jobs.JOBS)
def test_the_commands_of_a_launch(name):
  before = set(ROOT.glob('build/*'))
  printed = launch_jobs.dry_run(launch_jobs.JOBS[name])
  # The file of tested versions is that of the Python that runs the command.
  printed = printed.replace('constraints-3.13.txt', 'constraints.txt')
  positions = [printed.index(part) for part in COMMANDS[name]]
  assert positions == sorted(positions)
  assert set(ROOT.glob('build/*')) == before


def test_machines_are_those_of_the_topology():
  """Hosts, chips and GPUs per host, and the labels of spot machines."""
  job = _job(launch_jobs.JOBS['gke'])
  assert job['parallelism'] == job['completions'] == 4
  pod = job['template']['spec']
  assert pod['containers'][0]['resources']['limits'] == {'google.com/tpu': '4'}
  assert pod['nodeSelector'] == {
    'cloud.google.com/gke-tpu-accelerator': 'tpu-v6e-slice',
    'cloud.google.com/gke-tpu-topology': '4x4',
    'cloud.google.com/gke-spot': 'true',
  }
  script = slurm.script(launch_jobs.JOBS['slurm'])
  for key, value in (('nodes', 4), ('ntasks-per-node', 8), ('mem', 0)):
    assert f'#SBATCH --{key}={value}\n' in script


@pytest.mark.parametrize('name', launch_jobs.JOBS)
def test_a_dry_run_is_a_script_that_does_what_a_run_does(programs, name):
  """A shell executes the printed commands; both make the same calls."""
  job = launch_jobs.changed(
    name, overrides=(f'--config.x={NASTY}', *NASTY), data_dir=f'gs://b/{NASTY}'
  )
  (programs.bin / 'cat').symlink_to(str(shutil.which('cat', path='/usr/bin')))
  subprocess.run(
    [str(shutil.which('sh', path='/usr/bin:/bin'))],
    input=launch_jobs.dry_run(job),
    cwd=programs.checkout,
    text=True,
    check=True,
  )
  folder = programs.checkout / 'build/l16-i21k'
  files = {path: path.read_text() for path in folder.glob('job*')}
  expected = programs.calls()
  (programs.bin / 'calls.jsonl').unlink()
  programs.states('', 'ACTIVE')
  assert launch_jobs.run(job, programs.shell) == 0
  calls = programs.calls()
  if job.target == 'tpu':
    assert calls.pop(2) == calls[0]  # the state is asked for again
  assert calls == expected
  assert files == {path: path.read_text() for path in folder.glob('job*')}
  assert len(files) == (job.target != 'tpu')


def _job(job):
  (replicated,) = yaml.safe_load(gke.manifest(job))['spec']['replicatedJobs']
  return replicated['template']['spec']


def test_kubernetes_passes_the_given_words():
  job = launch_jobs.changed('gke', overrides=tuple(NASTY), data_dir='gs://$(x)')
  (container,) = _job(job)['template']['spec']['containers']
  words = [failure_policy.expanded(word) for word in container['command']]
  assert words[5:] == NASTY
  assert failure_policy.expanded(container['env'][0]['value']) == 'gs://$(x)'


_REQUEUED = [['scontrol', 'requeue', '7']]


@pytest.mark.parametrize(
  ('failure', 'action', 'ends', 'then'),
  [
    (42, 'RestartJobSetAndIgnoreMaxRestarts', 0, _REQUEUED),
    *[(c, 'RestartJobSet', 0, _REQUEUED) for c in (1, 44, 45, 134, 137, 143)],
    *[(code, 'FailJobSet', code, []) for code in (2, 43)],
    (failure_policy.DISRUPTED, 'RestartJobSetAndIgnoreMaxRestarts', None, []),
  ],
)
def test_reactions_of_clusters(programs, failure, action, ends, then):
  manifest = yaml.safe_load(gke.manifest(launch_jobs.JOBS['gke']))
  assert failure_policy.action(manifest, failure) == action
  if ends is not None:
    script = slurm.script(launch_jobs.JOBS['slurm'])
    done, calls = _run_script(programs, script, failure)
    assert (done.returncode, calls[1:]) == (ends, then), done.stderr


def _run_script(programs, script, code):
  """Starts a batch script once; returns its end and the commands it ran."""
  for file in ('answers.json', 'calls.jsonl'):
    (programs.bin / file).unlink(missing_ok=True)
  programs.answer('srun', ('', code, ''))
  done = subprocess.run(
    [str(shutil.which('bash', path='/usr/bin:/bin')), '-c', script],
    env={
      'PATH': f'{programs.bin}:/usr/bin:/bin',
      'SLURM_SUBMIT_DIR': str(programs.checkout),
      'SLURM_JOB_ID': '7',
    },
    capture_output=True,
    text=True,
    timeout=60,
  )
  return done, programs.calls()


def test_a_batch_script_passes_the_given_words(programs):
  job = launch_jobs.changed('slurm', overrides=tuple(NASTY), trainer_flags=())
  done, calls = _run_script(programs, slurm.script(job), 0)
  assert done.returncode == 0, done.stderr
  assert calls[0][0] == 'srun' and calls[0][-len(NASTY) :] == NASTY
  assert not list(programs.root.rglob('pwned'))


def test_a_batch_script_counts_failures_and_ends_after_delete(programs):
  script = slurm.script(launch_jobs.changed('slurm', max_restarts=2))
  codes = [42, 1, 42, 42, 45, 42, 1]
  ended = [_run_script(programs, script, code) for code in codes]
  assert [bool(calls[1:]) for _, calls in ended] == [True] * 6 + [False]
  assert ended[-1][0].returncode == 1
  assert 'after 2 restarts' in ended[-1][0].stderr
  (programs.checkout / 'build/l16-i21k/stop').touch()
  done, calls = _run_script(programs, script, 42)
  assert (done.returncode, len(calls)) == (42, 1)


def _shellcheck():
  beside = str(pathlib.Path(sys.executable).parent)
  return shutil.which('shellcheck') or shutil.which('shellcheck', path=beside)


@pytest.mark.skipif(not _shellcheck(), reason='shellcheck is not installed')
def test_shellcheck_accepts_all_scripts(tmp_path):
  job = launch_jobs.changed('slurm', overrides=tuple(NASTY))
  (tmp_path / 'job.sbatch').write_text(slurm.script(job))
  task = yaml.safe_load((ROOT / 'launch/sky.yaml').read_text())
  for key in ('setup', 'run'):
    (tmp_path / key).write_text(f'#!/bin/bash\n{task[key]}')
  # The quoted text looks as if it should be expanded or escaped.
  own = ['--exclude=SC2016,SC1003', *map(str, tmp_path.iterdir())]
  for files in (own, sorted(map(str, (ROOT / 'launch').glob('*.sh')))):
    done = subprocess.run(
      [str(_shellcheck()), '--external-sources', *files],
      cwd=ROOT,
      env=os.environ,
      capture_output=True,
      text=True,
    )
    assert (done.returncode, done.stdout) == (0, '')
