"""Tests that shipped configs have the papers' numbers (typed in again here)."""

import pathlib
import re

import jax
import pytest

from vit_jax.config import loading
from vit_jax.data.sources import vtab
from vit_jax.errors import UserError
from vit_jax.sweeps import grid
from vit_jax.training.experiment import Experiment

# variant, data, epochs, base lr, decay, weight decay, dropout, clip (Table 3)
TABLE_3 = [
  ('B/16', 'jft', 7, 8e-4, 'linear', 0.1, 0.0, None),
  ('B/32', 'jft', 7, 8e-4, 'linear', 0.1, 0.0, None),
  ('L/32', 'jft', 7, 6e-4, 'linear', 0.1, 0.0, None),
  ('L/16', 'jft', 7, 4e-4, 'linear', 0.1, 0.0, None),
  ('L/16', 'jft', 14, 4e-4, 'linear', 0.1, 0.0, None),
  ('H/14', 'jft', 14, 3e-4, 'linear', 0.1, 0.0, None),
  ('R50+B/16', 'jft', 7, 8e-4, 'linear', 0.1, 0.0, None),
  ('R50+B/32', 'jft', 7, 8e-4, 'linear', 0.1, 0.0, None),
  ('R50+L/32', 'jft', 7, 2e-4, 'linear', 0.1, 0.0, None),
  ('R50+L/16', 'jft', 7, 4e-4, 'linear', 0.1, 0.0, None),
  ('R50+L/16', 'jft', 14, 4e-4, 'linear', 0.1, 0.0, None),
  ('B/16', 'i21k', 90, 1e-3, 'linear', 0.03, 0.1, None),
  ('B/32', 'i21k', 90, 1e-3, 'linear', 0.03, 0.1, None),
  ('L/16', 'i21k', 30, 1e-3, 'linear', 0.03, 0.1, None),
  ('L/16', 'i21k', 90, 1e-3, 'linear', 0.03, 0.1, None),
  ('L/32', 'i21k', 30, 1e-3, 'linear', 0.03, 0.1, None),
  ('L/32', 'i21k', 90, 1e-3, 'linear', 0.03, 0.1, None),
  ('B/16', 'i1k', 300, 3e-3, 'cosine', 0.3, 0.1, 1.0),
  ('B/32', 'i1k', 300, 3e-3, 'cosine', 0.3, 0.1, 1.0),
  ('L/16', 'i1k', 300, 3e-3, 'cosine', 0.3, 0.1, 1.0),
  ('L/32', 'i1k', 300, 3e-3, 'cosine', 0.3, 0.1, 1.0),
]
CLASSES = {'jft': 18_291, 'i21k': 21_843, 'i1k': 1_000}
EXAMPLES = {'jft': 303_000_000, 'i21k': 14_145_922, 'i1k': 1_281_167}


@pytest.mark.parametrize(
  'row', TABLE_3, ids=lambda row: '-'.join(map(str, row[:3])).replace('/', '')
)
def test_vit_configs_equal_table_3(row):
  variant, data, epochs, lr, decay, weight_decay, dropout, clip = row
  config = loading.load(
    f'configs/vit.py:variant={variant},data={data},epochs={epochs}'
  )
  assert config.model.variant == variant
  assert config.total == f'{epochs} epochs'
  assert config.schedule.base_lr == lr
  assert config.schedule.decay == decay
  assert config.schedule.end_lr == (1e-5 if decay == 'linear' else 0)
  assert config.schedule.warmup == '10000 steps'
  assert config.optimizer.name == 'adam'
  assert (config.optimizer.b1, config.optimizer.b2) == (0.9, 0.999)
  assert config.optimizer.weight_decay == weight_decay
  assert config.optimizer.decay_mask == 'all'
  assert config.optimizer.clip_norm == clip
  assert config.model.dropout == dropout
  assert config.model.pre_logits and config.model.pool == 'token'
  assert config.model.head_bias == -10
  assert config.objective.cross_entropy == 'sigmoid'
  assert config.objective.label_smoothing == (1e-4 if data == 'i1k' else 0)
  assert config.batch_size == 4096
  assert config.image_size == (224, 224)
  assert config.num_classes == CLASSES[data]
  assert config.train.num_examples == EXAMPLES[data]
  assert (config.augment.crop, config.augment.flip) == ('inception', True)
  assert (config.augment.min_area, config.augment.max_area) == (0.05, 1)


