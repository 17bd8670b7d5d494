"""Tests of the messages about wrong keys, models and batches of objectives."""

import importlib
import re
import types

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


TEACHER = vit_of(7, depth=2)
IMAGE, CROPS = {'image': image(*SIZE)}, {'global': image(2, *SIZE)}
LABEL = {'label': ((), np.dtype(np.int32))}
MASKS = {'masks': ((2, 16), np.dtype(bool))}
MAP = {'segments': (SIZE, np.dtype(np.int16))}
NUMBERS = IMAGE | {'numbers': ((3,), np.dtype(np.float32))}
LABELS = IMAGE | {'labels': ((7,), np.dtype(np.float32))}
GROUPS, SINGLE = (
  TrainTransform(SIZE, patch_size=4, group=group).in_batches(8, 1)
  for group in (4, 1)
)
# Model, batches and keys that each objective accepts.
FITTING = {
  'supervised': (vit_of(7), IMAGE | LABEL, {}),
  'regression': (vit_of(3), NUMBERS, dict(mean=(1.0,) * 3, std=(2.0,) * 3)),
  'distill': (vit_of(7), IMAGE | LABEL, dict(teacher='somewhere')),
  'match_features': (
    vit_of(),
    IMAGE,
    dict(teacher='somewhere', teacher_width=16),
  ),
  'mae': (vit_of(), IMAGE, {}),
  'masked_patch': (vit_of(), IMAGE, {}),
  'dino': (vit_of(), CROPS, {}),
  'dinov2': (vit_of(), CROPS | MASKS, {}),
  'gram': (vit_of(), CROPS | MASKS | {'gram': image(2, 32, 32)}, {}),
  'linear_probe': (vit_of(), IMAGE | LABEL, dict(num_classes=5)),
  'segment': (vit_of(), IMAGE | MAP, dict(classes=3, last_blocks=2)),
}
SOFT = {'label': ((5,), np.dtype(np.float32))}
CLASSES_4 = types.SimpleNamespace(classes=4)  # a transform
# Wrong arguments of `check`, and words of the message.
WRONG = {
  'supervised': [
    (dict(cross_entropy='hinge'), "'hinge'.*softmax"),
    (dict(multi_hot=True), 'multi_hot is set'),
    (dict(label_smoothing=1.0), 'objective.label_smoothing'),
    (
      dict(cross_entropy='sigmoid', class_weights=(1.0,) * 7),
      "class_weights.*'sigmoid'",
    ),
    (dict(class_weights=(1.0, -1.0)), 'class_weights is -1.0'),
    (dict(class_weights=(1.0, 2.0)), ' 2 .*num_classes is 7'),
    (dict(spec=IMAGE), "'supervised'.*label"),
    (dict(spec=IMAGE | SOFT), 'num_classes is 7'),
    (dict(model=vit_of()), 'num_classes is 0'),
    (dict(spec=LABELS), r'\(softmax\).*label'),
    (dict(spec=NUMBERS, cross_entropy='sigmoid'), 'label'),
    (
      dict(spec=LABELS, cross_entropy='sigmoid', model=vit_of(4)),
      r'\(7,\).*is 4',
    ),
  ],
  'regression': [
    (dict(spec=LABELS), 'numbers'),
    (dict(model=vit_of(2)), '3 names.*is 2'),
    (dict(mean=(1.0,)), r'\(1.0,\)'),
    (dict(std=(1.0, 0.0, 1.0)), 'above 0'),
  ],
  'distill': [
    (dict(kind='warm'), "kind is 'warm'.*hard, soft"),
    (dict(teacher_weight=0.0), 'objective.teacher_weight'),
    (dict(temperature=0.0), 'objective.temperature'),
    (dict(model=vit_of(8)), 'num_classes of somewhere is 7'),
  ],
  'match_features': [
    (dict(teacher_width=24), 'somewhere is 16: set'),
    (dict(teacher_scale=1.125), 'teacher_scale.*18'),
    (dict(patch_weight=-1.0), 'patch_weight'),
    (dict(opened=vit_of(pool='token_gap')), 'teacher have 32 .* 16'),
    (dict(opened=vit_of(channels=4)), 'for 4 channels'),
  ],
  'mae': [
    (dict(model=SWIN), 'has no embed, encode.*model.name=.vit'),
    (dict(model=vit_of(patch_size=5, remainder='drop')), 'image_size=15,15'),
    (dict(model=vit_of(5)), 'num_classes=0'),
    (dict(mask_ratio=0.99), 'hides 16 of 16'),
    (dict(decoder=dict(num_heads=5)), 'must divide width'),
    (dict(decoder=dict(remat='some')), 'objective.decoder.*remat'),
    (dict(spec=CROPS), "'mae'.*image"),
  ],
  'masked_patch': [
    (dict(model=AXIAL), 'has no embed.*model.name=.vit'),
    (dict(model=vit_of(5)), 'num_classes=0'),
    (dict(target='colour'), "'colour'.*mean_color"),
    (dict(corrupted=0.0), 'objective.corrupted'),
    (dict(corrupted=0.99), '0.99 hides 16 of 16'),
    (
      dict(target='small_patch', model=vit_of(patch_size=2)),
      'divisible by 4.*2 pixels',
    ),
    (dict(spec=CROPS), "'masked_patch'.*image"),
    (
      dict(spec={'image': image(*SIZE, dtype=np.uint16)}),
      "uint16.*objective.name='mae'",
    ),
  ],
  'dino': [
    (dict(spec=IMAGE), "'dino'.*global.* to 'multicrop'"),
    (dict(spec={'global': image(3, *SIZE)}), r'\[2, 16, 16, 3\]'),
    (dict(spec=CROPS | {'local': image(2, 9, 9)}), 'multiples of 4 pixels'),
    (
      dict(
        spec=CROPS | {'local': image(2, 8, 8)},
        model=vit_of(position='relative'),
      ),
      "'relative'",
    ),
    (dict(model=vit_of(5)), 'num_classes=0'),
    (dict(momentum=1.1), 'objective.momentum'),
    (dict(student_temperature=0.0), 'student_temperature'),
    (dict(warmup_temperature=0.0), 'warmup_temperature'),
    (dict(temperature_warmup='soon'), 'temperature_warmup'),
    (dict(head=dict(outputs=0)), 'objective.head.outputs'),
  ],
  'dinov2': [
    (dict(spec=CROPS), "'dinov2' requires masks.*'block_masks'"),
    (
      dict(spec=CROPS | {'masks': ((2, 9), np.dtype(bool))}),
      r'\[2, 16\].*\[2, 9\].*patch_size=4',
    ),
    (dict(centring='sinkhorn'), 'centre, sinkhorn_knopp'),
    (dict(koleo=-1.0), 'objective.koleo'),
    (dict(local_weight=-1.0), 'objective.local_weight'),
    (dict(momentum_end=2.0), 'objective.momentum_end'),
    (dict(head=dict(weight_norm=False)), 'norm_last_layer'),
    (dict(transform=SINGLE), 'augment.group is 1'),
  ],
  'gram': [
    (dict(gram_replace=('2 steps', '1 steps')), 'gram_replace.*ascend'),
    (dict(gram_weight=-1.0), 'gram_weight'),
    (dict(gram_warmup='soon'), 'gram_warmup'),
    (dict(gram='early'), 'early.*differ: .*depth'),
    (dict(spec=CROPS | MASKS), 'gram_scale'),
  ],
  'linear_probe': [
    (dict(num_classes=0), 'objective.num_classes'),
    (dict(last_blocks=0), 'objective.last_blocks'),
    (dict(last_blocks=4), 'last_blocks=4.*blocks'),
    (dict(patch_mean=True, model=vit_of(pool='gap')), "pool='token'"),
    (dict(model=vit_of(5)), 'num_classes is 5.*config.num_classes=0'),
    (dict(spec=IMAGE), 'label'),
    (dict(spec=IMAGE | SOFT), r'augment.*\(5,\)'),
  ],
  'segment': [
    (dict(spec=IMAGE), 'segments'),
    (dict(last_blocks=9), 'last_blocks=9'),
    (dict(transform=CLASSES_4), 'is 3, .*classes is 4'),
  ],
}


def check(
  name, model=None, spec=None, transform=GROUPS, opened=TEACHER, **keys
):
  """Builds and checks an objective, with something in place of what fits."""
  fitting_model, fitting_spec, required = FITTING[name]
  setting = Setting(
    model or fitting_model,
    SIZE,
    steps=lambda duration: int(duration.split(' ')[0]),
    transform=transform,
    open_frozen=lambda path: Frozen(opened, SIZE, lambda mesh: None),
  )
  module = importlib.import_module(f'vit_jax.objectives.{name}')
  built = module.Objective(setting, **required | keys)
  built.check(spec or fitting_spec)
  built.frozen()


@pytest.mark.parametrize('name', FITTING)
def test_fitting_settings_are_accepted(name):
  check(name)


@pytest.mark.parametrize(
  'name, wrong, words',
  [(name, *row) for name, rows in WRONG.items() for row in rows],
)
def test_messages_name_what_is_wrong(name, wrong, words):
  with pytest.raises(UserError) as error:
    check(name, **wrong)
  assert re.search(words, str(error.value))
