"""Tests of the commands that a launch executes, with programs on PATH."""

import dataclasses
import json
import os
import threading

import launch_jobs
import pytest
from fake_cloud import Cloud, understood

from vit_jax.errors import UserError
from vit_jax.launch import __main__ as command
from vit_jax.launch import gke, policy, queued, slurm, tpu_vm
from vit_jax.launch.job import FLAGS
from vit_jax.launch.shell import Shell, quote

NO_PAUSE = dict(pause=lambda seconds: None)


@pytest.fixture
def programs(tmp_path, monkeypatch):
  """Returns recording substitutes for all programs that a launch runs."""
  made = launch_jobs.Programs(
    tmp_path / 'bin',
    'bash',
    'docker',
    'gcloud',
    'git',
    'kubectl',
    'mkdir',
    'python',
    'rm',
    'sbatch',
    'squeue',
    'tar',
  )
  monkeypatch.setenv('PATH', str(made.folder))
  return made


@pytest.fixture
def checkout(tmp_path):
  folder = tmp_path / 'checkout'
  folder.mkdir()
  return folder


def shell_of(checkout, lines=None):
  """Returns a shell of a checkout that prints to `lines`."""
  return Shell(
    checkout, dry_run=False, echo=[].append if lines is None else lines.append
  )


def expected(target):
  """Returns the commands of a dry run, without comments and files."""
  printed = launch_jobs.dry_run(launch_jobs.JOBS[target])
  commands = [
    line
    for line in _outside_of_documents(printed)
    if not line.startswith('#')
    and line not in ('mkdir -p build/l16-i21k', 'wait')
  ]
  return [line.removesuffix(' &').partition(' <')[0] for line in commands]


def _outside_of_documents(printed):
  inside = False
  for line in printed.splitlines():
    if line.startswith('cat >'):
      inside = True
    elif line == 'END_OF_FILE':
      inside = False
    elif not inside:
      yield line


def quoted(calls):
  """Returns recorded calls in the form of `expected`."""
  return [quote(call) for call in calls]


def test_gke_builds_pushes_and_applies_what_a_dry_run_prints(
  programs, checkout
):
  (checkout / 'build/l16-i21k').mkdir(parents=True)
  (
    checkout / 'build/l16-i21k/code.tar'
  ).touch()  # git is replaced by a program that only records
  assert gke.start(launch_jobs.JOBS['gke'], shell_of(checkout), 300) == 0
  assert quoted(programs.calls()) == expected('gke')
  applied = json.loads((checkout / 'build/l16-i21k/jobset.json').read_text())
  assert applied == gke.jobset(launch_jobs.JOBS['gke'], 300)


@pytest.mark.parametrize(
  'state, calls',
  [
    ('l16-i21k=', ['get']),
    ('l16-i21k=Completed', ['get']),
    ('l16-i21k=Failed', ['get', 'delete', 'apply']),
  ],
)
def test_gke_keeps_a_running_job_and_replaces_a_failed_one(
  programs, checkout, state, calls
):
  (checkout / 'build/l16-i21k').mkdir(parents=True)
  (checkout / 'build/l16-i21k/code.tar').touch()
  programs.answer('kubectl', 'get', (state, 0, ''))
  assert gke.start(launch_jobs.JOBS['gke'], shell_of(checkout), 300) == 0
  kubectl = [call[1] for call in programs.calls() if call[0] == 'kubectl']
  assert kubectl == calls


def test_gke_without_a_cluster_is_a_user_error(programs, checkout):
  programs.answer('kubectl', 'get', ('', 1, 'connection refused'))
  with pytest.raises(UserError, match='get-credentials'):
    gke.start(launch_jobs.JOBS['gke'], shell_of(checkout), 300)
  assert len(programs.calls()) == 1


def test_a_step_that_fails_ends_the_launch(programs, checkout):
  programs.answer('git', 'archive', ('', 3, ''))
  with pytest.raises(UserError, match='git archive.*exit code 3'):
    gke.start(launch_jobs.JOBS['gke'], shell_of(checkout), 300)
  assert [call[0] for call in programs.calls()] == ['kubectl', 'git']


def test_a_program_that_is_missing_is_named(programs, checkout):
  (programs.folder / 'kubectl').unlink()
  with pytest.raises(UserError, match='kubectl is not installed'):
    gke.start(launch_jobs.JOBS['gke'], shell_of(checkout), 300)