@pytest.mark.parametrize(
  'variant, epochs, lr',
  [
    ('R50x1', 7, 1e-3),
    ('R50x2', 7, 1e-3),
    ('R101x1', 7, 8e-4),
    ('R152x1', 7, 6e-4),
    ('R152x2', 7, 6e-4),
    ('R152x2', 14, 6e-4),
    ('R200x3', 14, 6e-4),
  ],
)
def test_resnet_configs_equal_table_3(variant, epochs, lr):
  """All are on JFT with Adam."""
  config = loading.load(f'configs/resnet.py:variant={variant},epochs={epochs}')
  assert (config.model.name, config.model.variant) == ('resnet', variant)
  assert config.total == f'{epochs} epochs'
  assert (config.batch_size, config.image_size) == (4096, (224, 224))
  schedule, optimizer = config.schedule, config.optimizer
  assert (schedule.base_lr, schedule.warmup) == (lr, '10000 steps')
  assert (schedule.decay, schedule.end_lr) == ('linear', 1e-5)
  assert (optimizer.name, optimizer.b1, optimizer.b2) == ('adam', 0.9, 0.999)
  assert (optimizer.weight_decay, optimizer.decay_mask) == (0.1, 'all')
  assert optimizer.clip_norm is None
  assert config.num_classes == CLASSES['jft']
  assert config.train.num_examples == EXAMPLES['jft']
  assert config.objective.cross_entropy == 'sigmoid'


def test_main_config_equals_the_90_epoch_row():
  """It has the cost of Table 2."""
  main = loading.load('configs/l16_i21k.py')
  row = loading.load('configs/vit.py:variant=L/16,data=i21k,epochs=90')
  assert main.to_dict() == row.to_dict()
  assert main.paper_core_days == 230
  assert main.train.split == 'train[51200:]'
  assert main.evals.val.split == 'train[:51200]'
  steps = Experiment.build(main, jax.devices()).total_steps
  assert steps == round(90 * 14_145_922 / 4096) == 310_823


def test_paper_costs_equal_table_2():
  """Configs have Table 2's TPUv3-core-days."""
  for arg, days in (
    ('variant=L/16,data=jft', 680),
    ('variant=H/14,data=jft', 2500),
    ('variant=B/16,data=jft', None),
  ):
    assert loading.load(f'configs/vit.py:{arg}').paper_core_days == days


@pytest.mark.parametrize(
  'argument, position, at',
  [
    ('kind=none', 'none', None),
    ('kind=learned', 'learned', 'stem'),
    ('kind=learned,at=layers', 'learned', 'layers'),
    ('kind=2d,at=shared', '2d', 'shared'),
    ('kind=relative', 'relative', 'layers'),
    ('kind=relative,at=shared', 'relative', 'shared'),
  ],
)
def test_position_configs_equal_table_8(argument, position, at):
  """They equal Table 3's row of B/16 on JFT except for positions."""
  config = loading.load(f'configs/positions.py:{argument}')
  model = Experiment.build(config, jax.devices()).model
  assert (model.position, model.position_at) == (position, at)
  row = loading.load('configs/vit.py:variant=B/16,data=jft')
  with config.unlocked():
    config.model.position, config.model.position_at = 'learned', None
  assert config.to_dict() == row.to_dict()


# data, steps, warm-up, classes, training examples, on the dev split (Table 4)
TABLE_4 = [
  ('cifar10', 10_000, 500, 10, 50_000, 49_000),
  ('cifar100', 10_000, 500, 100, 50_000, 49_000),
  ('oxford_iiit_pet', 500, 100, 37, 3_680, 3_312),
  ('oxford_flowers102', 500, 100, 102, 2_040, 1_836),
  ('vtab,task=dtd', 2_500, 500, 47, 1_000, 800),
]


def _is_fine_tuning(config) -> None:
  assert config.optimizer.name == 'sgd'
  assert config.optimizer.momentum == 0.9
  assert config.optimizer.weight_decay == 0
  assert config.optimizer.clip_norm == 1
  assert config.schedule.decay == 'cosine'
  assert config.batch_size == 512
  assert config.model.head_bias == 0
  assert not config.model.pre_logits
  assert config.position_resize is None
  assert config.preprocess.resize == 'squash'


@pytest.mark.parametrize('row', TABLE_4, ids=lambda row: row[0])
def test_finetuning_configs_equal_table_4(row):
  data, steps, warmup, classes, examples, dev_examples = row
  config = loading.load(f'configs/finetune.py:data={data}')
  _is_fine_tuning(config)
  assert config.total == f'{steps} steps'
  assert config.schedule.warmup == f'{warmup} steps'
  assert config.num_classes == classes
  assert config.train.num_examples == examples
  assert config.image_size == (384, 384)
  assert config.evals.test.split == 'test'
  dev = loading.load(f'configs/finetune.py:data={data},dev=1')
  assert dev.train.num_examples == dev_examples
  assert dev.evals.test.split != 'test'


# Tasks of VTAB-1k not flipped or cropped by BiT (arXiv 1912.11370, appendix F).
NO_FLIP = {'dsprites_orientation', 'dsprites_location', 'smallnorb_azimuth'}
NO_CROP = {'clevr_count', 'clevr_distance', 'dmlab', 'kitti'}
NO_CROP |= {'dsprites_location'}


