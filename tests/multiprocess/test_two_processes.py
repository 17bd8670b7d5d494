"""Tests that a run on two processes equals one on a single process."""

import json

import pytest

from tests import cli


@pytest.mark.slow
def test_two_processes_equal_one_and_resume_on_one(tmp_path):
  """The losses are the same; one process then resumes the run."""
  cli.train(tmp_path / 'one', devices=8)
  mesh = {'mesh.data': 4, 'mesh.fsdp': 2}
  for process in cli.start_pair(tmp_path / 'two', mesh, devices=4):
    cli.finish(process)
  one, two = cli.losses(tmp_path / 'one'), cli.losses(tmp_path / 'two')
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
