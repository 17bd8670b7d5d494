"""Tests of the example of images and texts, and with it of the contracts."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from examples import contrastive
from tests import cli
from vit_jax.objectives.contract import Inputs
from vit_jax.training.experiment import Experiment

CONFIG = 'examples/contrastive.py'


@pytest.mark.slow
def test_the_loss_is_that_of_siglip():
  """Compares with the pseudocode of Algorithm 1, in PyTorch."""
  config = contrastive.get_config()
  config.model.width, config.model.depth = 16, 1
  run = Experiment.build(config, jax.devices()[:1])
  rng = np.random.default_rng(0)
  batch = {
    'image': jnp.array(rng.integers(0, 256, (6, 64, 64, 3)), jnp.uint8),
    'tokens': jnp.array(rng.integers(0, 8, (6, 8)), jnp.int32),
  }
  params = run.init_state(jax.random.key(0)).params
  inputs = Inputs({}, batch, jax.random.key(1), jnp.int32(0), {})
  loss, _ = run.objective.loss(params, inputs)
  found = run.objective.predict(params, batch, ('image', 'text'))
  images, texts = (
    torch.nn.functional.normalize(torch.tensor(np.array(found[name])))
    for name in ('image', 'text')
  )
  logits = images @ texts.T * 10 - 10
  labels = 2 * torch.eye(6) - torch.ones(6, 6)
  expected = -torch.nn.functional.logsigmoid(labels * logits).sum() / 6
  np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)


@pytest.mark.slow
def test_it_learns_and_is_evaluated(tmp_path):
  """`evaluate` repeats the accuracy, which is above chance (.17)."""
  changes = {'total': '120 steps', 'model.depth': 1, 'log.report': 'false'}
  changes |= {'evals.zero.every': '120 steps', 'checkpoint.every': '120 steps'}
  cli.run(cli.command('train', *cli.flags(CONFIG, tmp_path, changes)))
  last = [line for line in cli.lines(tmp_path) if 'zero/accuracy' in line][-1]
  assert last['zero/accuracy'] > 0.25
  command = cli.command('evaluate', f'--checkpoint={tmp_path}', '--json')
  again = json.loads(cli.run(command)[0])
  assert again['accuracy'] == pytest.approx(last['zero/accuracy'], abs=1e-6)
