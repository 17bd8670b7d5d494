"""Tests of the metrics of features."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_vit import SIZES

from tests.faults.counts import further
from tests.objectives.tiny import KEY, SIZE, batch, inputs, noisy
from vit_jax.arrays import sharding
from vit_jax.models.vit import Model
from vit_jax.objectives import health
from vit_jax.objectives.contract import Setting
from vit_jax.objectives.mixing import normalize


@pytest.mark.parametrize('n, d', [(40, 12), (7, 12), (600, 5)])
def test_effective_rank_equals_that_of_singular_values(n, d):
  """The exponential of the entropy of order 2 of their squares, by NumPy."""
  x = np.random.default_rng(0).normal(size=(n, d)) * 3.0 ** -np.arange(d)
  used = x[::2][:256] if n == 600 else x
  values = np.linalg.svd(used, compute_uv=False)
  fractions = values**2 / (values**2).sum()
  expected = np.exp(-np.log((fractions**2).sum()))
  x = jnp.array(x, jnp.float32)
  ours = jax.jit(health.effective_rank)(x)
  assert float(ours) == pytest.approx(expected, rel=1e-4)
  if n % 8 == 0:
    mesh = sharding.make_mesh(jax.devices(), data=-1)
    with jax.set_mesh(mesh):
      split = jax.device_put(x, sharding.batch_sharding(mesh))
      again = jax.jit(health.effective_rank)(split)
    assert float(again) == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['mae', *further('masked_patch')])
def test_metrics_of_objectives_that_mask_patches(name):
  """They are those of the mean tokens of the patches that the model sees."""
  module = importlib.import_module(f'vit_jax.objectives.{name}')
  of = module.Objective(Setting(Model(0, **SIZES), SIZE))
  examples = batch(12)
  params, images = noisy(of), normalize(examples['image'])
  _, (metrics, carry) = jax.jit(of.loss)(params, inputs(examples))
  assert carry == {}
  if name == 'mae':
    order = of._order(examples, KEY)
    tokens = of._encode(params['model'], images, order, None)
    assert tokens.shape[1] == 1 + of.num_visible
    tokens = tokens[:, 1:]
  else:
    _, hidden, images = of._corrupt(examples['image'], KEY)
    tokens = of._tokens(params, hidden, images, None)
  features = np.asarray(tokens).mean(1)
  values = np.linalg.svd(features, compute_uv=False) ** 2
  expected = values.sum() ** 2 / np.square(values).sum()
  assert float(metrics['effective_rank']) == pytest.approx(expected, rel=1e-4)
  unit = features / np.linalg.norm(features, axis=1, keepdims=True)
  spread = np.sqrt(unit.var(0).sum())
  assert float(metrics['feature_deviation']) == pytest.approx(spread, rel=1e-3)
