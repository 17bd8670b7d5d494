"""Tests of SIGKILL at random moments."""

import random
import signal
import subprocess

import pytest

from tests import cli
from tests.faults.counts import count, injected

RUN = {
  'total': '40 steps',
  'batch_size': 64,
  'model.width': 128,
  'model.mlp_dim': 512,
  'image_size': 64,
  'model.depth': 2,
  'average_decay': 0.99,
  'evals.val.every': '10 steps',
  'checkpoint.every': '2 steps',
}


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_run_killed_at_random_moments_is_exact(tmp_path):
  """Its parameters and metrics equal those of an uninterrupted run."""
  kills = count(5, 50)
  straight, killed = tmp_path / 'straight', tmp_path / 'killed'
  cli.train(straight, **RUN)
  again = cli.train_command(killed, **RUN)
  rng, done = random.Random(0), 0
  finished = None
  while done < kills:
    process = cli.start(again)
    try:
      # Kills occur during the start, and during steps and saves.
      process.wait(timeout=rng.uniform(4, 14))
      finished = cli.finish(process)  # it finished, so steps are removed
      _take_back(killed)
    except subprocess.TimeoutExpired:
      process.send_signal(signal.SIGKILL)
      process.communicate()
      done += 1
      injected('SIGKILL at a random moment')
  finished = cli.run(again)
  assert finished is not None
  assert cli.losses(killed) == cli.losses(straight)
  assert list(cli.losses(killed)) == list(range(1, 41))
  accuracies = [
    [
      (r['step'], r['val/accuracy'], r['val_ema/accuracy'])
      for r in cli.records(w)
      if 'val/accuracy' in r
    ]
    for w in (straight, killed)
  ]
  assert accuracies[0] == accuracies[1]
  assert [step for step, *_ in accuracies[0]] == [10, 20, 30, 40]
  cli.assert_same_params(killed, straight)


def _take_back(workdir) -> None:
  """Removes the last checkpoints of a finished run, so that it continues."""
  for path in (workdir / 'checkpoints').iterdir():
    if path.name.isdigit() and int(path.name) > 10:
      path.rename(workdir / f'{path.name}-{random.random()}')
