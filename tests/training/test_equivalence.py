"""Tests that meshes and interruptions do not change the computation."""

import shutil
import signal

import pytest

from tests import cli

# Dropout, averages, accumulation, several epochs inside the run.
EVERYTHING = {
  'total': '30 steps',
  'micro_batches': 2,
  'average_decay': 0.99,
  'evals.val.every': '10 steps',
  'checkpoint.every': '7 steps',
}


@pytest.mark.slow
def test_mesh_does_not_change_losses(tmp_path):
  """One device, data=8, and data=2 fsdp=2 model=2 with ZeRO-1."""
  mixed = dict(mesh__data=2, mesh__fsdp=2, mesh__model=2, mesh__zero1=True)
  cli.train(tmp_path / 'mixed', devices=8, **mixed)
  one = cli.losses(cli.reference())
  assert list(one) == list(range(1, 21))
  assert one[20] < 0.99 * one[1]
  for other in (cli.reference(devices=8), tmp_path / 'mixed'):
    losses = cli.losses(other)
    assert list(losses) == list(one)
    for step, loss in losses.items():
      assert loss == pytest.approx(one[step], rel=1e-5), (other, step)


@pytest.mark.slow
def test_a_killed_run_equals_an_uninterrupted_one(tmp_path):
  """SIGKILL at several steps: same losses, bit-identical parameters."""
  straight, killed = cli.reference(**EVERYTHING), tmp_path / 'killed'
  again = cli.train_command(killed, **EVERYTHING)
  for kill_at in (3, 19):
    process = cli.start(again)
    cli.wait_for_step(killed, kill_at, [process])
    process.send_signal(signal.SIGKILL)
    process.communicate()
  cli.run(again, forked=False)  # strings have other hashes
  assert cli.losses(killed) == cli.losses(straight)
  assert len(cli.losses(killed)) == 30
  evaluations = [
    [
      {k: v for k, v in record.items() if not k.endswith('_per_sec')}
      for record in cli.records(workdir)
      if 'val/accuracy' in record
    ]
    for workdir in (straight, killed)
  ]
  assert evaluations[0] == evaluations[1]
  assert [r['step'] for r in evaluations[0]] == [10, 20, 30]
  assert 'val_ema/accuracy' in evaluations[0][0]
  cli.assert_same_params(killed, straight)


@pytest.mark.slow
def test_resuming_on_another_mesh_gives_the_same_losses(tmp_path):
  """Ten steps on one device, then ten on data=2 fsdp=2."""
  first = shutil.copytree(cli.reference(), tmp_path / 'moved')
  # Reset the run to step 10, as if it had been stopped there.
  for item in (first / 'checkpoints').iterdir():
    if item.name == '20':
      item.rename(first / 'step20')
  cli.train(first, devices=4, mesh__data=2, mesh__fsdp=2)
  one, moved = cli.losses(cli.reference()), cli.losses(first)
  assert list(moved) == list(one)
  for step in one:
    assert moved[step] == pytest.approx(one[step], rel=1e-5), step
  aside = (first / 'metrics_set_aside.jsonl').read_text()
  assert aside.count('"loss"') == 10
