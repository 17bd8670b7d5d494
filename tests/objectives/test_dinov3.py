"""Tests of the parts of DINOv3; test_dinov2.py compares whole trainings."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from test_dinov2 import GRID, GROUP, built, model_of, random_params, transform

from vit_jax.models import positions


def test_masks_are_topped_up():
  """Masked crop i has the upper end of its interval; others have none."""
  of = transform('im1k').in_batches(2 * GROUP, 1)
  example = {'image': np.full((40, 50, 3), 9, np.uint8), 'run_seed': 0}
  counts = [
    of(example | {'run_position': i}, np.random.default_rng(i))['masks'].sum(1)
    for i in range(2 * GROUP)
  ]
  for group in np.reshape(counts, (2, -1)):
    exact = [int(16 * ratio) for ratio in (0.2, 0.3, 0.4, 0.5)]
    assert sorted(group) == [0] * GROUP + exact


def test_crops_of_the_gram_teacher_show_the_same_pixels():
  """They are larger, and their colours are not changed."""
  y, x = np.mgrid[:120, :150]
  image = np.uint8(99 + x / 2 + 40 * np.sin(y / 20))[..., None].repeat(3, 2)
  of = dataclasses.replace(transform('gram'), solarize=0.0)
  example = {'image': image, 'run_seed': 0, 'run_position': 0}
  for seed in range(4):
    crops = of(example, np.random.default_rng(seed))
    assert crops['gram'].shape == (2, 32, 32, 3) == of.spec['gram'][0]
    small = crops['gram'].reshape(2, 16, 2, 16, 2, 3).mean((2, 4))
    for large, own in zip(small, crops['global'], strict=True):
      assert np.corrcoef(large.ravel(), own.ravel())[0, 1] > 0.98
      assert np.ptp(large, axis=-1).max() < 1e-6  # grey, as the image


def test_rotations_are_random():
  """Each image and each key has its own, and class tokens have none."""
  model = model_of('gram')
  found = []
  for key in (0, 1):
    position = positions.rotary(
      model.config, positions.Patches(GRID), random=True
    )
    found += positions.random_rotation(
      model.config, position.coordinates, 2, jax.random.key(key)
    )
  sines, cosines, others, _ = found
  assert not sines[:, :3].any() and (cosines[:, :3] == 1).all()
  assert np.abs(sines[0] - sines[1]).max() > 0.1 < np.abs(sines - others).max()


def test_the_norm_of_local_crops_starts_from_the_norm_of_the_weights():
  """It becomes a copy, unless the weights contain their own."""
  of, _ = built('gram')
  params, weights = random_params(of), random_params(of, 1)
  initial = {'scale': jnp.ones(16), 'bias': jnp.zeros(16)}
  for own, expected in (
    (initial, weights['model']['encoder']['norm']),
    (weights['local_norm'], weights['local_norm']),
  ):
    started = of.start_params(params | {'local_norm': own}, weights['model'])
    jax.tree.map(np.testing.assert_array_equal, started['local_norm'], expected)
