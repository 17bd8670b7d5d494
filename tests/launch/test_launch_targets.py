"""Tests of the commands that a launch executes, with programs on PATH."""

import os
import subprocess
import threading
import time

import launch_jobs
import pytest
from launch_jobs import NASTY, Programs, lines, write_program

from vit_jax.errors import UserError
from vit_jax.launch import __main__ as command


@pytest.fixture
def programs(tmp_path, monkeypatch):
  return Programs(tmp_path, monkeypatch)


@pytest.mark.slow
def test_two_slices_that_are_preempted_twice_finish(programs, monkeypatch):
  """Once with a notice (42), once without; every start has the same words."""
  hosts, commit = programs.make_hosts(monkeypatch)
  for home in hosts:
    (home / 'codes').write_text('42 45 0')
  programs.states(
    '',
    'WAITING_FOR_RESOURCES',
    'ACTIVE',
    *['SUSPENDING', 'SUSPENDED', '', 'CREATING', 'ACTIVE'],
    *['SUSPENDING', 'SUSPENDED', '', 'ACTIVE'],
  )
  programs.answer('gcloud create', ('', 0, ''))
  programs.answer('gcloud delete', ('', 0, ''))
  job = launch_jobs.changed(
    'slices',
    commit=commit,
    max_restarts=0,
    data_dir=f'gs://bucket/{NASTY}',
    overrides=tuple(f'--config.x={text}' for text in NASTY),
  )
  assert launch_jobs.run(job, programs.shell) == 0, programs.output
  assert programs.verbs() == ['create', *['delete', 'create'] * 2]
  for home in hosts:
    folder = home / 'vit_jax_job'
    assert lines(home / 'runs.jsonl') == 3 * [
      [job.data_dir, *job.trainer_arguments]
    ]
    assert (home / 'installed').read_text().splitlines() == [
      f'uv venv --quiet --python 3.11 {folder}/venv',
      *[
        f'uv pip install --quiet --python {folder}/venv/bin/python '
        '--constraints constraints.txt --editable .[tpu]'
      ]
      * 3,
    ]
  assert not list(programs.root.rglob('pwned'))


def _on_host(home, verb):
  """Runs a command of the script of a host; returns its code and output."""
  done = subprocess.run(
    ['bash', home / 'vit_jax_job/code/launch/tpu_vm_worker.sh', verb],
    env={**os.environ, 'HOME': str(home)},
    capture_output=True,
    text=True,
  )
  return done.returncode, done.stdout + done.stderr


def test_a_running_job_is_followed_and_can_be_stopped(programs, monkeypatch):
  """Launching again starts nothing; a lost connection does not end the job."""
  hosts, commit = programs.make_hosts(monkeypatch)
  job = launch_jobs.changed('tpu', commit=commit, max_restarts=0)
  programs.states('ACTIVE')
  codes = []

  def follow():
    code = command.TARGETS['tpu'].run(job, programs.shell)
    codes.append(code)

  first, second = (threading.Thread(target=follow) for _ in range(2))

  def wait_until(is_true):
    deadline = time.monotonic() + 60
    while not is_true():
      assert time.monotonic() < deadline
      time.sleep(0.05)

  first.start()
  wait_until(lambda: all((h / 'runs.jsonl').exists() for h in hosts))
  second.start()
  wait_until(lambda: any('already running' in x for x in programs.output))
  for verb, code, text in [('start', 0, 'running'), ('install', 1, 'running')]:
    assert _on_host(hosts[1], verb)[0] == code
    assert text in _on_host(hosts[1], verb)[1]
  for home in hosts:
    assert _on_host(home, 'stop')[0] == 0
  first.join(60)
  second.join(60)
  assert codes == [42, 42]
  assert [len(lines(home / 'runs.jsonl')) for home in hosts] == [1, 1]


def test_a_failed_installation_starts_no_trainer(programs, monkeypatch):
  hosts, commit = programs.make_hosts(monkeypatch)
  write_program(programs.root / 'image/python3', '#!/bin/sh\nexit 7\n')
  programs.states('ACTIVE')
  job = launch_jobs.changed('tpu', commit=commit, max_restarts=1)
  assert launch_jobs.run(job, programs.shell) == 7
  assert not any((home / 'runs.jsonl').exists() for home in hosts)


@pytest.mark.parametrize(
  ('codes', 'restarts', 'end', 'text'),
  [
    ([42, 1, 42, 45, 134, 0], 3, 0, '3 of 3'),
    ([45, 255, 44], 2, 44, 'after 2 restarts'),
    ([2], 9, 2, 'exit code 2 (see above); not restarted'),
    ([43], 9, 43, 'exit code 43'),
  ],
)
def test_restarts_are_counted_unless_preempted(
  programs, codes, restarts, end, text
):
  programs.states('ACTIVE')
  programs.answer('gcloud ssh --node=0', *[('', code, '') for code in codes])
  programs.answer('gcloud ssh --node=all', ('running\nrunning', 0, ''))
  job = launch_jobs.changed('tpu', max_restarts=restarts)
  pauses = []
  assert launch_jobs.run(job, programs.shell, pauses.append) == end
  follows = [call for call in programs.calls() if '--node=0' in call]
  assert len(follows) == len(codes)
  assert pauses == [command.RESTART_S] * (len(codes) - 1)
  assert any(text in line for line in programs.output)


_GCLOUD = 'ERROR: (gcloud.compute.tpus.queued-resources.create) '


