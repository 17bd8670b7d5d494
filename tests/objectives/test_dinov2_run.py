"""Tests of DINOv2 with the real commands."""

import signal

import numpy as np
import pytest
import small_dino

from tests import cli
from vit_jax import load_pretrained
from vit_jax.arrays import tree

CONFIG = 'configs/dinov2.py:recipe=short,model=S,patch=16'
RULES = "(('(head|patch_head)/last/.*', {'lr_after': '8 steps'}),)"
# Four epochs of four steps.
SMALL = small_dino.SMALL | {
  'augment.patch_size': 4,
  'augment.group': 4,
  # With the recipe's 1e-5, the class tokens of all images are at first so
  # similar that rounding determines the nearest neighbours of KoLeo.
  'model.layer_scale': 1.0,
  'total': '16 steps',
  'objective.temperature_warmup': '8 steps',
  'optimizer.rules': RULES,
  'evals.knn.every': '8 steps',
  'checkpoint.every': '2 steps',
}


@pytest.fixture(scope='module')
def straight(tmp_path_factory):
  """Returns the workdir of an uninterrupted run on one device."""
  workdir = tmp_path_factory.mktemp('dinov2') / 'straight'
  cli.run(cli.command('train', *cli.flags(CONFIG, workdir, SMALL)))
  return workdir


def train_killed(workdir, kills, devices):
  """Trains to the end on some devices, after kills on other numbers of them.

  Args:
    workdir: workdir of the run.
    kills: pairs of a step, after which the run is killed, and the devices.
    devices: number of devices of the last part.
  """
  command = cli.command('train', *cli.flags(CONFIG, workdir, SMALL))
  for step, killed_devices in kills:
    process = cli.start(command, killed_devices)
    cli.wait_for_step(workdir, step, [process])
    process.send_signal(signal.SIGKILL)
    process.communicate()
  cli.run(command, devices)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_killed_twice_equals_an_uninterrupted_one(straight, tmp_path):
  """Once while the last layer is frozen, and once afterwards."""
  killed = tmp_path / 'killed'
  train_killed(killed, [(3, 1), (11, 1)], 1)
  assert cli.lines(killed) == cli.lines(straight)
  for one, other in zip(
    *(tree.flatten(cli.final_params(x)).values() for x in (straight, killed)),
    strict=True,
  ):
    np.testing.assert_array_equal(one, other)
  trained = [line for line in cli.lines(straight) if 'loss' in line]
  assert [line['step'] for line in trained] == list(range(1, 17))
  for line in trained:
    assert 0.999 < line['effective_rank'] < 8.001  # micro-batch, width
    assert 0 < line['feature_deviation'] < 1 and line['teacher_kl'] > 0
    total = line['crop_loss'] + line['patch_loss'] + 0.1 * line['koleo']
    assert line['loss'] == pytest.approx(total, rel=1e-5)
  _continue_from_weights(straight, tmp_path)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_resumed_on_other_devices_is_equal_to_rounding(
  straight, tmp_path
):
  """Four devices, then two: groups are on several devices, then on one.

  Other devices add numbers in another order. The gradient of KoLeo, which is
  large for images with similar features, and Adam amplify the rounding errors,
  so other metrics differ by up to 1e-3.
  """
  killed = tmp_path / 'killed'
  train_killed(killed, [(7, 4)], 2)
  _, resumed = cli.events(killed, 'start')
  assert resumed['step'] > 0
  ours, theirs = (
    [line for line in cli.lines(workdir) if 'loss' in line]
    for workdir in (killed, straight)
  )
  assert [line['step'] for line in ours] == list(range(1, 17))
  for one, other in zip(ours, theirs, strict=True):
    for name in ('loss', 'crop_loss', 'patch_loss', 'effective_rank'):
      assert one[name] == pytest.approx(other[name], rel=1e-4), name


def _continue_from_weights(trained, folder):
  """Checks that backbone and teacher are those of the weights."""
  weights = folder / 'weights'
  cli.run(
    cli.command('convert', '--weights=teacher', str(trained), str(weights))
  )
  expected = tree.flatten(load_pretrained(str(weights))[1])
  continued = folder / 'continued'
  still = {
    'init_from': weights,
    'total': '2 steps',
    'schedule.warmup': '0 steps',
    'schedule.base_lr': 0.0,
    'schedule.end_lr': 0.0,
    'evals.knn.every': '2 steps',
  }
  cli.run(cli.command('train', *cli.flags(CONFIG, continued, SMALL | still)))
  ours = tree.flatten(cli.final_params(continued))
  for path, leaf in expected.items():
    np.testing.assert_array_equal(ours[f'model/{path}'], leaf, err_msg=path)
  *_, last = (line for line in cli.lines(continued) if 'knn/5nn' in line)
  assert last['knn/5nn'] == last['knn_teacher/5nn']