def test_vtab_transforms_keep_the_labels():
  """Tasks whose label a flip or a crop would change are left out."""
  with pytest.raises(UserError, match='has 19 tasks') as caught:
    loading.load('configs/finetune.py:data=vtab')
  tasks = re.findall(r'\w+', str(caught.value).partition('llowed: ')[2])
  tasks = [task for task in tasks if task in VTAB_CLASSES]
  assert {*tasks} == {*VTAB_CLASSES} and len(VTAB_CLASSES) == 19
  for task, num_classes in VTAB_CLASSES.items():
    config = loading.load(f'configs/finetune.py:data=vtab,task={task}')
    _is_fine_tuning(config)
    assert config.num_classes == num_classes
    # BiT flips the digits of svhn; the config differs from it and says so.
    assert config.augment.flip == (task not in NO_FLIP | {'svhn'}), task
    crop = 'none' if task in NO_CROP else 'inception'
    assert config.augment.crop == crop, task
    if crop == 'inception':  # every crop contains the centre
      assert config.augment.min_area == pytest.approx((384 / 448) ** 2)
    dev = loading.load(f'configs/finetune.py:data=vtab,task={task},dev=1')
    assert config.train.split == f'train[:800]+{dev.evals.test.split}'
    assert (config.train.num_examples, dev.train.num_examples) == (1000, 800)
    assert config.evals.test.split != dev.evals.test.split
    if task in vtab.TASKS:
      assert config.source.to_dict()['task'] == task
      assert len(vtab.TASKS[task].class_names) == num_classes
  azimuth = loading.load('configs/finetune.py:data=vtab,task=smallnorb_azimuth')
  assert azimuth.source.label_key == 'label_azimuth'


VTAB_CLASSES = {
  **dict(caltech101=102, cifar100=100, dtd=47, oxford_flowers102=102),
  **dict(oxford_iiit_pet=37, sun397=397, svhn=10, patch_camelyon=2),
  **dict(eurosat=10, resisc45=45, diabetic_retinopathy=5, clevr_count=8),
  **dict(clevr_distance=6, dmlab=6, kitti=4, dsprites_location=16),
  **dict(dsprites_orientation=16, smallnorb_azimuth=18),
  **dict(smallnorb_elevation=9),
}


def test_imagenet_finetuning_equals_table_4():
  """Also its 1 % dev split, and Table 2's sizes with averaging."""
  config = loading.load('configs/finetune_imagenet.py')
  _is_fine_tuning(config)
  assert (config.total, config.image_size) == ('20000 steps', (384, 384))
  assert config.average_decay is None
  dev = loading.load('configs/finetune_imagenet.py:dev=1')
  assert dev.train.num_examples + 12_812 == config.train.num_examples
  for variant, size in (('L/16', 512), ('H/14', 518)):
    best = loading.load(
      f'configs/finetune_imagenet.py:table=2,variant={variant}'
    )
    assert best.image_size == (size, size)
    assert best.average_decay == 0.9999
    assert best.model.variant == variant
  huge = loading.load('configs/finetune_imagenet.py:variant=H/14')
  assert Experiment.build(huge, jax.devices()).model.grid((384, 384)) == (
    27,
    27,
  )


def test_imagenet_real_is_evaluated_on_request():
  """Multi-label accuracy of the last step, from a dataset of its own."""
  assert 'real' not in loading.load('configs/finetune_imagenet.py').evals
  real = loading.load('configs/finetune_imagenet.py:real=1').evals.real
  assert (real.name, real.labels, real.every) == (
    'calibration',
    'real_label',
    '100 %',
  )
  assert real.source.dataset == 'imagenet2012_real'


@pytest.mark.parametrize(
  'data, steps, warmup, tenths_at, mixup, side, larger',
  [
    ('imagenet', 20_000, 500, (6_000, 12_000, 18_000), 0.1, 384, 448),
    ('cifar10', 10_000, 500, (3_000, 6_000, 9_000), 0.1, 128, 160),
    ('cifar100', 10_000, 500, (3_000, 6_000, 9_000), 0.1, 128, 160),
    ('oxford_iiit_pet', 500, 100, (200, 300, 400), 0.0, 384, 448),
    ('oxford_flowers102', 500, 100, (200, 300, 400), 0.0, 384, 448),
  ],
)
def test_fine_tuning_of_bit(
  data, steps, warmup, tenths_at, mixup, side, larger
):
  """BiT's rule in steps, as its authors' code states it."""
  config = loading.load(f'configs/finetune_bit.py:data={data}')
  schedule, optimizer = config.schedule, config.optimizer
  assert (config.total, schedule.warmup) == (
    f'{steps} steps',
    f'{warmup} steps',
  )
  assert (schedule.base_lr, schedule.decay) == (0.003, 'step')
  assert tuple(round(at * steps) for at in schedule.decay_at) == tenths_at
  assert (optimizer.name, optimizer.momentum) == ('sgd', 0.9)
  assert optimizer.weight_decay == 0 and optimizer.clip_norm is None
  assert config.mix.mixup == mixup and config.batch_size == 512
  assert config.image_size == (side, side)
  assert config.augment.crop == 'squash' and config.augment.flip
  assert round(config.augment.enlarge * side) == larger
  assert config.preprocess.resize == 'squash'
  dev = loading.load(f'configs/finetune_bit.py:data={data},dev=1')
  assert dev.train.num_examples < config.train.num_examples


