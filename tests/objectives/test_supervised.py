"""Tests of the supervised objective against torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_vit import SIZES, noise_params

from vit_jax.models.vit import Model
from vit_jax.objectives.contract import Inputs, Setting
from vit_jax.objectives.losses import LOSSES
from vit_jax.objectives.mixing import DeviceAugment
from vit_jax.objectives.supervised import Objective

CLASSES = 7
MODEL = Model(CLASSES, **SIZES)
SETTING = Setting(MODEL, (8, 8))
PARAMS = noise_params(MODEL, (8, 8))


def examples():
  rng = np.random.default_rng(0)
  image = rng.integers(0, 256, (6, 8, 8, 3)).astype(np.uint8)
  label = rng.integers(0, CLASSES, 6).astype(np.int32)
  return {'image': jnp.array(image), 'label': jnp.array(label)}


def logits_of(batch):
  images = np.asarray(batch['image'], np.float32) / 127.5 - 1
  return torch.tensor(np.asarray(MODEL.apply({'params': PARAMS}, images)))


@pytest.mark.slow
@pytest.mark.parametrize('kind', LOSSES)
def test_loss_is_the_mean_of_smoothed_losses(kind):
  batch = examples()
  objective = Objective(SETTING, cross_entropy=kind, label_smoothing=0.1)
  inputs = Inputs({}, batch, jax.random.key(0), jnp.array(0), {})
  loss, _ = objective.loss(PARAMS, inputs)
  terms = LOSSES[kind](jnp.asarray(logits_of(batch)), batch['label'], 0.1)
  assert float(loss) == pytest.approx(float(terms.mean()), rel=1e-5)


def test_predict_does_not_mix_or_drop():
  batch = examples()
  noisy = Model(CLASSES, **SIZES, dropout=0.5)
  mix = DeviceAugment(CLASSES, mixup=0.8, erasing=1.0)
  objective = Objective(Setting(noisy, (8, 8), mix))
  out = objective.predict(PARAMS, batch)
  np.testing.assert_allclose(
    out['logits'], logits_of(batch), rtol=1e-5, atol=1e-5
  )


@pytest.mark.slow
def test_multi_hot_targets_count_both_classes():
  """Both classes of a mixed image are labels, with torch's loss."""
  mix = DeviceAugment(CLASSES, mixup=0.8, cutmix=1.0)
  setting, key = Setting(MODEL, (8, 8), mix), jax.random.key(5)
  made = Objective(setting, cross_entropy='sigmoid', multi_hot=True)
  batch = examples()
  loss, _ = made.loss(PARAMS, Inputs({}, batch, key, jnp.array(0), {}))
  images, targets = mix(batch, key)
  assert ((targets > 0) & (targets < 1)).any()
  logits = MODEL.apply({'params': PARAMS}, images)
  expected = F.binary_cross_entropy_with_logits(
    torch.tensor(np.asarray(logits)),
    torch.tensor(np.asarray(targets)).gt(0).float(),
    reduction='none',
  )
  expected_loss = float(expected.sum(-1).mean())
  assert float(loss) == pytest.approx(expected_loss, rel=1e-5)


@pytest.mark.slow
def test_class_weights():
  """The loss of a batch is divided by its number of examples."""
  batch, weights = examples(), tuple(0.5 * k for k in range(CLASSES))
  objective = Objective(SETTING, class_weights=weights)

  def loss(rows):
    part = {key: value[rows] for key, value in batch.items()}
    inputs = Inputs({}, part, jax.random.key(0), jnp.array(0), {})
    return float(objective.loss(PARAMS, inputs)[0])

  label = torch.tensor(np.asarray(batch['label']), dtype=torch.long)
  terms = F.cross_entropy(
    logits_of(batch), label, weight=torch.tensor(weights), reduction='sum'
  )
  assert len({*label.tolist()}) > 2
  assert loss(slice(None)) == pytest.approx(float(terms) / 6, rel=1e-5)
  # Therefore it does not depend on the number of micro-batches.
  parts = (loss(slice(0, 3)) + loss(slice(3, 6))) / 2
  assert loss(slice(None)) == pytest.approx(parts, rel=1e-5)
