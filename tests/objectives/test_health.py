"""Tests of the metrics of features."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.arrays import sharding
from vit_jax.objectives import health


@pytest.mark.parametrize('n, d', [(40, 12), (7, 12), (600, 5)])
def test_effective_rank_equals_that_of_singular_values(n, d):
  """The exponential of the entropy of order 2 of their squares, by NumPy."""
  x = np.random.default_rng(0).normal(size=(n, d)) * 3.0 ** -np.arange(d)
  used = x[::2][:256] if n == 600 else x
  values = np.linalg.svd(used, compute_uv=False)
  fractions = values**2 / (values**2).sum()
  expected = np.exp(-np.log((fractions**2).sum()))
  ours = jax.jit(health.effective_rank)(jnp.array(x, jnp.float32))
  assert float(ours) == pytest.approx(expected, rel=1e-4)
  mesh = sharding.make_mesh(jax.devices(), data=-1)
  if n % 8 == 0:
    with jax.set_mesh(mesh):
      split = jax.device_put(
        jnp.array(x, jnp.float32), sharding.batch_sharding(mesh)
      )
      again = jax.jit(health.effective_rank)(split)
    assert float(again) == pytest.approx(expected, rel=1e-4)


def test_metrics_of_collapsed_and_of_spread_features():
  """1 and 0 for multiples of one vector, d and 1 for all directions."""
  alike = jnp.outer(jnp.arange(1.0, 9), jnp.arange(1.0, 7))
  metrics = health.feature_metrics(alike)
  assert float(metrics['effective_rank']) == pytest.approx(1, abs=1e-3)
  assert float(metrics['feature_deviation']) < 1e-3
  spread = jnp.concatenate([jnp.eye(6), -jnp.eye(6)])
  metrics = health.feature_metrics(spread)
  assert float(metrics['effective_rank']) == pytest.approx(6, rel=1e-5)
  assert float(metrics['feature_deviation']) == pytest.approx(1, rel=1e-5)