def test_resnets_by_sgd():
  """Table 7's other optimizer, with BiT's hyper-parameters for 7 epochs."""
  config = loading.load('configs/resnet.py:variant=R50x1,optimizer=sgd')
  assert (config.optimizer.name, config.optimizer.weight_decay) == ('sgd', 1e-3)
  assert config.schedule.base_lr == pytest.approx(0.03 * 4096 / 256)
  assert config.schedule.decay_at == (0.25, 0.575, 0.75, 0.925)
  assert config.total == '7 epochs'


@pytest.mark.parametrize(
  'variant, drop_path', [('T', 0.2), ('S', 0.3), ('B', 0.5)]
)
def test_swin_config_equals_the_authors(variant, drop_path):
  """Rates are for 512 images, doubled for 1024."""
  config = loading.load(f'configs/swin_i1k.py:variant={variant}')
  assert (config.total, config.batch_size) == ('300 epochs', 1024)
  assert (config.model.name, config.model.variant) == ('swin', variant)
  assert config.model.drop_path == drop_path
  assert config.model.window_size == 7
  schedule, optimizer = config.schedule, config.optimizer
  assert (schedule.base_lr, schedule.end_lr) == (2 * 5e-4, 2 * 5e-6)
  assert (schedule.warmup, schedule.decay) == ('20 epochs', 'cosine')
  assert (optimizer.weight_decay, optimizer.clip_norm) == (0.05, 5.0)
  assert optimizer.decay_mask == 'kernels'
  mix = config.mix
  assert (mix.mixup, mix.cutmix, mix.erasing) == (0.8, 1.0, 0.25)
  augment = config.augment
  assert (augment.randaugment_layers, augment.randaugment_magnitude) == (2, 9)
  assert augment.randaugment_policy == 'timm' and augment.min_area == 0.08
  assert config.objective.label_smoothing == 0.1
  assert config.average_decay is None


@pytest.mark.parametrize(
  'variant, row',
  [
    ('B/16', 'vit.py:variant=B/16,data=jft'),
    ('B/32', 'vit.py:variant=B/32,data=jft'),
    ('R50', 'resnet.py:variant=R50x1'),
  ],
)
def test_axial_configs_equal_the_rows_of_plain_models(variant, row):
  """Only the model and how it is computed differ."""
  axial = loading.load(f'examples/axial.py:variant={variant}').to_dict()
  plain = loading.load(f'configs/{row}').to_dict()
  for config in (axial, plain):
    model = config.pop('model')
    assert model['variant'].startswith(variant)
    assert model['head_bias'] == -10 and not model.get('dropout')
  axial['micro_batches'] = plain['micro_batches']
  assert axial == plain


@pytest.mark.parametrize(
  'recipe, epochs, batch, temperatures, crops, areas',
  [
    ('vanilla', 100, 512, (0.04, 0.04), 8, ((0.4, 1.0), (0.05, 0.4))),
    ('boost', 300, 1024, (0.04, 0.07), 8, ((0.4, 1.0), (0.05, 0.4))),
  ],
)
def test_dino_configs_equal_the_published_recipes(
  recipe, epochs, batch, temperatures, crops, areas
):
  for variant in ('S/16', 'B/16'):
    config = loading.load(f'configs/dino.py:recipe={recipe},variant={variant}')
    assert (config.total, config.batch_size) == (f'{epochs} epochs', batch)
    assert config.model.variant == variant and config.model.drop_path == 0.1
    augment, aims = config.augment, config.objective
    assert (augment.global_area, augment.local_area) == areas
    assert (augment.local_crops, augment.local_size) == (crops, (96,))
    assert augment.color_jitter == (0.4, 0.4, 0.2, 0.1)
    assert (augment.blur, augment.solarize) == ((1.0, 0.1, 0.5), 0.2)
    found = aims.warmup_temperature, aims.teacher_temperature
    assert found == temperatures and aims.student_temperature == 0.1
    warm = '0 epochs' if recipe == 'vanilla' else '30 epochs'
    assert aims.temperature_warmup == warm
    assert aims.momentum == 0.996
    fixed = recipe == 'vanilla' or variant.startswith('B')
    assert aims.head.norm_last_layer == fixed
    assert (aims.head.outputs, aims.head.layers) == (65_536, 3)
    assert (aims.head.hidden, aims.head.bottleneck) == (2048, 256)
    optimizer, schedule = config.optimizer, config.schedule
    assert (optimizer.b1, optimizer.b2) == (0.9, 0.999)
    decay = optimizer.weight_decay, optimizer.weight_decay_end
    assert decay == (0.04, 0.4) and optimizer.decay_mask == 'tensors'
    assert (optimizer.clip_norm, optimizer.clip) == (3.0, 'tensor')
    assert schedule.base_lr == 5e-4 * batch / 256
    assert (schedule.warmup, schedule.end_lr) == ('10 epochs', 1e-6)
    Experiment.build(config, jax.devices())


