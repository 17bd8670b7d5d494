"""Tests of the supervised objective against torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_vit import SIZES, noise_params

from vit_jax.errors import UserError
from vit_jax.models.vit import Model
from vit_jax.objectives.contract import Inputs, Setting
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


@pytest.mark.parametrize('smoothing', [0.0, 0.1])
@pytest.mark.parametrize('kind', ['softmax', 'sigmoid'])
def test_loss_equals_torch(kind, smoothing):
  """It is the mean over the batch, smoothed, of the config's loss."""
  batch = examples()
  objective = Objective(SETTING, cross_entropy=kind, label_smoothing=smoothing)
  inputs = Inputs({}, batch, jax.random.key(0), jnp.array(0), {})
  loss, _ = objective.loss(PARAMS, inputs)
  logits = logits_of(batch)
  label = torch.tensor(np.asarray(batch['label']), dtype=torch.long)
  if kind == 'softmax':
    expected = F.cross_entropy(logits, label, label_smoothing=smoothing)
  else:
    hot = F.one_hot(label, CLASSES).float()
    targets = hot * (1 - smoothing) + (1 - hot) * smoothing
    terms = F.binary_cross_entropy_with_logits(
      logits, targets, reduction='none'
    )
    expected = terms.sum(-1).mean()
  assert float(loss) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize('kind', ['softmax', 'sigmoid'])
def test_mixed_targets_are_smoothed_like_labels(kind):
  """The loss is linear in the targets."""
  batch, key, alpha = examples(), jax.random.key(3), 0.1
  mix = DeviceAugment(CLASSES, mixup=0.8)

  def loss(smoothing):
    objective = Objective(
      Setting(MODEL, (8, 8), mix),
      cross_entropy=kind,
      label_smoothing=smoothing,
    )
    inputs = Inputs({}, batch, key, jnp.array(0), {})
    return float(objective.loss(PARAMS, inputs)[0])

  images, targets = mix(batch, key)
  logits = np.asarray(MODEL.apply({'params': PARAMS}, images), np.float64)
  # d loss / d target is −z, up to a constant for all targets.
  off = alpha / CLASSES if kind == 'softmax' else alpha
  on = 1 - alpha + off if kind == 'softmax' else 1 - alpha
  change = off + (on - off) * np.asarray(targets) - np.asarray(targets)
  expected = -(change * logits).sum(-1).mean()
  assert loss(alpha) - loss(0.0) == pytest.approx(expected, rel=1e-3)


def test_predict_does_not_mix_or_drop():
  batch = examples()
  noisy = Model(CLASSES, **SIZES, dropout=0.5)
  mix = DeviceAugment(CLASSES, mixup=0.8, erasing=1.0)
  objective = Objective(Setting(noisy, (8, 8), mix))
  out = objective.predict(PARAMS, batch)
  np.testing.assert_allclose(
    out['logits'], logits_of(batch), rtol=1e-5, atol=1e-5
  )


def test_an_unknown_loss_is_refused():
  """The message lists the allowed losses."""
  with pytest.raises(UserError, match="cross_entropy is 'hinge'.*softmax"):
    Objective(SETTING, cross_entropy='hinge')


def test_missing_labels_or_head_are_refused():
  """The error comes before anything is compiled."""
  spec = {'image': ((8, 8, 3), np.dtype(np.uint8))}
  labelled = spec | {'label': ((), np.dtype(np.int32))}
  Objective(SETTING).check(labelled)
  with pytest.raises(UserError, match="'supervised'.*label"):
    Objective(SETTING).check(spec)
  headless = Setting(Model(0, **SIZES), (8, 8))
  with pytest.raises(UserError, match='num_classes is 0'):
    Objective(headless).check(labelled)


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
  with pytest.raises(UserError, match='objective.multi_hot is set'):
    Objective(setting, multi_hot=True)


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


def test_class_weights_that_do_not_fit():
  """Another loss, another number of classes, or a negative number."""
  labelled = {
    'image': ((8, 8, 3), np.dtype(np.uint8)),
    'label': ((), np.dtype(np.int32)),
  }
  with pytest.raises(UserError, match=r"class_weights.*'sigmoid'"):
    Objective(SETTING, cross_entropy='sigmoid', class_weights=(1.0,) * CLASSES)
  with pytest.raises(UserError, match='class_weights is -1.0'):
    Objective(SETTING, class_weights=(1.0, -1.0))
  with pytest.raises(UserError, match=r'class_weights.* 2 .*num_classes is 7'):
    Objective(SETTING, class_weights=(1.0, 2.0)).check(labelled)
