"""Tests of `study` after SIGKILL."""

import csv
import json
import signal

import pytest

from tests import cli


def _final_accuracy(workdir, last):
  """Returns the accuracy at the last step; checks that steps occur once."""
  assert list(cli.losses(workdir)) == list(range(1, last + 1))
  records = [r for r in cli.records(workdir) if 'test/accuracy' in r]
  assert [r['step'] for r in records] == [last]
  return records[0]['test/accuracy']


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_killed_study_runs_everything_once(tmp_path):
  """It is killed during a pre-training, and preempted during the next one."""
  arguments = cli.command(
    'study', '--config=tests/study/small_study.py', f'--workdir={tmp_path}'
  )
  first = tmp_path / 'depth-1/pretrain/final/seed=0'
  cli.kill_when(
    arguments, (first / 'checkpoints/8').exists, 'a study and its run', 240
  )
  process = cli.start(arguments)
  second = tmp_path / 'depth-2/pretrain/final/seed=0/checkpoints/8'
  cli.wait_until(second.exists, process)
  process.send_signal(signal.SIGTERM)
  assert 'the same command' in cli.finish(process, code=42)[1]
  cli.injected('SIGTERM of a study')
  out, _ = cli.run(arguments)
  accuracies = {}
  for depth in (1, 2):
    pretrain = tmp_path / f'depth-{depth}/pretrain/final/seed=0'
    (few,) = tmp_path.glob(f'depth-{depth}/from-seed=0/fewshot-*/result.json')
    result = json.loads(few.read_text())
    assert result['checkpoint'] == f'{pretrain}/checkpoints/24'
    values = [_final_accuracy(pretrain, 24), result['1shot'], result['5shot']]
    accuracies[depth] = values
    cells = [f'{100 * value:.2f}' for value in values]
    assert f'| depth {depth} | {" | ".join(cells)} |' in out
  with open(tmp_path / 'results.csv', newline='') as file:
    rows = [float(row['value']) for row in csv.DictReader(file)]
  assert rows == [*accuracies[1], *accuracies[2]]
  before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob('*.jsonl')}
  out, _ = cli.run([*arguments, '--print_jobs'])
  assert out == ''  # nothing remains to be done
  for path, changed in before.items():
    assert path.stat().st_mtime_ns == changed
