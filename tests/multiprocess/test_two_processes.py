"""Tests that a run on two processes equals one on a single process."""

import json
import sys

import pytest

from tests import cli


@pytest.mark.slow
def test_two_processes_equal_one_and_resume_on_one(tmp_path):
  """The losses are the same; one process then resumes the run."""
  alone = cli.reference(devices=8)
  mesh = {'mesh.data': 4, 'mesh.fsdp': 2}
  for process in cli.start_pair(tmp_path / 'two', mesh, devices=4):
    cli.finish(process)
  one, two = cli.losses(alone), cli.losses(tmp_path / 'two')
  assert list(one) == list(two)
  for step in one:
    assert two[step] == pytest.approx(one[step], rel=1e-5), step
  counts = [
    r['val/count'] for r in cli.records(tmp_path / 'two') if 'val/count' in r
  ]
  assert counts == [256, 256]
  assert (
    json.loads((tmp_path / 'two/run.json').read_text())['num_processes'] == 2
  )
  (tmp_path / 'two/checkpoints/20').rename(tmp_path / 'aside')
  cli.train(tmp_path / 'two', devices=1)
  resumed = cli.losses(tmp_path / 'two')
  assert list(resumed) == list(one)
  for step in one:
    assert resumed[step] == pytest.approx(one[step], rel=1e-5), step


ENDING_EARLY = cli.SMALL_L16 | {
  'model.depth': 1,
  'total': '12 steps',
  'schedule.warmup': '2 steps',
  'schedule.base_lr': 0.0,  # the accuracy does not change
  'schedule.end_lr': 0.0,
  'evals.val.every': '2 steps',
  'checkpoint.every': '4 steps',
  'checkpoint.best': 'val/accuracy',
  'early_stop_patience': 2,
}


def _train(workdir, processes):
  """Trains on two devices; returns the messages of each process.

  Only the main process has read metrics.jsonl since it was written.
  """
  arguments = cli.flags('configs/l16_i21k.py', workdir, ENDING_EARLY)
  module = 'tests.multiprocess.outdated_metrics'
  started = cli.start_group(
    [sys.executable, '-m', module, *arguments], processes, 2 // processes
  )
  try:
    return [cli.finish(process)[1] for process in started]
  finally:
    for process in started:
      process.kill()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_two_processes_end_early_like_one(tmp_path):
  """At step 6, after two evaluations without a better result than at step 2.

  A second start does not continue.
  """
  for number, name in ((1, 'one'), (2, 'two')):
    _train(tmp_path / name, number)
    [early] = cli.events(tmp_path / name, 'early_stop')
    assert (early['step'], early['best_step'], early['evaluations']) == (
      6,
      2,
      2,
    )
  one, two = cli.losses(tmp_path / 'one'), cli.losses(tmp_path / 'two')
  assert list(one) == list(two) == list(range(1, 7))
  assert two == pytest.approx(one, rel=1e-5)
  kept = [
    {path.name for path in (tmp_path / name / 'checkpoints').iterdir()}
    for name in ('one', 'two')
  ]
  assert kept[0] == kept[1] and '6' in kept[0]
  cli.remove_finished_event(tmp_path / 'two')
  messages, _ = _train(tmp_path / 'two', 2)
  assert 'ending early at step 6 of 12' in messages
  assert cli.losses(tmp_path / 'two') == two
