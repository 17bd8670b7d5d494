"""Tests that a run on two processes equals one on a single process."""

import json

import pytest

from tests import cli


@pytest.mark.slow
def test_two_processes_equal_one_and_resume_on_one(tmp_path):
  """The losses are the same; one process then resumes the run."""
  alone = cli.reference(devices=8)
  mesh = {'mesh.data': 4, 'mesh.fsdp': 2}
  for process in cli.start_pair(tmp_path / 'two', mesh, devices=4):
    cli.finish(process)
  one = cli.losses(alone)
  assert cli.losses(tmp_path / 'two') == pytest.approx(one, rel=1e-5)
  records = cli.records(tmp_path / 'two')
  assert [r['val/count'] for r in records if 'val/count' in r] == [256, 256]
  described = json.loads((tmp_path / 'two/run.json').read_text())
  assert described['num_processes'] == 2
  (tmp_path / 'two/checkpoints/20').rename(tmp_path / 'aside')
  cli.train(tmp_path / 'two', devices=1)
  assert cli.losses(tmp_path / 'two') == pytest.approx(one, rel=1e-5)