# epochs, batch size, rate per 256, last rate, clipping, temperature's warm-up
# and start, whether rows of the last layer have norm 1, frozen epochs, smallest
# global area
RELEASED_DINO = {
  'S/16': (800, 1024, 5e-4, 1e-5, None, '30 epochs', 0.04, False, 1, 0.25),
  'S/8': (800, 1024, 5e-4, 1e-6, 3.0, '30 epochs', 0.04, False, 1, 0.4),
  'B/16': (400, 1024, 7.5e-4, 2e-6, 0.3, '50 epochs', 0.04, True, 3, 0.25),
  'B/8': (300, 1056, 5e-4, 2e-6, 3.0, '50 epochs', 0.03, True, 3, 0.25),
}


@pytest.mark.parametrize('variant', RELEASED_DINO)
def test_released_dino_configs_equal_args_txt(variant):
  """The values are those of the args.txt of each released model."""
  config = loading.load(f'configs/dino.py:recipe=released,variant={variant}')
  aims, optimizer, schedule = (
    config.objective,
    config.optimizer,
    config.schedule,
  )
  [[_, held]] = optimizer.rules
  assert (
    int(config.total.split()[0]),
    config.batch_size,
    schedule.base_lr / config.batch_size * 256,
    schedule.end_lr,
    optimizer.clip_norm,
    aims.temperature_warmup,
    aims.warmup_temperature,
    aims.head.norm_last_layer,
    int(held['after'].split()[0]),
    config.augment.global_area[0],
  ) == RELEASED_DINO[variant]
  assert config.augment.local_crops == 10 and aims.teacher_temperature == 0.07
  assert config.augment.local_area == (
    0.05,
    config.augment.global_area[0] if variant == 'S/8' else 0.25,
  )
  Experiment.build(config, jax.devices())


# patch, steps, batch, group, lr for 1024, warm-up, last decay, layer decay,
# drop path, momentum, local crops, MLP units of L (arXiv 2304.07193)
DINOV2_SHORT = (16, 125_000, 2048, 64, 4e-3, 12_500, 0.4, 0.9, 0.3, 0.992, 96)
DINOV2_LONG = (14, 625_000, 3072, 32, 2e-4, 100_000, 0.2, 1.0, 0.4, 0.994, 98)
DINOV2 = {'short': (*DINOV2_SHORT, 4096), 'long': (*DINOV2_LONG, 2736)}


@pytest.mark.parametrize('model', ['S', 'B', 'L'])
@pytest.mark.parametrize('recipe', DINOV2)
def test_dinov2_configs_equal_the_published_recipes(recipe, model):
  config = loading.load(f'configs/dinov2.py:recipe={recipe},model={model}')
  aims, optimizer, augment = config.objective, config.optimizer, config.augment
  embedding, tokens, layers, last = (rule for _, rule in optimizer.rules)
  depth = len(layers['lr'])
  assert depth == {'S': 12, 'B': 12, 'L': 24}[model]
  decay = layers['lr'][0] ** (1 / depth)
  assert tokens['lr'] == pytest.approx(decay ** (depth + 1))
  assert embedding['lr'] == pytest.approx(0.2 * tokens['lr'])
  assert layers['lr'][-1] == pytest.approx(decay)
  assert last == dict(lr_after='1250 steps')
  experiment = Experiment.build(config, jax.devices()[:1])
  *row, units = DINOV2[recipe]
  assert (
    experiment.model.patch_size,
    experiment.total_steps,
    config.batch_size,
    augment.group,
    pytest.approx(config.schedule.base_lr / (config.batch_size / 1024) ** 0.5),
    int(config.schedule.warmup.split()[0]),
    optimizer.weight_decay_end,
    pytest.approx(decay),
    config.model.drop_path,
    aims.momentum,
    augment.local_size[0],
  ) == tuple(row)
  assert model != 'L' or experiment.model.mlp_dim == units
  assert config.model.drop_path_first == config.model.drop_path
  assert config.model.layer_scale == 1e-5 and config.model.gelu == 'exact'
  assert experiment.model.norm_eps == 1e-6
  assert (optimizer.clip, optimizer.clip_norm) == ('module', 3.0)
  assert (optimizer.b1, optimizer.b2) == (0.9, 0.999)
  assert optimizer.weight_decay == 0.04
  assert augment.global_area == (0.32, 1.0) and augment.local_crops == 8
  assert augment.local_area == (0.05, 0.32)
  assert aims.teacher_temperature == 0.07
  assert aims.temperature_warmup == '37500 steps'
  assert not aims.head.norm_last_layer and aims.koleo == 0.1
  if recipe == 'long':
    heads = [(h.outputs, h.bottleneck) for h in (aims.head, aims.patch_head)]
    assert heads == [(131_072, 384), (131_072, 256)]
    assert aims.centring == 'sinkhorn_knopp'
  else:
    assert (aims.head.outputs, aims.head.bottleneck) == (65_536, 256)
    assert aims.centring == 'centre' and aims.patch_head is None


