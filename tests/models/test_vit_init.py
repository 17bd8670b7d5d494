"""Tests of initial values against the official codes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_vit import KEY, SIZES

from tests.faults.counts import further
from vit_jax.arrays import tree
from vit_jax.models.vit import Model


@pytest.fixture(scope='module')
def initial():
  """Returns the initial parameters of a model with all parts, by path."""
  model = Model(
    7,
    **SIZES | dict(width=64, mlp_dim=128, num_heads=4),
    pre_logits=True,
    head_bias=-10.0,
  )
  init = jax.jit(model.init)
  return tree.flatten(init(KEY, jnp.zeros((1, 32, 32, 3)))['params'])


@pytest.mark.slow
def test_initial_zeros_and_constants(initial):
  """Class token, head kernel and most biases are zero; norms are one."""
  for path in ('cls', 'head/kernel', 'embedding/bias', 'pre_logits/bias'):
    assert not np.any(initial[path]), path
  assert not np.any(initial['encoder/layers/attention/query/bias'])
  assert np.all(initial['head/bias'] == -10.0)
  assert np.all(initial['encoder/layers/norm1/scale'] == 1.0)


@pytest.mark.parametrize(
  'path, inputs, outputs',
  [
    ('attention/query/kernel', 64, 64),
    ('attention/out/kernel', 64, 64),
    ('mlp/fc1/kernel', 64, 128),
    ('mlp/fc2/kernel', 128, 64),
  ],
)
def test_xavier_bounds_of_flat_matrices(initial, path, inputs, outputs):
  """Uniform within ±√(6 / (in + out)) per layer, with heads flattened."""
  kernel = np.asarray(initial[f'encoder/layers/{path}'])
  bound = np.sqrt(6 / (inputs + outputs))
  for layer in kernel:
    assert 0.99 * bound < np.abs(layer).max() <= bound
    # Standard deviation bound / √3; 4096 values or more: five sigmas are 4 %.
    assert layer.std() == pytest.approx(bound / np.sqrt(3), rel=0.04)
  assert not np.allclose(kernel[0], kernel[1])


@pytest.mark.parametrize(
  'path, deviation',
  [
    ('embedding/kernel', 1 / np.sqrt(4 * 4 * 3)),
    ('pre_logits/kernel', 1 / np.sqrt(64)),
    ('position/embedding', 0.02),
    ('encoder/layers/mlp/fc1/bias', 1e-6),
    ('encoder/layers/mlp/fc2/bias', 1e-6),
  ],
)
def test_initial_standard_deviations(initial, path, deviation):
  """LeCun normal at both ends, N(0, 0.02) positions, N(0, 1e-6) MLP biases."""
  values = np.asarray(initial[path])
  # The relative error of a standard deviation from n values is 1 / √(2 n).
  tolerance = 5 / np.sqrt(2 * values.size)
  assert values.std() == pytest.approx(deviation, rel=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
  'options', [dict(distilled=True), *further(dict(pool='map'))]
)
def test_truncated_normal_initialization(options):
  """DeiT: N(0, .02) for all matrices and tokens, zeros for all biases.

  The patch embedding is uniform within ±1 / √inputs, as PyTorch initializes a
  convolution.
  """
  model = Model(
    100,
    **SIZES | dict(width=64, mlp_dim=128, num_heads=4),
    **options,
    start_values='trunc_normal',
  )
  init = jax.jit(model.init)
  params = tree.flatten(init(KEY, jnp.zeros((1, 32, 32, 3)))['params'])
  bound = 1 / np.sqrt(4 * 4 * 3)
  for path, leaf in params.items():
    values = np.asarray(leaf)
    if path.startswith('embedding/'):
      assert 0.9 * bound < np.abs(values).max() <= bound, path
    elif path.endswith('/bias'):
      assert not np.any(values), path
    elif not path.endswith('/scale'):
      # The relative error of a standard deviation from n values is 1 / √(2 n).
      tolerance = 5 / np.sqrt(2 * values.size)
      assert values.std() == pytest.approx(0.02, rel=tolerance), path
