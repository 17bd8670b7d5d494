"""Tests of launch/tpu_vm.sh and its workers, from creation to resuming."""

import os
import shutil
import signal
import subprocess

import pytest
from fake_cloud import (
  NASTY,
  SLICE,
  UP,
  WORKDIR,
  Cloud,
  understood,
  write_program,
)

pytestmark = pytest.mark.skipif(
  not (shutil.which('flock') and shutil.which('setsid')),
  reason='the worker script runs on Linux images; flock or setsid is missing',
)


@pytest.fixture
def cloud(tmp_path):
  simulated = Cloud(tmp_path)
  yield simulated
  simulated.end_jobs(0)


def test_a_real_run_executes_the_commands_of_a_dry_run(cloud):
  trainer_arguments = [f'--config.x={text}' for text in NASTY]
  up = [*UP, '--spot', '--', *trainer_arguments]
  code, script = cloud('up', '--dry_run', *up[1:])
  assert code == 0
  assert not cloud.calls()
  process = cloud.start(*up)
  cloud.wait_for_runs(1)
  cloud.end_jobs(0)
  process.communicate(timeout=60)
  commands = understood(script, cloud.root)
  gcloud = [words for name, *words in commands if name == 'gcloud']
  assert cloud.calls() == gcloud
  job = [
    'gs://bucket/tfds',
    '--config=configs/small.py',
    f'--workdir={WORKDIR}',
    *trainer_arguments,
  ]
  assert cloud.runs() == [[job], [job]]
  assert not list(cloud.root.rglob('pwned'))


def test_up_installs_follows_and_returns_the_jobs_exit_code(cloud):
  process = cloud.start(*UP)
  cloud.wait_for_runs(1)
  cloud.end_jobs(42)
  output, _ = process.communicate(timeout=60)
  assert process.returncode == 42, output
  assert 'step 1' in output
  assert 'preempted, state saved' in output
  for home in cloud.homes:
    job = home / 'vit_jax_job'
    assert (home / 'installed').read_text().splitlines() == [
      f'python3 -m pip install --quiet --upgrade --target {job}/uv uv',
      f'uv venv --quiet --python 3.11 {job}/venv',
      f'uv pip install --quiet --python {job}/venv/bin/python '
      '--constraints constraints.txt --editable .[tpu]',
    ]


def test_the_same_command_again_starts_once_and_later_resumes(cloud):
  process = cloud.start(*UP)
  cloud.wait_for_runs(1)
  code, output = cloud('train', *UP[1:])
  assert (code, 'already running' in output) == (0, True)
  code, output = cloud('install', *SLICE)
  assert (code, 'the job is running' in output) == (1, True)
  _, output = cloud('status', *SLICE)
  assert output.count(': running') == 2
  cloud.end_jobs(134)
  process.communicate(timeout=60)
  assert process.returncode == 134
  _, output = cloud('status', *SLICE)
  assert output.count('failed with exit code 134; train resumes') == 2

  code, output = cloud('train', *UP[1:])
  assert code == 0, output
  cloud.wait_for_runs(2)
  for first, second in cloud.runs():
    assert first == second
  code, output = cloud('stop', *SLICE)
  assert (code, output.count('preempted, state saved')) == (0, 2)
  assert cloud('log', *SLICE)[0] == 42


def test_a_job_continues_after_a_lost_connection(cloud):
  process = cloud.start(*UP)
  cloud.wait_for_runs(1)
  os.killpg(process.pid, signal.SIGKILL)
  process.communicate(timeout=60)
  _, output = cloud('status', *SLICE)
  assert output.count(': running') == 2
  cloud.end_jobs(0)
  assert cloud('log', *SLICE)[0] == 0


def test_a_worker_refuses_a_second_job_and_new_code(cloud):
  """The lock decides if two launches found the slice idle."""
  process = cloud.start(*UP)
  cloud.wait_for_runs(1)
  worker = 'vit_jax_job/code/launch/tpu_vm_worker.sh'
  home = cloud.homes[0]

  def call(command: str) -> subprocess.CompletedProcess:
    return subprocess.run(
      ['bash', home / worker, command],
      env={**os.environ, 'HOME': str(home)},
      capture_output=True,
      text=True,
    )

  second = call('start')
  assert (second.returncode, 'already running' in second.stdout) == (0, True)
  code = call('install')
  assert (code.returncode, 'a job is running' in code.stderr) == (1, True)
  cloud.end_jobs(0)
  process.communicate(timeout=60)
  assert [len(runs) for runs in cloud.runs()] == [1, 1]


def test_a_job_on_some_workers_only_is_not_joined(cloud):
  process = cloud.start(*UP)
  cloud.wait_for_runs(1)
  cloud.end_jobs(1, workers=(1,))
  code, output = cloud('train', *UP[1:])
  assert (code, 'only on some of the workers' in output) == (1, True)
  assert [len(runs) for runs in cloud.runs()] == [1, 1]
  cloud.end_jobs(0)
  process.communicate(timeout=60)


@pytest.mark.parametrize(
  'state, verbs',
  [
    ('READY', ['describe']),
    ('PREEMPTED', ['describe', 'delete', 'create']),
    (None, ['describe', 'create']),
  ],
)
def test_create_makes_missing_slices(cloud, state, verbs):
  if state:
    (cloud.root / 'state').write_text(state)
  assert cloud('create', *SLICE, '--type=v5p-32')[0] == 0
  assert [call[3] for call in cloud.calls()] == verbs
  assert (cloud.root / 'state').read_text() == 'READY'


def test_a_slice_in_transition_is_not_changed(cloud):
  (cloud.root / 'state').write_text('CREATING')
  code, output = cloud('up', *UP[1:])
  assert (code, 'slice vit is CREATING' in output) == (1, True)
  assert [call[3] for call in cloud.calls()] == ['describe']


def test_a_failed_step_ends_the_launch(cloud):
  write_program(cloud.root / 'stubs' / 'python3', '#!/bin/sh\nexit 7\n')
  assert cloud(*UP)[0] == 7
  assert cloud.runs() == [[], []]