@pytest.mark.parametrize('recipe, side', [('short', 512), ('long', 518)])
def test_dinov2_at_high_resolution_compresses_the_schedules(recipe, side):
  config = loading.load(f'configs/dinov2.py:recipe={recipe},stage=highres')
  experiment = Experiment.build(config, jax.devices()[:1])
  assert experiment.total_steps == 10_000
  assert experiment.image_size == (side, side)
  full = loading.load(f'configs/dinov2.py:recipe={recipe}')
  for part in (config.schedule.warmup, config.objective.temperature_warmup):
    assert 0 < int(part.split()[0]) <= 3000
  ratio = config.schedule.base_lr / full.schedule.base_lr
  assert ratio == pytest.approx(0.1)
  assert config.init_weights == 'teacher'


# aug, reg, decay of the published weights (i21k) and of the authors' code
AUGREG = [
  ('Ti/16', 'i21k', None, 0.0, 0.0, 0.03),
  ('S/16', 'i21k', 0.0, 0.0, 0.0, 0.03),
  ('B/32', 'i21k', 0.0, 0.0, 0.0, 0.1),
  ('B/16', 'i21k', 15.0, 0.2, 0.0, 0.1),
  ('L/16', 'i21k', 20.0, 0.5, 0.0, 0.1),
  ('B/16', 'i1k', 15.0, 0.5, 0.0, 0.1),
]


@pytest.mark.parametrize('row', AUGREG, ids=lambda row: '-'.join(row[:2]))
def test_augreg_configs_equal_the_recommended_settings(row):
  model, data, magnitude, mixup, reg, decay = row
  name = f'configs/augreg.py:model={model},data={data}'
  config = loading.load(name)
  layers = 0 if magnitude is None else 2
  assert config.augment.randaugment_layers == layers
  if layers:
    assert config.augment.randaugment_magnitude == magnitude
  assert config.mix.mixup == mixup and config.optimizer.weight_decay == decay
  assert (config.model.dropout, config.model.drop_path) == (reg, reg)
  assert config.total == '300 epochs' and config.batch_size == 4096
  assert config.model.pool == 'token' and not config.model.pre_logits
  other = loading.load(f'{name},aug=strong2,reg=0.1,decay=0.03')
  assert (other.augment.randaugment_magnitude, other.mix.mixup) == (20, 0.8)
  assert (other.model.dropout, other.optimizer.weight_decay) == (0.1, 0.03)
  assert Experiment.build(other, jax.devices()).total_steps > 10_000


def test_every_config_builds():
  """Each file gives a model and a schedule on eight devices."""
  files = sorted(pathlib.Path('configs').glob('*.py'))
  assert len(files) >= 7
  for file in files:
    if (
      file.stem == 'folder'
    ):  # needs a folder, see test_folder_config_counts_classes
      continue
    config = loading.load(str(file))
    if config.init_from is not None or file.stem.startswith(
      ('finetune', 'linear_')
    ):
      with config.unlocked():  # a fine-tuning reads this from the weights
        is_resnet = config.model.name == 'resnet'
        config.model.variant = 'R50x1' if is_resnet else 'B/16'
        config.image_size = (32, 32)
    assert Experiment.build(config, jax.devices()).total_steps > 0, file


def test_cifar10_dino_accepts_models_of_two_sizes():
  for model in ('vit', 'hybrid', 'resnet'):
    config = loading.load(f'configs/cifar10.py:objective=dino,model={model}')
    assert config.num_classes == 0 and config.objective.name == 'dino'
    spec = Experiment.build(config, jax.devices()).augment.spec
    assert [shape for shape, _ in spec.values()] == [
      (2, 32, 32, 3),
      (4, 16, 16, 3),
    ]
  swin = loading.load('configs/cifar10.py:objective=dino,model=swin')
  with pytest.raises(UserError, match='images of several sizes'):
    Experiment.build(swin, jax.devices())


def test_folder_config_counts_classes(tmp_path):
  """Without a val folder, a tenth is held out."""
  for name in ('cat', 'dog'):
    (tmp_path / 'train' / name).mkdir(parents=True)
    for i in range(10):
      (tmp_path / 'train' / name / f'{i}.png').write_bytes(b'not read here')
  for path in (tmp_path, tmp_path / 'train'):
    config = loading.load(f'configs/folder.py:path={path}')
    assert (config.num_classes, config.train.num_examples) == (2, 18)
    assert config.evals.val.split == 'train[90%:]'
    assert config.train.split != 'train[:90%]'  # the split of older workdirs
    assert config.augment.interpolation == 'area'  # photographs are large
    assert config.preprocess.interpolation == 'area'
  (tmp_path / 'Valid').mkdir()
  (tmp_path / 'train' / 'cat').rename(tmp_path / 'Valid' / 'cat')
  (tmp_path / 'train' / 'cat').mkdir()
  (tmp_path / 'Valid' / 'cat' / '1.png').rename(
    tmp_path / 'train' / 'cat' / '1.png'
  )
  parted = loading.load(f'configs/folder.py:path={tmp_path}')
  assert parted.evals.val.split == 'val' and parted.train.num_examples == 11
  tune = loading.load(f'configs/folder.py:path={tmp_path},tune=1')
  assert tune.optimizer.name == 'sgd' and tune.image_size == (384, 384)
  with pytest.raises(UserError, match='gs://bucket/photos is remote'):
    loading.load('configs/folder.py:path=gs://bucket/photos')
  with pytest.raises(UserError, match='which folder'):
    loading.load('configs/folder.py')


