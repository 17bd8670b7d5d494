"""Tests of the losses of several labels and of numbers against torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_vit import SIZES, noise_params

from vit_jax.errors import UserError
from vit_jax.models.vit import Model
from vit_jax.objectives import regression, supervised
from vit_jax.objectives.contract import Inputs, Setting
from vit_jax.objectives.mixing import DeviceAugment, mixup_weights

MODEL = Model(3, **SIZES)
SETTING = Setting(MODEL, (8, 8))
PARAMS = noise_params(MODEL, (8, 8))
KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (6, 8, 8, 3)).astype(np.uint8)
HOT = RNG.integers(0, 2, (6, 3)).astype(np.float32)
NUMBERS = RNG.normal(40, 9, (6, 3)).astype(np.float32)
MEAN, STD = (39.0, 41.0, 40.0), (9.0, 8.0, 10.0)


def spec(**shapes):
  shapes = {'image': (8, 8, 3), **shapes}
  return {key: (shape, np.dtype(np.float32)) for key, shape in shapes.items()}


def loss_of(objective, **batch):
  batch = {'image': jnp.array(IMAGES), **batch}
  inputs = Inputs({}, batch, KEY, jnp.array(0), {})
  return float(objective.loss(PARAMS, inputs)[0])


def outputs():
  images = np.asarray(IMAGES, np.float32) / 127.5 - 1
  return torch.tensor(np.asarray(MODEL.apply({'params': PARAMS}, images)))


@pytest.mark.parametrize('smoothing', [0.0, 0.1])
def test_loss_of_several_labels(smoothing):
  """It is summed over classes, as for a single label."""
  objective = supervised.Objective(
    SETTING, cross_entropy='sigmoid', label_smoothing=smoothing
  )
  objective.check(spec(labels=(3,)))
  wanted = torch.tensor(HOT) * (1 - 2 * smoothing) + smoothing
  expected = F.binary_cross_entropy_with_logits(
    outputs(), wanted, reduction='none'
  )
  found = loss_of(objective, labels=jnp.array(HOT))
  assert found == pytest.approx(float(expected.sum(1).mean()), rel=1e-5)


def test_squared_error_of_normalized_numbers():
  objective = regression.Objective(SETTING, mean=MEAN, std=STD)
  objective.check(spec(numbers=(3,)))
  wanted = (torch.tensor(NUMBERS) - torch.tensor(MEAN)) / torch.tensor(STD)
  expected = F.mse_loss(outputs(), wanted)
  found = loss_of(objective, numbers=jnp.array(NUMBERS))
  assert found == pytest.approx(float(expected), rel=1e-5)


def test_predicted_numbers_have_the_units_of_the_data():
  objective = regression.Objective(SETTING, mean=MEAN, std=STD)
  found = objective.predict(PARAMS, {'image': jnp.array(IMAGES)})
  expected = outputs().numpy() * STD + MEAN
  np.testing.assert_allclose(found['logits'], expected, rtol=1e-5)


@pytest.mark.parametrize('key, values', [('labels', HOT), ('numbers', NUMBERS)])
def test_mixup_and_cutmix_mix_targets(key, values):
  """Targets are the means with the weights of the images."""
  mix = DeviceAugment(3, mixup=0.8)
  batch = {'image': jnp.array(IMAGES), key: jnp.array(values)}
  _, mixed = mix(batch, KEY)
  mix_key = jax.random.split(jax.random.fold_in(KEY, 0x6D6978))[1]
  _, mixup_key, _ = jax.random.split(mix_key, 3)
  _, weight = mixup_weights(IMAGES.shape, 0.8, mixup_key)
  weight = np.asarray(weight)[:, None]
  expected = weight * values + (1 - weight) * np.roll(values, 1, axis=0)
  np.testing.assert_allclose(mixed, expected, rtol=1e-5)
  _, cut = DeviceAugment(3, cutmix=1.0)(batch, KEY)
  assert np.abs(np.asarray(cut) - values).max() > 0.01
  _, same = DeviceAugment(3)(batch, KEY)
  np.testing.assert_array_equal(same, values)


WRONG = [
  (
    supervised,
    dict(cross_entropy='softmax'),
    dict(labels=(3,)),
    r'\(softmax\).*label',
  ),
  (
    supervised,
    dict(cross_entropy='sigmoid'),
    dict(labels=(4,)),
    r'\(4,\).*is 3',
  ),
  (supervised, dict(cross_entropy='sigmoid'), dict(numbers=(3,)), 'label'),
  (regression, dict(mean=MEAN, std=STD), dict(labels=(3,)), 'numbers'),
  (regression, dict(mean=MEAN, std=STD), dict(numbers=(2,)), '2 names.*is 3'),
  (regression, dict(mean=(1.0,), std=STD), dict(numbers=(3,)), r'\(1.0,\)'),
  (regression, dict(mean=MEAN, std=(0.0,) * 3), dict(numbers=(3,)), 'above 0'),
]


@pytest.mark.parametrize('kind, keys, shapes, message', WRONG)
def test_messages(kind, keys, shapes, message):
  with pytest.raises(UserError, match=message):
    kind.Objective(SETTING, **keys).check(spec(**shapes))
