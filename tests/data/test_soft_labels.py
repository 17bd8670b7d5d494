"""Tests of soft labels and of the losses that accept them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.data.augment import soft_labels, transforms
from vit_jax.data.images.headers import DecodeError
from vit_jax.objectives.mixing import DeviceAugment

CLASSES = 5
IMAGE = np.random.default_rng(0).integers(0, 256, (9, 8, 3), np.uint8)


def transform(**keys):
  return soft_labels.TrainTransform((8, 8), num_classes=CLASSES, **keys)


def test_hard_labels_are_smoothed_and_soft_ones_are_not():
  """Smoothing is PyTorch's: 1 - α at the label, α spread over all classes."""
  rng = np.random.default_rng
  found = transform(label_smoothing=0.1)({'image': IMAGE, 'label': 3}, rng(0))
  expected = np.full(CLASSES, 0.1 / CLASSES, np.float32)
  expected[3] += 0.9
  np.testing.assert_allclose(found['label'], expected, atol=1e-7)
  soft = np.array([0.5, 0.2, 0.2, 0.1, 0.0], np.float32)
  example = {'image': IMAGE, 'label': 0, 'soft': soft}
  other = transform(label_smoothing=0.1)(example, rng(0))
  np.testing.assert_array_equal(other['label'], soft)
  plain = transforms.TrainTransform((8, 8))(example, rng(0))
  np.testing.assert_array_equal(other['image'], plain['image'])
  assert transform().spec['label'] == ((CLASSES,), np.dtype(np.float32))
  with pytest.raises(DecodeError, match=r'label \[5\]'):
    transform()({'image': IMAGE, 'label': 5}, rng(0))


@pytest.mark.parametrize('keys', [dict(mixup=0.2), dict(cutmix=1.0), {}])
def test_soft_labels_are_mixed_like_hard_labels(keys):
  """Soft labels still sum to 1."""
  images = np.random.default_rng(2).integers(0, 256, (5, 8, 8, 3), np.uint8)
  labels = np.arange(CLASSES, dtype=np.int32)  # all labels differ
  mix, key = DeviceAugment(CLASSES, **keys), jax.random.key(0)
  hard = {'image': jnp.asarray(images), 'label': jnp.asarray(labels)}
  shares = np.eye(CLASSES, dtype=np.float32)[labels]
  pixels, targets = mix(hard, key)
  again, found = mix(hard | {'label': jnp.asarray(shares)}, key)
  np.testing.assert_array_equal(pixels, again)
  expected = np.asarray(targets) if keys else shares
  np.testing.assert_allclose(found, expected, atol=1e-7)
  rng = np.random.default_rng(1)
  soft = rng.dirichlet(np.ones(CLASSES), CLASSES).astype(np.float32)
  _, mixed = mix(hard | {'label': jnp.asarray(soft)}, key)
  np.testing.assert_allclose(np.sum(mixed, axis=1), 1, atol=1e-6)
  # Each row keeps the same fraction of its label as for hard labels.
  if keys:
    own = np.asarray(targets)[labels, labels, None]
    expected = own * soft + (1 - own) * np.roll(soft, 1, axis=0)
    np.testing.assert_allclose(mixed, expected, atol=1e-6)