@pytest.mark.parametrize('model, gpus, batch', [('S', 1, 64), ('L', 8, 256)])
def test_dinov2_on_a_folder(tmp_path, model, gpus, batch):
  """The groups of masks are the images of one GPU."""
  for name in ('cat', 'dog'):
    (tmp_path / name).mkdir()
    for i in range(10):
      (tmp_path / name / f'{i}.png').write_bytes(b'not read here')
  path = 'configs/dinov2_folder.py'
  config = loading.load(f'{path}:path={tmp_path},model={model},gpus={gpus}')
  experiment = Experiment.build(config, jax.devices()[:1])
  assert config.batch_size == batch == gpus * config.augment.group
  assert config.train.num_examples == 18
  assert config.evals.knn.split == 'train[90%:]'
  assert experiment.total_steps == 10_000
  with pytest.raises(UserError, match='which folder'):
    loading.load(path)
  with pytest.raises(UserError, match='gpus=3'):
    loading.load(f'{path}:path={tmp_path},gpus=3')


def test_messages_of_wrong_config_arguments():
  """Unknown keys, rows and lengths are refused with what is allowed."""
  for argument, message in (
    ('vit.py:vraiant=B/16', "did you mean 'variant'"),
    ('vit.py:variant=B/17', 'not a row of Table 3'),
    ('vit.py:variant=B/16,data=i21k,epochs=91', 'for 90'),
    ('vit.py:epochs=many', 'type int'),
    ('positions.py:kind=none,at=stem', 'not in Table 8'),
    ('vit.py:variant=R50+B/16,data=i21k', 'not a row of Table 3'),
    ('resnet.py:variant=R50x3', "did you mean 'R50x"),
    ('resnet.py:epochs=8', 'for 7'),
    ('finetune.py:data=cifar', "did you mean 'cifar1"),
    ('finetune.py:data=cifar10,task=dtd', 'for data=vtab'),
    ('finetune.py:data=vtab,task=dtt', "did you mean 'dtd'"),
    ('finetune_imagenet.py:table=2', 'variant=L/16'),
    ('finetune_imagenet.py:table=3', '2 and 4'),
    ('finetune_bit.py:data=dtd', 'allowed'),
    ('resnet.py:variant=R50x1,optimizer=lamb', 'adam and sgd'),
    ('swin_i1k.py:variant=L', 'no Swin-L'),
    ('../examples/axial.py:variant=L/16', 'no axial L/16'),
    ('dino.py:variant=L/16', 'no variant=L/16'),
    ('augreg.py:aug=light3', "did you mean 'light"),
    ('augreg.py:reg=0.2', 'reg=0.2'),
    ('augreg.py:model=H/14', 'no model here'),
    ('noisy_student.py:data=cifar', "did you mean 'cifar10'"),
    ('noisy_student.py:labels=none.npz', 'not a file of pseudo-labels'),
    ('dino.py:recipe=boosted', "did you mean 'boost'"),
    ('dinov2.py:recipe=shorter', "did you mean 'short'"),
    ('cifar10.py:objective=dinos', "did you mean 'dino'"),
    ('nothing.py', 'no config file'),
  ):
    with pytest.raises(UserError, match=message):
      loading.load(f'configs/{argument}')


@pytest.mark.parametrize(
  'model, pixels, lr, drop_path',
  [('S', 224, 4e-3, 0.05), ('B', 192, 3e-3, 0.2), ('L', 192, 3e-3, 0.45)],
)
def test_deit3_configs_equal_the_authors_commands(model, pixels, lr, drop_path):
  config = loading.load(f'configs/deit3.py:model={model}')
  assert (config.total, config.batch_size) == ('800 epochs', 2048)
  assert config.image_size == (pixels, pixels)
  assert (config.schedule.base_lr, config.schedule.warmup) == (lr, '5 epochs')
  assert config.model.drop_path == config.model.drop_path_first == drop_path
  assert config.model.layer_scale == 1e-4
  optimizer, objective = config.optimizer, config.objective
  assert (optimizer.name, optimizer.weight_decay) == ('lamb', 0.05)
  assert (objective.cross_entropy, objective.multi_hot) == ('sigmoid', True)
  assert objective.label_smoothing == 0 and config.train.repeats == 3
  assert (config.mix.mixup, config.mix.cutmix, config.mix.erasing) == (
    0.8,
    1,
    0,
  )
  assert config.augment.three_augment and config.augment.color_jitter == 0.3


