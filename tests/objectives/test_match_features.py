"""Tests of the distillation of features."""

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_vit import SIZES, noise_params

from tests.objectives.tiny import images_of, inputs, noisy
from vit_jax.models import vit
from vit_jax.objectives.contract import Frozen, Setting
from vit_jax.objectives.match_features import Objective

SIZE = (16, 16)
TEACHER = vit.Model(0, **SIZES | dict(patch_size=8, width=24, depth=1))
STUDENT = vit.Model(0, **SIZES | dict(depth=1))


def objective(teacher=TEACHER, size=(32, 32), model=STUDENT, **keys):
  frozen = Frozen(teacher, size, lambda mesh: None)
  setting = Setting(model, SIZE, open_frozen=lambda path: frozen)
  keys = dict(teacher='weights', teacher_width=24, teacher_scale=3.0) | keys
  return Objective(setting, **keys)


@pytest.mark.slow
def test_the_loss_equals_torch():
  """The teacher's larger images have 6x6 patches; the student has 4x4."""
  of = objective(patch_weight=0.5)
  params, images = noisy(of, scale=0.3), images_of(3, *SIZE)
  teacher = noise_params(TEACHER, (32, 32))
  batch = inputs({'image': images}, frozen={'teacher': teacher})
  loss, (metrics, _) = jax.jit(of.loss)(params, batch)

  pixels = images / np.float32(127.5) - 1
  large = jax.image.resize(pixels, (3, 48, 48, 3), 'bicubic').clip(-1, 1)
  targets, own = (
    model.apply({'params': p}, x, method='predict', want=('patches',))
    for model, p, x in (
      (TEACHER.at_sizes((32, 32)), teacher, large),
      (STUDENT, params['model'], pixels),
    )
  )
  expected = {}
  for name, layer in params['head'].items():
    x, target, kernel, bias = (
      torch.tensor(np.asarray(z)).double()
      for z in (own[name], targets[name], layer['kernel'], layer['bias'])
    )
    if name == 'patches':
      assert target.shape == (3, 6, 6, 24)
      target = F.interpolate(
        target.permute(0, 3, 1, 2), (4, 4), mode='bicubic', align_corners=False
      ).permute(0, 2, 3, 1)
    target = F.layer_norm(target, (24,), eps=1e-6)
    expected[name] = float(F.mse_loss(x @ kernel + bias, target))
    assert metrics[f'{name}_error'] == pytest.approx(expected[name], 1e-5)
  total = expected['features'] + 0.5 * expected['patches']
  assert loss == pytest.approx(total, 1e-5)


def test_the_heads_have_different_initial_values():
  """Their kernels have the same shape."""
  params, _ = jax.jit(objective().init)(jax.random.key(0), None)
  of_features, of_patches = (
    params['head'][name]['kernel'] for name in ('features', 'patches')
  )
  assert of_features.shape == of_patches.shape
  assert (of_features != of_patches).all()
