"""Tests of SIGKILL: a killed run equals an uninterrupted one."""

import random
import signal
import subprocess

import pytest

from tests import cli
from tests.faults.counts import injected

# Averages, accumulation, several epochs inside the run.
RUN = {
  'total': '30 steps',
  'micro_batches': 2,
  'average_decay': 0.99,
  'evals.val.every': '10 steps',
  'checkpoint.every': '7 steps',
}


def _assert_equal(killed, straight, steps):
  """Checks that all metrics and parameters have the same bits."""
  assert cli.losses(killed) == cli.losses(straight)
  assert list(cli.losses(killed)) == list(range(1, steps + 1))
  evaluations = [
    [
      {k: v for k, v in record.items() if not k.endswith('_per_sec')}
      for record in cli.records(workdir)
      if 'val/accuracy' in record
    ]
    for workdir in (straight, killed)
  ]
  assert evaluations[0] == evaluations[1]
  evaluated = [record['step'] for record in evaluations[0]]
  assert evaluated == list(range(10, steps + 1, 10))
  assert 'val_ema/accuracy' in evaluations[0][0]
  cli.assert_same_params(killed, straight)


def _kill_at(steps, workdir, command, devices=1):
  for step in steps:
    process = cli.start(command, devices)
    cli.wait_for_step(workdir, step, [process])
    process.send_signal(signal.SIGKILL)
    process.communicate()
    injected('SIGKILL after a step')


@pytest.mark.slow
def test_a_run_killed_at_several_steps_is_exact(tmp_path):
  straight, killed = cli.reference(**RUN), tmp_path / 'killed'
  again = cli.train_command(killed, **RUN)
  _kill_at((3, 19), killed, again)
  cli.run(again, forked=False)  # strings have other hashes
  _assert_equal(killed, straight, 30)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
  'model, changes',
  [
    ('vit', {'model.position': 'rope2d', 'model.registers': 2}),
    ('swin', {'model.width': 24}),
  ],
)
def test_a_killed_run_of_another_model_is_exact(tmp_path, model, changes):
  """Eight devices; drop path and dropout depend on the step only."""
  changes |= cli.QUIET | {
    'source.name': 'synthetic',
    'source.num_examples': 64,
    'train.num_examples': 64,
    'batch_size': 16,
    'total': '8 steps',
    'schedule.warmup': '2 steps',
    'model.drop_path': 0.2,
    'checkpoint.every': '3 steps',
    'mesh.data': 2,
    'mesh.fsdp': 2,
    'mesh.model': 2,
  }
  straight, killed = tmp_path / 'straight', tmp_path / 'killed'
  config = f'configs/cifar10.py:model={model}'
  again = cli.command('train', *cli.flags(config, killed, changes))
  _kill_at((5,), killed, again, 8)
  for workdir in (straight, killed):
    cli.run(cli.command('train', *cli.flags(config, workdir, changes)), 8)
  assert cli.lines(killed) == cli.lines(straight)
  cli.assert_same_params(killed, straight)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_run_killed_at_random_moments_is_exact(tmp_path):
  """50 kills during the start, and during steps and saves."""
  sizes = {'batch_size': 64, 'image_size': 64, 'model.width': 128}
  changes = RUN | sizes | {'total': '40 steps', 'checkpoint.every': '2 steps'}
  straight, killed = cli.reference(**changes), tmp_path / 'killed'
  again = cli.train_command(killed, **changes)
  moments, kills = random.Random(0), 0
  while kills < 50:
    process = cli.start(again)
    try:
      process.wait(timeout=moments.uniform(4, 14))
      cli.finish(process)
      _take_back(killed)
    except subprocess.TimeoutExpired:
      process.send_signal(signal.SIGKILL)
      process.communicate()
      kills += 1
      injected('SIGKILL at a random moment')
  cli.run(again)
  _assert_equal(killed, straight, 40)


def _take_back(workdir) -> None:
  """Removes the last checkpoints of a finished run, so that it continues."""
  for path in (workdir / 'checkpoints').iterdir():
    if path.name.isdigit() and int(path.name) > 10:
      path.rename(workdir / f'{path.name}-{random.random()}')