_PERMANENT = [
  'You do not currently have an active account selected.\nPlease run:\n\n  $ '
  'gcloud auth login\n',
  'PERMISSION_DENIED: Permission tpu.nodes.create denied on project',
  '{"message": "Quota limit \'TPUV3s\' has been exceeded. Limit: 0 in zone"}',
  'INVALID_ARGUMENT: Cloud TPU received a bad request',
  'Unknown zone europe-west4-q',
]


@pytest.mark.parametrize(
  ('error', 'verb'),
  [(error, 'create') for error in _PERMANENT]
  + [(_PERMANENT[0], 'ssh'), (_PERMANENT[2], 'failed')],
)
def test_errors_that_would_occur_again_end_the_launch(programs, error, verb):
  """The message of gcloud is part of the only message."""
  if verb == 'failed':  # gcloud works, but the request fails later
    programs.states(f'FAILED\t{error}')
  else:
    programs.answer(f'gcloud {verb}', ('', 1, _GCLOUD + error))
    programs.states('' if verb == 'create' else 'ACTIVE')
  with pytest.raises(UserError, match='fail again') as caught:
    launch_jobs.run(launch_jobs.JOBS['tpu'], programs.shell)
  assert error.split()[-1] in str(caught.value)
  assert len(programs.calls()) <= 2


_NO_MORE = f'{_GCLOUD}{{"code": 8, "message": "There is no more capacity"}}'


@pytest.mark.parametrize(
  ('states', 'verbs'),
  [
    (['', '', '', 'ACTIVE'], ['create'] * 3),
    (['FAILED\tno capacity', '', 'ACTIVE'], ['delete', 'create']),
    (['SUSPENDED', 'SUSPENDED', '', 'ACTIVE'], ['delete', 'delete', 'create']),
    (['SOME_NEW_STATE', 'ACTIVE'], []),
  ],
)
def test_states_of_requests(programs, states, verbs):
  """A command that fails because of capacity or network is repeated."""
  programs.states(*states)
  programs.answer('gcloud create', *[('', 1, _NO_MORE)] * 2, ('', 0, ''))
  programs.answer('gcloud delete', ('', 1, 'no connection'), ('', 0, ''))
  assert launch_jobs.run(launch_jobs.JOBS['tpu'], programs.shell) == 0
  assert programs.verbs() == verbs


@pytest.mark.parametrize('failing', ['gcloud describe', 'gcloud delete'])
def test_a_command_that_always_fails_ends_the_launch(programs, failing):
  """Nothing is requested: the old machines may still exist."""
  programs.answer(failing, ('', 1, 'no connection'))
  programs.states('SUSPENDED')
  with pytest.raises(UserError, match='20 commands failed'):
    launch_jobs.run(launch_jobs.JOBS['tpu'], programs.shell)
  assert 'create' not in programs.verbs()
  called = [' '.join((call[0], call[4])) for call in programs.calls()]
  assert called.count(failing) == 20


@pytest.mark.parametrize(
  ('name', 'words', 'answers', 'expected'),
  [
    ('gke', 'kubectl get', ['l16-i21k='], ['kubectl get']),
    ('gke', 'kubectl get', ['l16-i21k=Completed'], ['kubectl get']),
    ('slurm', 'squeue', ['4711'], ['squeue --name=l16-i21k']),
    (
      'gke',
      'kubectl get',
      ['l16-i21k=Failed', ''],
      [f'kubectl {verb}' for verb in ('get', 'delete', 'get', 'apply')],
    ),
  ],
)
def test_clusters_keep_a_job_unless_it_failed(
  programs, name, words, answers, expected
):
  programs.answer(words, *[(answer, 0, '') for answer in answers])
  assert launch_jobs.run(launch_jobs.JOBS[name], programs.shell) == 0
  calls = [' '.join(call[:2]) for call in programs.calls()]
  assert [c for c in calls if c.startswith(words.split()[0])] == expected
  kept = any('not started a second time' in line for line in programs.output)
  assert kept == (len(calls) == 1)


@pytest.mark.parametrize(
  ('name', 'words', 'message'),
  [
    ('gke', 'kubectl get', 'get-credentials'),
    ('gke', 'git archive', 'git archive.*exit code 1'),
    ('slurm', 'squeue', 'squeue failed'),
    ('slurm', 'sbatch', 'sbatch.*exit code 1'),
  ],
)
def test_a_step_that_fails_ends_the_launch(programs, name, words, message):
  programs.answer(words, ('', 1, 'connection refused'))
  with pytest.raises(UserError, match=message):
    launch_jobs.run(launch_jobs.JOBS[name], programs.shell)
  assert programs.calls()[-1][0] == words.split()[0]
  (programs.bin / words.split()[0]).unlink()
  with pytest.raises(UserError, match='is not installed'):
    launch_jobs.run(launch_jobs.JOBS[name], programs.shell)


@pytest.mark.parametrize(
  ('name', 'expected'),
  [
    ('tpu', ['gcloud compute tpus queued-resources delete l16-i21k --force']),
    ('gke', ['kubectl delete jobset l16-i21k --wait']),
    ('slurm', ['touch', 'scancel --state=PENDING', 'scancel --signal=TERM']),
  ],
)
def test_delete_ends_a_job(programs, name, expected):
  job = launch_jobs.JOBS[name]
  assert command.TARGETS[job.target].delete(job, programs.shell) == 0
  for call, start in zip(programs.calls(), expected, strict=True):
    assert ' '.join(call).startswith(start)
