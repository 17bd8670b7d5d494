"""Tests of mixing and erasing on the device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from tests.faults.counts import further
from tests.objectives.tiny import images_of
from vit_jax.arrays import sharding
from vit_jax.objectives import mixing
from vit_jax.objectives.mixing import DeviceAugment, erase, normalize

CLASSES = 10
ALL = dict(mixup=0.8, cutmix=1.0, erasing=0.5)
MIXES = [dict(mixup=0.8), dict(cutmix=1.0), ALL]


IMAGES = np.asarray(images_of(16, 12, 20))
LABELS = np.arange(16, dtype=np.int32) % CLASSES
BATCH = {'image': IMAGES, 'label': LABELS}


@functools.cache
def compiled(**settings):
  return jax.jit(DeviceAugment(CLASSES, **settings))


def augmented(seed=0, **settings):
  """Returns images in 0…255, float64, and targets."""
  images, targets = compiled(**settings)(BATCH, jax.random.key(seed))
  assert images.dtype == np.float32
  return np.asarray(images, np.float64) * 127.5 + 127.5, np.asarray(targets)


def mixed(weights, values):
  """Returns weighted means of each example and the one before it."""
  weights = weights.reshape(-1, *[1] * (values.ndim - 1))
  return weights * values + (1 - weights) * np.roll(values, 1, axis=0)


# Determinism


@pytest.mark.parametrize('settings', MIXES)
def test_batches_depend_on_the_key(settings):
  """The same key gives the same batch, another key another batch."""
  first, again = augmented(1, **settings), augmented(1, **settings)
  np.testing.assert_array_equal(first[0], again[0])
  np.testing.assert_array_equal(first[1], again[1])
  others = {augmented(seed, **settings)[0].tobytes() for seed in range(10)}
  assert len(others) == 10


def test_without_settings_images_are_only_normalized():
  """Labels stay indices, for any number of classes."""
  images, labels = DeviceAugment(0)(jax.device_put(BATCH), jax.random.key(0))
  np.testing.assert_array_equal(images, normalize(jnp.array(IMAGES)))
  np.testing.assert_array_equal(labels, LABELS)
  assert images.min() == -1 and images.max() == 1


# Mixup


def test_mixup_mixes_with_the_previous_example():
  """λ · example + (1 − λ) · previous, for pixels and labels."""
  pixels, targets = augmented(mixup=0.8)
  weights = targets[np.arange(16), LABELS]  # neighbours have other labels
  np.testing.assert_allclose(targets, mixed(weights, np.eye(CLASSES)[LABELS]))
  expected = mixed(weights, IMAGES.astype(float))
  np.testing.assert_allclose(pixels, expected, atol=2e-5)


@pytest.mark.parametrize('alpha', [0.2, 0.8, 1.0, 5.0])
def test_mixup_weights_follow_the_beta_distribution(alpha):
  """λ ~ Beta(α, α) for each pair (Kolmogorov-Smirnov test)."""
  shape = (4000, 1, 1, 3)
  weights, share = mixing.mixup_weights(shape, alpha, jax.random.key(0))
  np.testing.assert_array_equal(weights[:, 0, 0, 0], share)
  # Compared between the multiples of 2^-16 to which weights are rounded.
  places = (np.arange(0, 2**16, 16) + 0.5) / 2**16
  found = np.searchsorted(np.sort(share), places) / len(share)
  difference = np.abs(found - stats.beta(alpha, alpha).cdf(places)).max()
  assert difference < 1.95 / np.sqrt(len(share))  # p = 0.001
  # Multiples of 2^-16: mixing 8-bit pixels is exact.
  np.testing.assert_array_equal(share * 2**16, jnp.round(share * 2**16))


# Cutmix


def cutmix_weights(shape, seed):
  make = jax.jit(lambda key: mixing.cutmix_weights(shape, 1.0, key))
  return make(jax.random.key(seed))


def boxes(weights):
  """Yields (top, bottom, left, right) of each image's rectangle of zeros."""
  for weight in np.asarray(weights)[..., 0] == 0:
    rows, columns = weight.any(axis=1), weight.any(axis=0)
    np.testing.assert_array_equal(weight, rows[:, None] & columns)
    if weight.any():
      y, x = np.flatnonzero(rows), np.flatnonzero(columns)
      yield y[0], y[-1] + 1, x[0], x[-1] + 1


def test_cutmix_pastes_the_previous_example():
  """Labels are weighted by the fraction of pixels."""
  pixels, targets = augmented(cutmix=1.0)
  from_own, from_other = (
    np.isclose(pixels, images, atol=1e-4).all(axis=3)
    for images in (IMAGES, np.roll(IMAGES, 1, axis=0))
  )
  assert (from_own ^ from_other).all()
  weights = from_own.mean(axis=(1, 2))
  assert 0 < weights.mean() < 1
  expected = mixed(weights, np.eye(CLASSES)[LABELS])
  np.testing.assert_allclose(targets, expected, atol=1e-6)