def test_slurm_installs_and_submits_what_a_dry_run_prints(programs, checkout):
  python = checkout / 'build/l16-i21k/venv/bin/python'
  python.parent.mkdir(parents=True)
  python.symlink_to(programs.folder / 'python')
  job = launch_jobs.JOBS['slurm']
  assert slurm.start(job, shell_of(checkout), 300, python='python') == 0
  first = [call for call in programs.calls() if 'pip' not in call]
  expected_commands = expected('slurm')
  assert quoted(first) == [
    line.replace('PYTHON', 'python')
    for line in expected_commands
    if ' pip ' not in line
  ]
  script = (checkout / 'build/l16-i21k/job.sbatch').read_text()
  assert script == slurm.script(job, 300)


def test_slurm_does_not_submit_a_queued_job_again(programs, checkout):
  programs.answer('squeue', '--me', ('4711', 0, ''))
  lines = []
  shell = shell_of(checkout, lines)
  assert slurm.start(launch_jobs.JOBS['slurm'], shell, 300) == 0
  assert [call[0] for call in programs.calls()] == ['squeue']
  assert '4711' in lines[-1]


def _queue(programs, *states):
  turns = [
    (state, 0, '') if state else ('', 1, 'NOT_FOUND: no such resource')
    for state in states
  ]
  programs.answer('gcloud', 'describe', *turns)


def _verbs(programs):
  """Returns the commands for the queue and the slices, in order."""
  return [
    f'{call[2]} {call[3]}' if call[0] == 'bash' else call[4]
    for call in programs.calls()
    if 'describe' not in call
  ]


def test_queued_waits_restarts_and_requests_again(programs, checkout):
  """A preempted request is deleted, made again, and the run finished."""
  _queue(
    programs,
    '',
    'WAITING_FOR_RESOURCES',
    'PROVISIONING',
    'ACTIVE',
    'SUSPENDING',
    'SUSPENDING',
    'SUSPENDED',
    'ACTIVE',
  )
  # The connection breaks first, then the run ends.
  programs.answer('bash', 'log', ('', 255, ''), ('', 0, ''))
  lines = []
  job = dataclasses.replace(launch_jobs.JOBS['queued'], max_restarts=0)
  code = queued.start(job, shell_of(checkout, lines), 300, **NO_PAUSE)
  assert code == 0, lines
  starts = ['start --name=l16-i21k-0', 'start --name=l16-i21k-1']
  once = [*starts, 'log --name=l16-i21k-0']
  verbs = _verbs(programs)
  verbs[1:3] = sorted(verbs[1:3])  # started at the same time
  verbs[-3:-1] = sorted(verbs[-3:-1])
  assert verbs == ['create', *once, 'delete', 'create', *once]


def test_queued_runs_what_a_dry_run_prints(programs, checkout):
  _queue(programs, '', 'ACTIVE')
  queued.start(launch_jobs.JOBS['queued'], shell_of(checkout), 300, **NO_PAUSE)
  calls = quoted(programs.calls())
  expected_commands = expected('queued')
  assert sorted(calls) == sorted(expected_commands)
  assert (
    calls[:3] == expected_commands[:3] and calls[-1] == expected_commands[-1]
  )


@pytest.mark.parametrize('code', [2, 43])
def test_queued_does_not_restart_after_user_errors_and_divergence(
  programs, checkout, code
):
  _queue(programs, 'ACTIVE')
  programs.answer('bash', 'log', ('', code, ''))
  job, shell = launch_jobs.JOBS['queued'], shell_of(checkout)
  assert queued.start(job, shell, 300, **NO_PAUSE) == code
  assert _verbs(programs).count('log --name=l16-i21k-0') == 1


def test_queued_refuses_an_unknown_state(programs, checkout):
  _queue(programs, 'ODD')
  job, shell = launch_jobs.JOBS['queued'], shell_of(checkout)
  with pytest.raises(UserError, match="l16-i21k.*'ODD'"):
    queued.start(job, shell, 300, **NO_PAUSE)


def test_queued_requests_nothing_while_gcloud_fails(programs, checkout):
  """A failing network is different from a missing request."""
  programs.answer('gcloud', 'describe', ('', 1, 'no connection'))
  job, shell = launch_jobs.JOBS['queued'], shell_of(checkout)
  with pytest.raises(UserError, match='gcloud failed 20 times'):
    queued.start(job, shell, 300, **NO_PAUSE)
  assert _verbs(programs) == []


_LOGIN = (
  'ERROR: (gcloud.compute.tpus.tpu-vm.create) You do not currently have an '
  'active account selected.\nPlease run:\n\n  $ gcloud auth login\n'
)
_QUOTA = (
  'ERROR: (gcloud.compute.tpus.queued-resources.create) {"message": "Quota '
  "limit 'TPUV3sPreemptiblePodPerProjectPerZoneForTPUAPI' has been exceeded. "
  'Limit: 0 in zone europe-west4-a."}'
)
_CAPACITY = (
  'ERROR: (gcloud.compute.tpus.tpu-vm.create) {"code": 8, "message": "There is '
  'no more capacity in the zone \\"europe-west4-a\\"."}'
)


