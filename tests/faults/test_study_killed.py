"""A study that is killed runs everything once, in order, and is drawn."""

import csv
import json
import os
import pathlib
import signal
import time

import numpy as np
import pytest

from tests import runs
from tests.faults.counts import injected


def _kill_when(arguments, seen):
  """Starts a study; kills it and its run when something is to be seen."""
  process = runs.start(arguments)
  deadline = time.monotonic() + 240
  while not seen():
    assert process.poll() is None, process.communicate()[1][-3000:]
    assert time.monotonic() < deadline
    time.sleep(0.005)
  children = pathlib.Path(f'/proc/{process.pid}/task/{process.pid}/children')
  for each in [process.pid, *map(int, children.read_text().split())]:
    os.kill(each, signal.SIGKILL)
  process.communicate()
  injected('SIGKILL of a study and its run')


def _judged(workdir, last):
  """The accuracy at the last step; every step was taken once."""
  assert list(runs.losses(workdir)) == list(range(1, last + 1))
  records = [r for r in runs.records(workdir) if 'test/accuracy' in r]
  assert [r['step'] for r in records] == [last]
  return records[0]['test/accuracy']


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed(tmp_path):
  """In the middle of the first pre-training."""
  arguments = runs.command(
    'study', '--config=tests/study/small_study.py', f'--workdir={tmp_path}'
  )
  first = tmp_path / 'depth-1/pretrain/final/seed=0'
  _kill_when(arguments, (first / 'checkpoints/8').exists)
  out, _ = runs.run(arguments)
  accuracies = {}
  for depth in (1, 2):
    pretrain = tmp_path / f'depth-{depth}/pretrain/final/seed=0'
    (few,) = tmp_path.glob(f'depth-{depth}/from-seed=0/fewshot-*/result.json')
    result = json.loads(few.read_text())
    assert result['checkpoint'] == f'{pretrain}/checkpoints/24'
    judged = [_judged(pretrain, 24), result['1shot'], result['5shot']]
    if depth == 1:
      tuned = tmp_path / 'depth-1/from-seed=0/tuned/final/seed=0'
      about = json.loads((tuned / 'config.json').read_text())
      assert about['init_from'] == str(pretrain)
      assert about['model']['depth'] == depth
      judged.append(_judged(tuned, 4))
    accuracies[depth] = judged
    cells = [f'{100 * value:.2f}' for value in judged]
    cells += [''] * (4 - len(cells))
    assert f'| depth {depth} | {" | ".join(cells)} |' in out
  with open(tmp_path / 'results.csv', newline='') as file:
    rows = [float(row['value']) for row in csv.DictReader(file)]
  assert rows == [*accuracies[1], *accuracies[2]]
  drawn = np.load(tmp_path / 'figure.npz')['5-shot/ViT']
  np.testing.assert_allclose(
    drawn[1], [100 * accuracies[depth][2] for depth in (1, 2)]
  )
  assert 0 < drawn[0][0] < drawn[0][1]  # the deeper one cost more
  assert (tmp_path / 'figure.png').stat().st_size > 5_000
  before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob('*.jsonl')}
  out, _ = runs.run([*arguments, '--print_jobs'])
  assert out == ''  # nothing is left to be done
  for path, changed in before.items():
    assert path.stat().st_mtime_ns == changed
