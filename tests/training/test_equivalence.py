"""Tests that meshes do not change the computation."""

import shutil

import pytest

from tests import cli


@pytest.mark.slow
def test_mesh_does_not_change_losses(tmp_path):
  """One device, data=8, and data=2 fsdp=2 model=2 with ZeRO-1."""
  mixed = dict(mesh__data=2, mesh__fsdp=2, mesh__model=2, mesh__zero1=True)
  cli.train(tmp_path / 'mixed', devices=8, **mixed)
  one = cli.losses(cli.reference())
  assert list(one) == list(range(1, 21))
  assert one[20] < 0.99 * one[1]
  for other in (cli.reference(devices=8), tmp_path / 'mixed'):
    assert cli.losses(other) == pytest.approx(one, rel=1e-5)


@pytest.mark.slow
def test_resuming_on_another_mesh_gives_the_same_losses(tmp_path):
  """Ten steps on one device, then ten on data=2 fsdp=2."""
  moved = shutil.copytree(cli.reference(), tmp_path / 'moved')
  # As if it had been stopped at step 10.
  (moved / 'checkpoints/20').rename(moved / 'step20')
  cli.train(moved, devices=4, mesh__data=2, mesh__fsdp=2)
  one = cli.losses(cli.reference())
  assert cli.losses(moved) == pytest.approx(one, rel=1e-5)
  aside = (moved / 'metrics_set_aside.jsonl').read_text()
  assert aside.count('"loss"') == 10