def test_deit_config_equals_table_9():
  """With and without a teacher."""
  config = loading.load('configs/deit.py:model=S')
  assert (config.total, config.batch_size) == ('300 epochs', 1024)
  assert (config.schedule.base_lr, config.schedule.warmup) == (1e-3, '5 epochs')
  assert (config.optimizer.weight_decay, config.optimizer.clip_norm) == (
    0.05,
    None,
  )
  assert (config.mix.mixup, config.mix.cutmix, config.mix.erasing) == (
    0.8,
    1.0,
    0.25,
  )
  assert config.model.drop_path == 0.1 and not config.model.distilled
  assert config.objective.label_smoothing == 0.1 and config.train.repeats == 3
  taught = loading.load('configs/deit.py:model=S,teacher=somewhere')
  assert taught.model.distilled and taught.objective.name == 'distill'
  assert taught.objective.teacher == 'somewhere'
  assert (taught.objective.kind, taught.objective.teacher_weight) == (
    'hard',
    0.5,
  )


def test_s16_config_equals_better_plain_baselines():
  """S/16 of arXiv 2205.01580, with the number of steps of 90 epochs."""
  config = loading.load('configs/s16_i1k.py')
  assert Experiment.build(config, jax.devices()).total_steps == 111_477
  assert (config.model.variant, config.model.pool) == ('S/16', 'gap')
  assert config.model.position == 'sincos2d' and config.model.pre_logits
  assert (config.optimizer.weight_decay, config.optimizer.clip_norm) == (0.1, 1)
  assert config.mix.mixup == 0.2
  assert config.augment.randaugment_magnitude == 10


@pytest.mark.parametrize(
  'name', ['deit.py', 'deit3.py', 'swin_i1k.py', 'finetune_mae.py']
)
def test_recipes_of_pytorch_code_prepare_images_like_torchvision(name):
  """This includes normalization by ImageNet's mean and standard deviation."""
  config = loading.load(f'configs/{name}')
  assert config.augment.crop == config.preprocess.resize == 'torchvision'
  assert config.augment.interpolation == 'bicubic'
  assert config.preprocess.interpolation == 'bicubic'
  assert config.model.pixels == 'imagenet'


def test_deit3_second_stage_keeps_its_rate():
  """The authors' --lr 1e-5 and --min-lr 1e-5; bicubic positions."""
  config = loading.load('configs/deit3.py:model=L,tune=1')
  assert config.schedule.base_lr == config.schedule.end_lr == 1e-5
  assert config.position_resize == 'bicubic_no_antialias'


@pytest.mark.parametrize('name', ['s16_i1k.py', 'augreg.py'])
def test_recipes_of_big_vision_evaluate_central_crops(name):
  """The smaller side is 256 by area, and the centre has 224 pixels."""
  keys = loading.load(f'configs/{name}').preprocess
  assert (keys.resize, keys.interpolation) == ('central', 'area')
  assert keys.central_fraction == 224 / 256


@pytest.mark.parametrize(
  'config', ['finetune.py:data=cifar10', 'finetune_imagenet.py:table=4']
)
def test_finetuning_crops(config):
  """The default is the public code's; crop=bit selects BiT's (section 4.1)."""
  default = loading.load(f'configs/{config}').augment
  assert (default.crop, default.min_area) == ('inception', 0.05)
  bits = loading.load(f'configs/{config},crop=bit').augment
  assert bits.crop == 'squash' and round(384 * bits.enlarge) == 448
  with pytest.raises(UserError, match="crop='bat'.*bit"):
    loading.load(f'configs/{config},crop=bat')


def test_noisy_student_has_the_authors_length():
  """350 epochs of labelled images: 109,474 steps of 4,096."""
  teacher = loading.load('configs/noisy_student.py')
  assert teacher.total == '109474 steps'


def test_cifar10_chooses_checkpoints_by_held_out_images():
  """The test split does not choose the best checkpoint."""
  for objective in ('supervised', 'dino', 'mae', 'masked_patch'):
    config = loading.load(f'configs/cifar10.py:objective={objective}')
    evaluator = config.checkpoint.best.partition('/')[0]
    section = config.evals[evaluator.removesuffix('_teacher')]
    assert section.split == 'train[98%:]'
    assert config.train.split == 'train[:98%]'
    assert config.train.num_examples == 49_000


def test_study_of_table_5_has_its_numbers():
  """H/14's numbers are Table 5's own, not Table 6's."""
  rows = grid.load_study('configs/studies/finetuned.py:table=5').rows
  numbers = rows['H/14 jft'].paper
  found = numbers['ImageNet'].mean, numbers['CIFAR-100'].mean
  assert found == (88.04, 94.55)
