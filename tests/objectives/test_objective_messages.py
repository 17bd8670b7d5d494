"""Tests of the messages about wrong keys, models and batches of objectives."""

import importlib
import re

import numpy as np
import pytest
from tiny_vit import SIZES

from examples import axial_vit
from vit_jax.data.augment.block_masks import TrainTransform
from vit_jax.errors import UserError
from vit_jax.models import swin, vit
from vit_jax.objectives.contract import Frozen, Setting

SIZE = (16, 16)
SWIN = swin.Model(0, width=8, depths=(2, 2), num_heads=2, window_size=2)
AXIAL = axial_vit.Model(
  0, patch_size=4, width=16, depth=1, mlp_dim=16, num_heads=2
)


def vit_of(num_classes=0, **keys):
  return vit.Model(num_classes, **SIZES | keys)


def image(*shape, dtype=np.uint8):
  return (*shape, 3), np.dtype(dtype)


IMAGE, CROPS = {'image': image(*SIZE)}, {'global': image(2, *SIZE)}
LABEL = {'label': ((), np.dtype(np.int32))}
MASKS = {'masks': ((2, 16), np.dtype(bool))}
GROUPS, SINGLE = (
  TrainTransform(SIZE, patch_size=4, group=group).in_batches(8, 1)
  for group in (4, 1)
)
# Model, batches and keys that each objective accepts.
FITTING = {
  'supervised': (vit_of(7), IMAGE | LABEL, {}),
  'distill': (vit_of(7), IMAGE | LABEL, dict(teacher='somewhere')),
  'mae': (vit_of(), IMAGE, {}),
  'masked_patch': (vit_of(), IMAGE, {}),
  'dino': (vit_of(), CROPS, {}),
  'dinov2': (vit_of(), CROPS | MASKS, {}),
  'gram': (vit_of(), CROPS | MASKS | {'gram': image(2, 32, 32)}, {}),
  'linear_probe': (vit_of(), IMAGE | LABEL, dict(num_classes=5)),
}
SOFT = {'label': ((5,), np.dtype(np.float32))}
# Objective, wrong arguments of `check`, and words of the message.
WRONG = [
  ('supervised', dict(cross_entropy='hinge'), "'hinge'.*softmax"),
  ('supervised', dict(multi_hot=True), 'multi_hot is set'),
  ('supervised', dict(label_smoothing=1.0), 'objective.label_smoothing'),
  (
    'supervised',
    dict(cross_entropy='sigmoid', class_weights=(1.0,) * 7),
    "class_weights.*'sigmoid'",
  ),
  ('supervised', dict(class_weights=(1.0, -1.0)), 'class_weights is -1.0'),
  ('supervised', dict(class_weights=(1.0, 2.0)), ' 2 .*num_classes is 7'),
  ('supervised', dict(spec=IMAGE), "'supervised'.*label"),
  ('supervised', dict(spec=IMAGE | SOFT), 'num_classes is 7'),
  ('supervised', dict(model=vit_of()), 'num_classes is 0'),
  ('distill', dict(kind='warm'), "kind is 'warm'.*hard, soft"),
  ('distill', dict(teacher_weight=0.0), 'objective.teacher_weight'),
  ('distill', dict(temperature=0.0), 'objective.temperature'),
  ('distill', dict(model=vit_of(8)), 'num_classes of somewhere is 7'),
  ('mae', dict(model=SWIN), 'has no embed, encode.*model.name=.vit'),
  (
    'mae',
    dict(model=vit_of(patch_size=5, remainder='drop')),
    'image_size=15,15',
  ),
  ('mae', dict(model=vit_of(5)), 'num_classes=0'),
  ('mae', dict(mask_ratio=0.99), 'hides 16 of 16'),
  ('mae', dict(decoder=dict(num_heads=5)), 'must divide width'),
  ('mae', dict(decoder=dict(remat='some')), 'objective.decoder.*remat'),
  ('mae', dict(spec=CROPS), "'mae'.*image"),
  ('masked_patch', dict(model=AXIAL), 'has no embed.*model.name=.vit'),
  ('masked_patch', dict(model=vit_of(5)), 'num_classes=0'),
  ('masked_patch', dict(target='colour'), "'colour'.*mean_color"),
  ('masked_patch', dict(corrupted=0.0), 'objective.corrupted'),
  ('masked_patch', dict(corrupted=0.99), '0.99 hides 16 of 16'),
  (
    'masked_patch',
    dict(target='small_patch', model=vit_of(patch_size=2)),
    'divisible by 4.*2 pixels',
  ),
  ('masked_patch', dict(spec=CROPS), "'masked_patch'.*image"),
  (
    'masked_patch',
    dict(spec={'image': image(*SIZE, dtype=np.uint16)}),
    "uint16.*objective.name='mae'",
  ),
  ('dino', dict(spec=IMAGE), "'dino'.*global.* to 'multicrop'"),
  ('dino', dict(spec={'global': image(3, *SIZE)}), r'\[2, 16, 16, 3\]'),
  (
    'dino',
    dict(spec=CROPS | {'local': image(2, 9, 9)}),
    'multiples of 4 pixels',
  ),
  (
    'dino',
    dict(
      spec=CROPS | {'local': image(2, 8, 8)}, model=vit_of(position='relative')
    ),
    "'relative'",
  ),
  ('dino', dict(model=vit_of(5)), 'num_classes=0'),
  ('dino', dict(momentum=1.1), 'objective.momentum'),
  ('dino', dict(student_temperature=0.0), 'student_temperature'),
  ('dino', dict(warmup_temperature=0.0), 'warmup_temperature'),
  ('dino', dict(temperature_warmup='soon'), 'temperature_warmup'),
  ('dino', dict(head=dict(outputs=0)), 'objective.head.outputs'),
  ('dinov2', dict(spec=CROPS), "'dinov2' requires masks.*'block_masks'"),
  (
    'dinov2',
    dict(spec=CROPS | {'masks': ((2, 9), np.dtype(bool))}),
    r'\[2, 16\].*\[2, 9\].*patch_size=4',
  ),
  ('dinov2', dict(centring='sinkhorn'), 'centre, sinkhorn_knopp'),
  ('dinov2', dict(koleo=-1.0), 'objective.koleo'),
  ('dinov2', dict(local_weight=-1.0), 'objective.local_weight'),
  ('dinov2', dict(momentum_end=2.0), 'objective.momentum_end'),
  ('dinov2', dict(head=dict(weight_norm=False)), 'norm_last_layer'),
  ('dinov2', dict(transform=SINGLE), 'augment.group is 1'),
  ('gram', dict(gram_replace=('2 steps', '1 steps')), 'gram_replace.*ascend'),
  ('gram', dict(gram_weight=-1.0), 'gram_weight'),
  ('gram', dict(gram_warmup='soon'), 'gram_warmup'),
  ('gram', dict(gram='early'), 'early.*differ: .*depth'),
  ('gram', dict(spec=CROPS | MASKS), 'gram_scale'),
  ('linear_probe', dict(num_classes=0), 'objective.num_classes'),
  ('linear_probe', dict(last_blocks=0), 'objective.last_blocks'),
  ('linear_probe', dict(last_blocks=4), 'last_blocks=4.*blocks'),
  (
    'linear_probe',
    dict(patch_mean=True, model=vit_of(pool='gap')),
    "pool='token'",
  ),
  (
    'linear_probe',
    dict(model=vit_of(5)),
    'num_classes is 5.*config.num_classes=0',
  ),
  ('linear_probe', dict(spec=IMAGE), 'label'),
  ('linear_probe', dict(spec=IMAGE | SOFT), r'augment.*\(5,\)'),
]


def check(name, model=None, spec=None, transform=GROUPS, **keys):
  """Builds and checks an objective, with something in place of what fits."""
  fitting_model, fitting_spec, required = FITTING[name]
  setting = Setting(
    model or fitting_model,
    SIZE,
    steps=lambda duration: int(duration.split(' ')[0]),
    transform=transform,
    open_frozen=lambda path: Frozen(
      vit_of(7, depth=2), SIZE, lambda mesh: None
    ),
  )
  module = importlib.import_module(f'vit_jax.objectives.{name}')
  built = module.Objective(setting, **required | keys)
  built.check(spec or fitting_spec)
  built.frozen()


@pytest.mark.parametrize('name', FITTING)
def test_fitting_settings_are_accepted(name):
  check(name)


@pytest.mark.parametrize('name, wrong, words', WRONG)
def test_messages_name_what_is_wrong(name, wrong, words):
  with pytest.raises(UserError) as error:
    check(name, **wrong)
  assert re.search(words, str(error.value))
