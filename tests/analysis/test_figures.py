"""Tests that figures show the attention that computes the logits."""

import numpy as np
import pytest
from sklearn.decomposition import PCA
from tiny_vit import SIZES, noise_params

from vit_jax.analysis import figures, gallery
from vit_jax.models import resnet
from vit_jax.models.vit import Model as vit_model
from vit_jax.objectives import supervised
from vit_jax.objectives.contract import Setting

SIZE = (8, 12)  # 2x3 patches


def pixels(count, size=SIZE):
  rng = np.random.default_rng(1)
  return rng.integers(0, 256, (count, *size, 3), np.uint8)


def objective_of(model, size=SIZE):
  return supervised.Objective(Setting(model, size))


@pytest.fixture(scope='module')
def small():
  model = vit_model(5, **SIZES, pool='token')
  return model, noise_params(model, SIZE)


def test_all_arrays_of_a_model_with_a_class_token(small):
  model, params = small
  whole = figures.examine(objective_of(model), params, pixels(5), shown=3)
  assert whole.missing == [] and whole.by_token
  shapes = {name: array.shape for name, array in whole.arrays.items()}
  assert shapes == {
    'images': (3, *SIZE, 3),
    'filters': (16, 4, 4, 3),  # no more filters than channels
    'filter_shares': (16,),
    'similarity': (2, 3, 2, 3),
    'rollout': (3, 2, 3),
    'rollout_plain': (3, 2, 3),
    'heads': (3, 2, 2, 3),
    'components': (3, 2, 3, 3),
    'distance': (5, 3, 2),
  }


@pytest.mark.slow
def test_components_of_patches_equal_those_of_scikit_learn(small):
  """Of the patches of all images; each scaled to [0, 1]."""
  model, params = small
  images = pixels(4)
  found = figures.examine(objective_of(model), params, images)
  components = found.arrays['components'].reshape(24, 3)
  inputs = np.float32(images) / 127.5 - 1
  want = ('tokens',)
  outputs = model.apply({'params': params}, inputs, method='predict', want=want)
  tokens = np.asarray(outputs['tokens'], np.float64)[:, 1:].reshape(24, -1)
  expected = PCA(3).fit_transform(tokens)
  expected = (expected - expected.min(0)) / np.ptp(expected, axis=0)
  for ours, theirs in zip(components.T, expected.T, strict=True):
    same = np.allclose(ours, theirs, atol=1e-4)
    assert same or np.allclose(1 - ours, theirs, atol=1e-4)  # the sign is free


def test_a_resnet_has_filters_and_lists_missing_figures():
  model = resnet.Model(5, depths=(1,), width_factor=1, dtype='float32')
  params = noise_params(model, (32, 32), 0.1)
  size = (32, 32)
  objective = objective_of(model, size)
  found = figures.examine(objective, params, pixels(2, size))
  assert found.arrays['filters'].shape == (28, 7, 7, 3)
  assert [*gallery.all_figures(found, [])] == ['filters']
  positions, attention = found.missing
  assert 'position' in positions and 'ResNet has no attention' in attention


def test_mean_pooling_and_no_learned_positions():
  model = vit_model(5, **SIZES, pool='gap', position='sincos2d')
  params = noise_params(model, SIZE)
  found = figures.examine(objective_of(model), params, pixels(2))
  assert not found.by_token and 'similarity' not in found.arrays
  assert len(found.missing) == 1 and 'no learned positions' in found.missing[0]
  assert found.arrays['rollout'].sum((1, 2)) == pytest.approx([1, 1])
