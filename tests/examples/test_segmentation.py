"""Tests of the example of a dense task, and with it of the contracts."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import segmentation
from tests import cli
from vit_jax.config import complete
from vit_jax.errors import UserError
from vit_jax.training.experiment import Experiment

CONFIG = 'examples/segmentation.py'
ROWS = 16


def test_micro_batches_with_different_counts_are_exact():
  """A mean of means would differ, because some micro-batches count less."""
  rng, metrics = np.random.default_rng(0), []
  segments = rng.integers(0, 3, (ROWS, 64, 64)).astype(np.int32)
  for row in range(ROWS):
    # Micro-batches are strided: those that start later have more pixels.
    segments[row, : 15 * (row % 4)] = segmentation.IGNORED
  image = rng.integers(0, 256, (ROWS, 64, 64, 3), np.uint8)
  batch = {'image': jnp.array(image), 'segments': jnp.array(segments)}
  for micro_batches in (1, 4):
    config = segmentation.get_config()
    config.batch_size, config.micro_batches = ROWS, micro_batches
    config.model.width, config.model.depth = 16, 1
    run = Experiment.build(config, jax.devices()[:1])
    key = jax.random.key(0)
    state = jax.jit(run.init_state)(key)
    step = jax.jit(run.trainer.train_step)
    metrics.append(jax.device_get(step(state, batch, key, {})[1]))
  one, four = metrics
  for name in ('loss', 'pixel_accuracy', 'grad_norm'):
    np.testing.assert_allclose(four[name], one[name], rtol=1e-5, err_msg=name)


def test_a_missing_result_is_refused_by_name():
  """An evaluator of pixels needs an objective with their classes."""
  config = segmentation.get_config()
  with config.unlocked():
    config.objective = dict(name='supervised')
    config.num_classes = 6
  run = Experiment.build(complete(config), jax.devices()[:1])
  assert 'patches' in run.objective.results
  setting = segmentation.contract.Setting(
    pytest.fail, run.preprocess, run.objective, run.mesh, 8, None
  )
  with pytest.raises(UserError, match='classes.*patches'):
    segmentation.Evaluator(setting, split='test', classes=3)


@pytest.mark.slow
def test_it_learns_and_is_evaluated_at_another_size(tmp_path):
  """`evaluate` repeats both evaluators; a map of background has .25.

  Its batches have another size, so a few pixels at edges change their class.
  """
  changes = {'total': '60 steps', 'model.depth': 1, 'log.report': 'false'}
  changes |= {'evals.val.every': '60 steps', 'checkpoint.every': '60 steps'}
  cli.run(cli.command('train', *cli.flags(CONFIG, tmp_path, changes)))
  last = [line for line in cli.lines(tmp_path) if 'val/miou' in line][-1]
  assert last['val/miou'] > 0.3
  command = cli.command('evaluate', f'--checkpoint={tmp_path}', '--json')
  again = json.loads(cli.run(command)[0])
  for name in ('val/miou', 'large/miou'):
    assert again[name] == pytest.approx(last[name], abs=1e-4)
  assert again['val/miou'] != again['large/miou']
