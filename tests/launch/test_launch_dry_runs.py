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


@pytest.mark.parametrize('name', launch_jobs.JOBS)
def test_dry_runs_equal_the_golden_files(name):
  """`python tests/launch/launch_jobs.py` writes the golden files again."""
  before = set(ROOT.glob('build/*'))
  printed = launch_jobs.dry_run(launch_jobs.JOBS[name])
  # The file of tested versions is that of the Python that runs the command.
  printed = printed.replace('constraints-3.13.txt', 'constraints.txt')
  assert printed == (launch_jobs.GOLDEN / f'{name}.txt').read_text()
  assert set(ROOT.glob('build/*')) == before


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


def test_a_batch_script_counts_failures_and_no_preemptions(programs):
  script = slurm.script(launch_jobs.changed('slurm', max_restarts=2))
  codes = [42, 1, 42, 42, 45, 42, 1]
  ended = [_run_script(programs, script, code) for code in codes]
  assert [bool(calls[1:]) for _, calls in ended] == [True] * 6 + [False]
  assert ended[-1][0].returncode == 1
  assert 'after 2 restarts' in ended[-1][0].stderr


def test_a_batch_script_ends_after_delete(programs):
  (programs.checkout / 'build/l16-i21k/stop').touch()
  script = slurm.script(launch_jobs.JOBS['slurm'])
  done, calls = _run_script(programs, script, 42)
  assert (done.returncode, len(calls)) == (42, 1)


def _shellcheck():
  beside = str(pathlib.Path(sys.executable).parent)
  return shutil.which('shellcheck') or shutil.which('shellcheck', path=beside)


@pytest.mark.skipif(not _shellcheck(), reason='shellcheck is not installed')
def test_shellcheck_accepts_all_scripts(tmp_path):
  job = launch_jobs.changed('slurm', overrides=tuple(NASTY))
  (tmp_path / 'job.sbatch').write_text(slurm.script(job))
  # The quoted text looks as if it should be expanded or escaped.
  own = ['--exclude=SC2016,SC1003', str(tmp_path / 'job.sbatch')]
  for files in (own, sorted(map(str, (ROOT / 'launch').glob('*.sh')))):
    done = subprocess.run(
      [str(_shellcheck()), '--external-sources', *files],
      cwd=ROOT,
      env=os.environ,
      capture_output=True,
      text=True,
    )
    assert (done.returncode, done.stdout) == (0, '')
