"""Tests of initial values of a ViT and a Swin against the official codes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_vit import SIZES

from tests.faults.counts import further
from vit_jax.arrays import tree
from vit_jax.models import swin
from vit_jax.models.vit import Model

WIDE = SIZES | dict(width=64, mlp_dim=128, num_heads=4)


def initial(model):
  """Returns the initial parameters by path."""
  key = jax.random.key(0, impl='unsafe_rbg')  # quick to compile
  params = jax.jit(model.init)(key, jnp.zeros((1, 32, 32, 3)))['params']
  return tree.flatten(jax.tree.map(np.asarray, params))


@pytest.fixture(scope='module')
def authors():
  """Returns the parameters of a model with all parts."""
  return initial(Model(7, **WIDE, pre_logits=True, head_bias=-10.0))


@pytest.mark.parametrize(
  'path, inputs, outputs',
  [
    ('attention/query/kernel', 64, 64),
    ('attention/out/kernel', 64, 64),
    ('mlp/fc1/kernel', 64, 128),
    ('mlp/fc2/kernel', 128, 64),
  ],
)
def test_xavier_bounds_of_flat_matrices(authors, path, inputs, outputs):
  """Uniform within ±√(6 / (in + out)) per layer, with heads flattened."""
  kernel, bound = (
    authors[f'encoder/layers/{path}'],
    np.sqrt(6 / (inputs + outputs)),
  )
  for layer in kernel:
    assert 0.99 * bound < np.abs(layer).max() <= bound
    # Standard deviation bound / √3; 4096 values or more: five sigmas are 4 %.
    assert layer.std() == pytest.approx(bound / np.sqrt(3), rel=0.04)
  assert not np.allclose(kernel[0], kernel[1])


def has_std(values, std):
  # The relative error of a standard deviation from n values is 1 / √(2 n).
  return values.std() == pytest.approx(std, rel=5 / np.sqrt(2 * values.size))


def test_initial_constants_and_standard_deviations(authors):
  """LeCun's normal at both ends; most biases, class token and head are zero."""
  for path, std in {
    'embedding/kernel': 1 / np.sqrt(4 * 4 * 3),
    'pre_logits/kernel': 1 / np.sqrt(64),
    'position/embedding': 0.02,
    'encoder/layers/mlp/fc1/bias': 1e-6,
    'encoder/layers/mlp/fc2/bias': 1e-6,
  }.items():
    assert has_std(authors[path], std), path
  for path in ('cls', 'head/kernel', 'embedding/bias', 'pre_logits/bias'):
    assert not np.any(authors[path]), path
  assert not np.any(authors['encoder/layers/attention/query/bias'])
  assert np.all(authors['head/bias'] == -10.0)
  assert np.all(authors['encoder/layers/norm1/scale'] == 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
  'model',
  [
    Model(100, **WIDE, distilled=True, start_values='trunc_normal'),
    swin.Model(10, width=64, depths=(2, 2), num_heads=2, window_size=2),
    *further(Model(100, **WIDE, pool='map', start_values='trunc_normal')),
  ],
)
def test_truncated_normal_initialization(model):
  """DeiT and Swin: N(0, .02) for matrices, tokens and tables, zero biases.

  The patch embedding is uniform within ±1 / √inputs, as PyTorch initializes a
  convolution.
  """
  bound = 1 / np.sqrt(4 * 4 * 3)
  for path, values in initial(model).items():
    if path.startswith('embedding/'):
      assert 0.9 * bound < np.abs(values).max() <= bound, path
    elif path.endswith('/bias'):
      assert not np.any(values), path
    elif not path.endswith('/scale'):
      assert has_std(values, 0.02), path