@pytest.mark.parametrize('error', [_LOGIN, _QUOTA])
def test_errors_that_a_restart_cannot_change_end_the_launch(
  programs, checkout, error
):
  """Each target fails at its first command, with the message of gcloud."""
  programs.answer('gcloud', 'describe', ('', 1, 'NOT_FOUND'))
  programs.answer('gcloud', 'create', ('', 1, error))
  programs.answer('bash', 'up', ('', 1, error))
  for target, module in (('queued', queued), ('tpu-vm', tpu_vm)):
    job = launch_jobs.JOBS[target]
    with pytest.raises(UserError, match='fail again.*(auth login|Limit: 0)'):
      module.start(job, shell_of(checkout), 300, **NO_PAUSE)
  started = [c for c in programs.calls() if c[0] == 'bash' or 'create' in c]
  assert len(started) == 2


def test_a_lack_of_capacity_is_tried_again(programs, checkout, capfd):
  """The output of the script is printed as before."""
  programs.answer('gcloud', 'describe', ('READY', 0, ''))
  programs.answer('bash', 'up', ('', 1, _CAPACITY), ('', 0, ''))
  job = launch_jobs.JOBS['tpu-vm']
  assert tpu_vm.start(job, shell_of(checkout), 300, **NO_PAUSE) == 0
  assert 'no more capacity' in capfd.readouterr().err


def test_one_queued_slice_has_the_name_of_its_request():
  job = launch_jobs.changed('queued', slices=1)
  assert queued.nodes(job) == ['l16-i21k']
  assert '--node-id=l16-i21k' in queued.create(job)


def test_a_tpu_vm_is_used_until_the_run_is_finished(tmp_path, monkeypatch):
  """Preempted once, then finished, with the commit of the launch."""
  cloud = Cloud(tmp_path)
  monkeypatch.setenv('PATH', f'{cloud.root}/bin:{os.environ["PATH"]}')
  job = launch_jobs.changed(
    'tpu-vm', config='configs/small.py', commit=cloud.commit()
  )
  lines, codes, again = [], [], threading.Event()

  def pause(seconds):
    assert again.wait(60)

  def launch():
    codes.append(
      tpu_vm.start(job, shell_of(cloud.checkout, lines), 300, pause=pause)
    )

  thread = threading.Thread(target=launch)
  thread.start()
  try:
    cloud.wait_for_runs(1)
    cloud.commit_file('newer.txt')
    cloud.end_jobs(42)
    again.set()
    cloud.wait_for_runs(2)
    assert not list(cloud.root.glob('worker*/**/newer.txt'))
  finally:
    cloud.end_jobs(0)
    again.set()
    thread.join(60)
  assert codes == [0], lines
  assert any('preempted' in line for line in lines)
  (first, second), (third, fourth) = cloud.runs()
  assert first == second == third == fourth


def test_restarts_are_counted_unless_preempted():
  codes = [42, 1, 42, 45, 134, 0]
  log = []
  ended = policy.restart_until_done(
    lambda: codes.pop(0), 3, log.append, log.append
  )
  assert (ended, codes) == (0, [])
  assert log.count(policy.PAUSE_S) == 5
  assert policy.restart_until_done(lambda: 45, 2, log.append, log.append) == 45
  assert '45' in log[-1] and '2 restarts' in log[-1]


@pytest.mark.parametrize('code', [2, 43])
def test_user_errors_and_divergence_are_not_restarted(code):
  log = []
  assert (
    policy.restart_until_done(lambda: code, 9, log.append, log.append) == code
  )
  assert len(log) == 1 and 'not restarted' in log[0]


def test_every_target_has_its_flags():
  assert list(FLAGS) == list(command.TARGETS) == list(launch_jobs.JOBS)


def test_the_output_of_a_dry_run_is_a_script(tmp_path):
  """A shell can parse and execute the whole output."""
  job = launch_jobs.JOBS['queued']
  shown = launch_jobs.dry_run(job).replace('bash ', 'git ')  # recorded, too
  words = understood(shown, tmp_path)
  assert len(words) == 6


@pytest.mark.parametrize('target', launch_jobs.JOBS)
def test_submit_flags_reach_the_submitting_command(target):
  """They are added to the command that requests machines."""
  job = launch_jobs.changed(target, submit_flags=('--a=1', '--b'))
  lines = launch_jobs.dry_run(job).splitlines()
  submitting = {
    'tpu-vm': 'tpu-vm create ',
    'queued': 'queued-resources create',
    'gke': 'kubectl apply',
    'slurm': 'sbatch ',
  }[target]
  with_flags = [line for line in lines if ' --a=1 --b' in line]
  assert len(with_flags) == 1 and submitting in with_flags[0]
