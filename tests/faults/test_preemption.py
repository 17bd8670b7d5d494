"""Tests of preemption signals."""

import signal
import time

import pytest

from tests import cli
from tests.faults.counts import further, injected

# The programs of SMALL_L16, with long evaluations.
LONGER = cli.SMALL_L16 | {
  'evals.val.every': '1 steps',  # due at any step at which the signal arrives
  'checkpoint.every': '1000 steps',
}


def _evaluations(workdir) -> list[tuple[int, float]]:
  return [
    (r['step'], r['val/accuracy'])
    for r in cli.records(workdir)
    if 'val/accuracy' in r
  ]


@pytest.mark.slow
@pytest.mark.parametrize('number', [signal.SIGTERM, *further(signal.SIGHUP)])
def test_a_preempted_process_resumes_exactly(tmp_path, number):
  """The exit code is 42; every step and evaluation occurs exactly once."""
  straight, stopped = cli.reference(**LONGER), tmp_path / 'stopped'
  again = cli.train_command(stopped, **LONGER)
  process = cli.start(again)
  cli.wait_for_step(stopped, 4, [process])
  process.send_signal(number)
  injected(f'{number.name} to the only process')
  _, err = cli.finish(process, code=42)
  assert 'stopping and saving' in err and 'preempted: stopped' in err
  cli.run(again)
  assert cli.losses(stopped) == cli.losses(straight)
  assert _evaluations(stopped) == _evaluations(straight)
  assert [step for step, _ in _evaluations(stopped)] == list(range(1, 21))
  cli.assert_same_params(stopped, straight)


@pytest.mark.long
def test_two_signals_together_are_one(tmp_path):
  """GNU timeout and some container runtimes send each signal twice."""
  workdir = tmp_path / 'run'
  process = cli.start(cli.train_command(workdir, **LONGER))
  cli.wait_for_step(workdir, 2, [process])
  process.send_signal(signal.SIGINT)
  time.sleep(0.05)  # otherwise they may arrive as one
  process.send_signal(signal.SIGINT)
  injected('SIGINT twice')
  cli.finish(process, code=42)
  assert list((workdir / 'checkpoints').glob('[0-9]*'))


ENDLESS = {  # an evaluation after the first step that takes hours
  'source.num_examples': 10_000_000,
  'train.num_examples': 10_000_000,
  'train.split': 'train',
  'schedule.warmup': '1 steps',
  'evals.val.split': 'train',
  'evals.val.batch_size': 8,
  'evals.val.every': '1 steps',
}


@pytest.mark.long
@pytest.mark.parametrize('processes', [1, 2])
def test_a_signal_ends_an_evaluation_at_its_next_batch(tmp_path, processes):
  """The resumed run repeats the evaluation."""
  workdir = tmp_path / 'run'
  started = cli.start_pair(workdir, ENDLESS, 2, processes)
  cli.wait_for_step(workdir, 1, started)
  started[-1].send_signal(signal.SIGTERM)
  injected('SIGTERM in an evaluation')
  for process in started:
    _, err = cli.finish(process, code=42)
    assert 'preempted: stopped at step 1 of 20' in err
  assert not _evaluations(workdir)
  # The evaluation is still due.
  soon = ENDLESS | {'source.num_examples': 64, 'train.num_examples': 64}
  again = cli.train_command(workdir, **soon | {'total': '2 steps'})
  cli.run([*again, '--allow_config_change'])
  assert [step for step, _ in _evaluations(workdir)] == [1, 2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_signal_to_one_process_stops_both(tmp_path):
  """Both exit with 42 at one step; two processes resume as one would."""
  first = tmp_path / 'two'
  processes = cli.start_pair(first, LONGER, devices=2)
  cli.wait_for_step(first, 3, processes)
  processes[1].send_signal(signal.SIGTERM)  # not the process that writes files
  injected('SIGTERM to one of two processes')
  errors = [cli.finish(process, code=42)[1] for process in processes]
  steps = {err.rpartition('stopped at step ')[2].split()[0] for err in errors}
  assert len(steps) == 1, errors
  for process in cli.start_pair(first, LONGER, devices=2):
    cli.finish(process)
  expected = cli.losses(cli.reference(**LONGER))
  assert cli.losses(first) == pytest.approx(expected, rel=1e-5)
  assert [step for step, _ in _evaluations(first)] == list(range(1, 21))
