"""Tests of objectives with labels and numbers against torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_vit import SIZES, noise_params

from tests.objectives.tiny import KEY, inputs, labelled
from vit_jax.models.vit import Model
from vit_jax.objectives import regression, supervised
from vit_jax.objectives.contract import Setting
from vit_jax.objectives.losses import LOSSES
from vit_jax.objectives.mixing import DeviceAugment, mixup_weights

CLASSES, N = 5, 6
MODEL = Model(CLASSES, **SIZES)
SETTING = Setting(MODEL, (8, 8))
PARAMS = noise_params(MODEL, (8, 8))
BATCH = labelled(N, (8, 8), CLASSES)
IMAGE, LABEL = {'image': BATCH['image']}, torch.tensor(BATCH['label'].tolist())
RNG = np.random.default_rng(0)
HOT = RNG.integers(0, 2, (N, CLASSES)).astype(np.float32)
NUMBERS = RNG.normal(40, 9, (N, CLASSES)).astype(np.float32)
SCALE = dict(
  mean=(39.0, 41.0, 40.0, 38.0, 42.0), std=(9.0, 8.0, 7.0, 6.0, 10.0)
)


def outputs(images=None):
  """Returns outputs of the model for images in [-1, 1], by default of BATCH."""
  if images is None:
    images = np.asarray(BATCH['image'], np.float32) / 127.5 - 1
  return torch.tensor(np.asarray(MODEL.apply({'params': PARAMS}, images)))


def loss_of(objective, batch):
  return float(objective.loss(PARAMS, inputs(batch))[0])


def binary(logits, targets):
  """Computes the sum over classes of binary cross-entropies, in torch."""
  terms = F.binary_cross_entropy_with_logits(logits, targets, reduction='none')
  return float(terms.sum(-1).mean())


@pytest.mark.slow
@pytest.mark.parametrize('kind', LOSSES)
def test_loss_is_the_mean_of_smoothed_losses(kind):
  objective = supervised.Objective(
    SETTING, cross_entropy=kind, label_smoothing=0.1
  )
  logits = jnp.asarray(outputs().numpy())
  terms = LOSSES[kind](logits, BATCH['label'], 0.1)
  expected = pytest.approx(float(terms.mean()), rel=1e-5)
  assert loss_of(objective, BATCH) == expected


def test_predict_does_not_mix_or_drop():
  noisy = Model(CLASSES, **SIZES, dropout=0.5)
  mix = DeviceAugment(CLASSES, mixup=0.8, erasing=1.0)
  objective = supervised.Objective(Setting(noisy, (8, 8), mix))
  found = objective.predict(PARAMS, BATCH)['logits']
  np.testing.assert_allclose(found, outputs(), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_multi_hot_targets_count_both_classes():
  """Both classes of a mixed image are labels, with torch's loss."""
  mix = DeviceAugment(CLASSES, mixup=0.8, cutmix=1.0)
  setting = Setting(MODEL, (8, 8), mix)
  made = supervised.Objective(setting, cross_entropy='sigmoid', multi_hot=True)
  images, targets = mix(BATCH, KEY)
  assert ((targets > 0) & (targets < 1)).any()
  both = torch.tensor(np.asarray(targets)).gt(0).float()
  expected = binary(outputs(images), both)
  assert loss_of(made, BATCH) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_class_weights():
  """The loss of a batch is divided by its number of examples."""
  weights = tuple(0.5 * k for k in range(CLASSES))
  objective = supervised.Objective(SETTING, class_weights=weights)
  terms = F.cross_entropy(
    outputs(), LABEL, weight=torch.tensor(weights), reduction='sum'
  )
  assert len({*LABEL.tolist()}) > 2
  found = loss_of(objective, BATCH)
  assert found == pytest.approx(float(terms) / N, rel=1e-5)
  # Therefore it does not depend on the number of micro-batches.
  parts = [
    loss_of(objective, {key: value[rows] for key, value in BATCH.items()})
    for rows in (slice(0, 3), slice(3, 6))
  ]
  assert found == pytest.approx(np.mean(parts), rel=1e-5)


@pytest.mark.parametrize('smoothing', [0.0, 0.1])
def test_loss_of_several_labels(smoothing):
  """It is summed over classes, as for a single label."""
  objective = supervised.Objective(
    SETTING, cross_entropy='sigmoid', label_smoothing=smoothing
  )
  expected = binary(
    outputs(), torch.tensor(HOT) * (1 - 2 * smoothing) + smoothing
  )
  found = loss_of(objective, IMAGE | {'labels': jnp.array(HOT)})
  assert found == pytest.approx(expected, rel=1e-5)


def test_squared_error_of_normalized_numbers():
  """Predicted numbers have the units of the data."""
  objective = regression.Objective(SETTING, **SCALE)
  mean, std = (torch.tensor(SCALE[key]) for key in ('mean', 'std'))
  expected = F.mse_loss(outputs(), (torch.tensor(NUMBERS) - mean) / std)
  found = loss_of(objective, IMAGE | {'numbers': jnp.array(NUMBERS)})
  assert found == pytest.approx(float(expected), rel=1e-5)
  predicted = objective.predict(PARAMS, IMAGE)['logits']
  np.testing.assert_allclose(predicted, outputs() * std + mean, rtol=1e-5)


@pytest.mark.parametrize('key, values', [('labels', HOT), ('numbers', NUMBERS)])
def test_mixup_and_cutmix_mix_targets(key, values):
  """Targets are the means with the weights of the images."""
  batch = IMAGE | {key: jnp.array(values)}
  _, mixed = DeviceAugment(CLASSES, mixup=0.8)(batch, KEY)
  mix_key = jax.random.split(jax.random.fold_in(KEY, 0x6D6978))[1]
  _, mixup_key, _ = jax.random.split(mix_key, 3)
  _, weight = mixup_weights(batch['image'].shape, 0.8, mixup_key)
  weight = np.asarray(weight)[:, None]
  expected = weight * values + (1 - weight) * np.roll(values, 1, axis=0)
  np.testing.assert_allclose(mixed, expected, rtol=1e-5)
  _, cut = DeviceAugment(CLASSES, cutmix=1.0)(batch, KEY)
  assert np.abs(np.asarray(cut) - values).max() > 0.01
  _, same = DeviceAugment(CLASSES)(batch, KEY)
  np.testing.assert_array_equal(same, values)
