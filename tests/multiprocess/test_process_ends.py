"""Tests that the end of one process ends all processes of a run."""

import re
import signal

import pytest

from tests import cli
from tests.faults.counts import further, injected

# JAX itself would wait 300 s at its shutdown barrier and end with 134. The test
# fails if commands are still running after this time.
WAIT_S = 200
REFUSING = {
  'source.name': 'tests.multiprocess.failing_source',
  'source.num_examples': ...,
  'source.num_classes': ...,
}


def _overrides(**changes):
  """Returns overrides of the small L/16 with a source that fails."""
  values = cli.ENDLESS | REFUSING | changes
  return {key: value for key, value in values.items() if value is not ...}


def _ends(monkeypatch, workdir, number, overrides, code, last=()):
  """Runs `number` processes that must end with the code; returns stderrs."""
  monkeypatch.setattr(cli, 'SMALL_L16', {})
  processes = cli.start_pair(workdir, overrides, 1, number, last)
  try:
    return [cli.finish(p, code, timeout_s=WAIT_S) for p in processes]
  finally:
    for process in processes:
      process.kill()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
  'stage, number', [('read', 2), *further(['config', 2], ['open', 4])]
)
def test_a_user_error_of_one_process_ends_all(
  tmp_path, monkeypatch, stage, number
):
  """The exit code is 2 everywhere; one message names the process."""
  overrides, last = _overrides(**{'source.stage': stage}), ()
  expected = 'only this process has no data'
  if stage == 'config':
    last, expected = ('--config.batch_sise=3',), "did you mean 'batch_size'"
    overrides = cli.SMALL_L16
  injected('an error on one process')
  ended = _ends(monkeypatch, tmp_path / 'run', number, overrides, 2, last)
  for index, (_, err) in enumerate(ended):
    assert len(re.findall('^error: ', err, re.M)) == 1, err
    assert expected in err and 'Traceback' not in err, err
    named = f'error: process {number - 1}: ' in err
    assert named == (index != number - 1), err


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
  ('flag', 'text'),
  [
    ('--config.source.height=48', 'fingerprint: shape: '),
    ('--num_processes=3', 'num_processes is 3 on process 1, but 2 on'),
  ],
)
def test_processes_that_differ_are_refused(tmp_path, flag, text):
  """Nothing is trained; each message names the process and the difference."""
  injected('processes of different runs')
  processes = cli.start_pair(tmp_path / 'run', {}, 1, last=(flag,))
  for process in processes:
    _, err = cli.finish(process, 2, timeout_s=WAIT_S)
    assert 'process 1' in err and 'process 0' in err, err
    assert text in err and 'Traceback' not in err, err
  assert not (tmp_path / 'run/metrics.jsonl').exists()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_crash_of_one_process_ends_all(tmp_path, monkeypatch):
  """The exit code is 1 everywhere; only the crashed one has a traceback."""
  overrides = _overrides(**{'source.stage': 'read', 'source.kind': 'crash'})
  injected('a crash of one process')
  ended = _ends(monkeypatch, tmp_path / 'run', 2, overrides, 1)
  assert 'Traceback' in ended[1][1] and 'a bug of this process' in ended[1][1]
  assert 'crash: process 1: RuntimeError: a bug' in ended[0][1]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize('killed', [0, *further(1)])
def test_a_killed_process_ends_the_others_with_45(tmp_path, killed):
  """Any process may be killed; the others print one message.

  Process 0 hosts JAX's coordination service; without it, JAX aborts the others,
  which `peers` changes into code 45.
  """
  workdir = tmp_path / 'run'
  changes = cli.ENDLESS | {'batch_size': 48}
  with cli.running_pair(workdir, changes, 2, 3) as processes:
    processes[killed].send_signal(signal.SIGKILL)
    injected('a dead peer')
    for index, process in enumerate(processes):
      if index != killed:
        _, err = cli.finish(process, 45, timeout_s=WAIT_S)
        assert len(re.findall('^peer lost: ', err, re.M)) == 1, err
        assert 'start all processes again' in err and 'Traceback' not in err


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_stopped_process_ends_all_with_45(tmp_path):
  """After 30 s the other one prints one message; so does the stopped one."""
  with cli.running_pair(tmp_path / 'run', cli.ENDLESS, 1) as processes:
    stopped, other = processes
    stopped.send_signal(signal.SIGSTOP)
    injected('a stopped peer')
    for process in (other, stopped):
      _, err = cli.finish(process, 45, timeout_s=WAIT_S)
      assert len(re.findall('^peer lost: ', err, re.M)) == 1, err
      stopped.send_signal(signal.SIGCONT)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_other_aborts_keep_their_code(tmp_path):
  """C++ code may abort for other reasons; the peers end with 45."""
  with cli.running_pair(tmp_path / 'run', cli.ENDLESS, 1) as processes:
    processes[1].send_signal(signal.SIGABRT)
    injected('an abort of one process')
    _, err = cli.finish(processes[1], -signal.SIGABRT, timeout_s=WAIT_S)
    assert 'loop.py' in err and 'peer lost' not in err
    cli.finish(processes[0], 45, timeout_s=WAIT_S)