def test_cutmix_boxes_have_the_aspect_of_the_image():
  """They may be anywhere, and are cut off at the border."""
  shape = (1000, 40, 80, 3)
  weights, share = cutmix_weights(shape, seed=0)
  np.testing.assert_allclose(share, np.mean(weights, axis=(1, 2, 3)), atol=1e-6)
  found = np.array(list(boxes(weights)))
  assert len(found) > 950
  top, bottom, left, right = found.T
  inside = (top > 0) & (bottom < 40) & (left > 0) & (right < 80)
  height, width = (bottom - top)[inside], (right - left)[inside]
  # Both sides are halved and doubled in whole pixels: up to two less.
  assert (np.abs(width - 2 * height) <= 4).all()
  assert np.mean(top + bottom) == pytest.approx(40, abs=2.5)
  assert np.mean(left + right) == pytest.approx(80, abs=5)
  assert top.min() == 0 and bottom.max() == 40
  assert left.min() == 0 and right.max() == 80


def test_cutmix_boxes_have_an_exact_size(monkeypatch):
  """A quarter of the image, unless they are cut off at the border."""
  monkeypatch.setattr(mixing, '_beta', lambda alpha, n, key: jnp.full(n, 0.75))
  weights, _ = cutmix_weights((64, 40, 80, 3), seed=0)
  top, bottom, left, right = np.array(list(boxes(weights))).T
  height, width = bottom - top, right - left
  assert (height[(top > 0) & (bottom < 40)] == 20).all() and height.max() == 20
  assert (width[(left > 0) & (right < 80)] == 40).all() and width.max() == 40


# Both


def test_mixup_and_cutmix_alternate():
  """Half of the batches are mixed by values, half by boxes."""
  by_boxes, partners = 0, np.roll(IMAGES, 1, axis=0)
  for seed in range(100):
    pixels, targets = augmented(seed, mixup=0.8, cutmix=1.0)
    np.testing.assert_allclose(targets.sum(axis=1), 1, atol=1e-6)
    assert targets.shape == (16, CLASSES) and (targets >= 0).all()
    either = np.isclose(pixels, IMAGES, atol=1e-3)
    either |= np.isclose(pixels, partners, atol=1e-3)
    by_boxes += either.all()
  assert 50 - 5 * 5 < by_boxes < 50 + 5 * 5


# Random erasing


@pytest.mark.slow
def test_erasing_replaces_a_rectangle_by_noise():
  """Pixels elsewhere do not change."""
  grey = np.full((1000, 40, 80, 3), 77, np.uint8)
  erased = np.asarray(
    jax.jit(erase, static_argnums=1)(grey, 0.25, jax.random.key(0))
  )
  changed = (erased != 77).any(axis=3)
  hit = changed.any(axis=(1, 2))
  assert hit.mean() == pytest.approx(0.25, abs=5 * np.sqrt(0.25 * 0.75 / 1000))
  areas, aspects, noise = [], [], []
  for image, mask in zip(erased[hit], changed[hit], strict=True):
    y, x = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    inside = image[y[0] : y[-1] + 1, x[0] : x[-1] + 1]
    assert mask[y[0] : y[-1] + 1, x[0] : x[-1] + 1].mean() > 0.9  # 77 by chance
    areas.append(inside[..., 0].size / 3200)
    aspects.append(inside.shape[0] / inside.shape[1])
    noise.append(inside.reshape(-1, 3))
  # Sides are whole numbers of pixels, so slightly beyond the limits.
  assert 0.015 < min(areas) < 0.03 and 0.3 < max(areas) < 0.35
  assert 0.25 < min(aspects) < 0.4 and 2.5 < max(aspects) < 4
  # ImageNet's mean and standard deviation; clipping to 0…255 changes little.
  values = np.concatenate(noise) / 255
  np.testing.assert_allclose(
    values.mean(axis=0), (0.485, 0.456, 0.406), atol=0.01
  )
  np.testing.assert_allclose(
    values.std(axis=0), (0.229, 0.224, 0.225), atol=0.015
  )
  np.testing.assert_array_equal(erased[~hit], grey[~hit])


# Images of 16 bits


@pytest.mark.parametrize('settings', [{}, dict(mixup=0.8), dict(cutmix=1.0)])
def test_sixteen_bits_are_treated_as_eight(settings):
  """257 times the values as uint16 are the same images in [-1, 1]."""
  wide = BATCH | {'image': IMAGES.astype(np.uint16) * 257}
  augment, key = compiled(**settings), jax.random.key(3)
  images, targets = augment(BATCH, key)
  same, same_targets = augment(wide, key)
  np.testing.assert_allclose(same, images, atol=1e-5)
  np.testing.assert_array_equal(same_targets, targets)


@pytest.mark.slow
@pytest.mark.parametrize('settings', [ALL, *further(*MIXES[:2])])
def test_mixing_is_the_same_on_any_mesh(settings):
  """One device, data=8 and data=2 fsdp=2 model=2: the same bits."""
  results = []
  for sizes in (dict(data=1), dict(data=8), dict(data=2, fsdp=2, model=2)):
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    mesh = sharding.make_mesh(devices, **sizes)
    split = sharding.batch_sharding(mesh)
    augment = jax.jit(DeviceAugment(CLASSES, **settings), out_shardings=split)
    examples = jax.device_put(BATCH, split)
    key = jax.device_put(jax.random.key(7), sharding.replicated(mesh))
    outputs = [augment(examples, jax.random.fold_in(key, i)) for i in range(4)]
    results.append(jax.device_get(outputs))
  for other in results[1:]:
    jax.tree.map(np.testing.assert_array_equal, other, results[0])
