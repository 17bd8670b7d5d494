"""Every shipped config holds the paper's numbers (typed in again here)."""

import pathlib
import re

import jax
import pytest

from vit_jax.config import overrides
from vit_jax.errors import UserError
from vit_jax.training.experiment import Experiment

# variant, data, epochs, base lr, decay, weight decay, dropout, clip (Table 3)
TABLE_3 = [
  ('B/16', 'jft', 7, 8e-4, 'linear', 0.1, 0.0, None),
  ('B/32', 'jft', 7, 8e-4, 'linear', 0.1, 0.0, None),
  ('L/32', 'jft', 7, 6e-4, 'linear', 0.1, 0.0, None),
  ('L/16', 'jft', 7, 4e-4, 'linear', 0.1, 0.0, None),
  ('L/16', 'jft', 14, 4e-4, 'linear', 0.1, 0.0, None),
  ('H/14', 'jft', 14, 3e-4, 'linear', 0.1, 0.0, None),
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
def test_table_3(row):
  """Resolved values of every pre-training row."""
  variant, data, epochs, lr, decay, weight_decay, dropout, clip = row
  config = overrides.load(
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


def test_main_config_is_the_90_epoch_row():
  """l16_i21k.py, written out, equals the table's row, and Table 2's cost."""
  main = overrides.load('configs/l16_i21k.py')
  row = overrides.load('configs/vit.py:variant=L/16,data=i21k,epochs=90')
  assert main.to_dict() == row.to_dict()
  assert main.paper_core_days == 230
  assert main.train.split == 'train[51200:]'
  assert main.evals.val.split == 'train[:51200]'
  steps = Experiment.build(main, jax.devices()).total_steps
  assert steps == round(90 * 14_145_922 / 4096) == 310_823


def test_paper_costs():
  """Table 2's TPUv3-core-days stand beside the runs they belong to."""
  for arg, days in (
    ('variant=L/16,data=jft', 680),
    ('variant=H/14,data=jft', 2500),
    ('variant=B/16,data=jft', None),
  ):
    assert overrides.load(f'configs/vit.py:{arg}').paper_core_days == days


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
  assert config.position_resize == 'aligned'
  assert config.preprocess.resize == 'squash'


@pytest.mark.parametrize('row', TABLE_4, ids=lambda row: row[0])
def test_table_4(row):
  """Resolved values of the small fine-tuning sets."""
  data, steps, warmup, classes, examples, dev_examples = row
  config = overrides.load(f'configs/finetune.py:data={data}')
  _is_fine_tuning(config)
  assert config.total == f'{steps} steps'
  assert config.schedule.warmup == f'{warmup} steps'
  assert config.num_classes == classes
  assert config.train.num_examples == examples
  assert config.image_size == (384, 384)
  assert config.evals.test.split == 'test'
  dev = overrides.load(f'configs/finetune.py:data={data},dev=1')
  assert dev.train.num_examples == dev_examples
  assert dev.evals.test.split != 'test'


# Tasks of VTAB-1k not flipped or cropped by BiT (arXiv 1912.11370, appendix F).
NO_FLIP = {'dsprites_orientation', 'dsprites_location', 'smallnorb_azimuth'}
NO_CROP = {'clevr_count', 'clevr_distance', 'dmlab', 'kitti'}
NO_CROP |= {'dsprites_location'}


def test_vtab_keeps_the_labels():
  """Nineteen tasks; a label that a flip or a crop changes is left alone."""
  with pytest.raises(UserError, match='has 19 tasks') as caught:
    overrides.load('configs/finetune.py:data=vtab')
  tasks = re.findall(r'\w+', str(caught.value).partition('llowed: ')[2])
  tasks = [task for task in tasks if task in VTAB_CLASSES]
  assert {*tasks} == {*VTAB_CLASSES} and len(VTAB_CLASSES) == 19
  for task, num_classes in VTAB_CLASSES.items():
    config = overrides.load(f'configs/finetune.py:data=vtab,task={task}')
    _is_fine_tuning(config)
    assert config.num_classes == num_classes
    # Of svhn BiT mirrors the digits: a deviation, see the config.
    assert config.augment.flip == (task not in NO_FLIP | {'svhn'}), task
    crop = 'none' if task in NO_CROP else 'inception'
    assert config.augment.crop == crop, task
    if crop == 'inception':  # what is in the middle is in every crop
      assert config.augment.min_area == pytest.approx((384 / 448) ** 2)
    dev = overrides.load(f'configs/finetune.py:data=vtab,task={task},dev=1')
    assert config.train.split == f'train[:800]+{dev.evals.test.split}'
    assert (config.train.num_examples, dev.train.num_examples) == (1000, 800)
    assert config.evals.test.split != dev.evals.test.split
  azimuth = overrides.load(
    'configs/finetune.py:data=vtab,task=smallnorb_azimuth'
  )
  assert azimuth.source.label_key == 'label_azimuth'


VTAB_CLASSES = {
  **dict(caltech101=102, cifar100=100, dtd=47, oxford_flowers102=102),
  **dict(oxford_iiit_pet=37, sun397=397, svhn=10, patch_camelyon=2),
  **dict(eurosat=10, resisc45=45, diabetic_retinopathy=5, clevr_count=8),
  **dict(clevr_distance=6, dmlab=6, kitti=4, dsprites_location=16),
  **dict(dsprites_orientation=16, smallnorb_azimuth=18),
  **dict(smallnorb_elevation=9),
}


def test_fine_tuning_on_imagenet():
  """Table 4's row, its 1 % dev split, and Table 2's sizes with averaging."""
  config = overrides.load('configs/finetune_imagenet.py')
  _is_fine_tuning(config)
  assert (config.total, config.image_size) == ('20000 steps', (384, 384))
  assert config.average_decay is None
  dev = overrides.load('configs/finetune_imagenet.py:dev=1')
  assert dev.train.num_examples + 12_812 == config.train.num_examples
  for variant, size in (('L/16', 512), ('H/14', 518)):
    best = overrides.load(
      f'configs/finetune_imagenet.py:table=2,variant={variant}'
    )
    assert best.image_size == (size, size)
    assert best.average_decay == 0.9999
    assert best.model.variant == variant
  huge = overrides.load('configs/finetune_imagenet.py:variant=H/14')
  assert Experiment.build(huge, jax.devices()).model.grid((384, 384)) == (
    27,
    27,
  )


def test_every_config_builds():
  """Each file gives a model and a schedule on eight devices."""
  files = sorted(pathlib.Path('configs').glob('*.py'))
  assert len(files) >= 7
  for file in files:
    if file.stem == 'folder':  # needs a folder, see test_folder_config
      continue
    config = overrides.load(str(file))
    if config.init_from is not None or file.stem.startswith('finetune'):
      with config.unlocked():  # a fine-tuning takes this from the weights
        config.model.variant = 'B/16'
        config.image_size = (32, 32)
    assert Experiment.build(config, jax.devices()).total_steps > 0, file


def test_folder_config(tmp_path):
  """Classes and sizes are counted; without val a tenth is held out."""
  for name in ('cat', 'dog'):
    (tmp_path / 'train' / name).mkdir(parents=True)
    for i in range(10):
      (tmp_path / 'train' / name / f'{i}.png').write_bytes(b'not read here')
  for path in (tmp_path, tmp_path / 'train'):
    config = overrides.load(f'configs/folder.py:path={path}')
    assert (config.num_classes, config.train.num_examples) == (2, 18)
    assert config.evals.val.split == 'train[90%:]'
    assert config.train.split != 'train[:90%]'  # of workdirs from before
    assert config.augment.interpolation == 'area'  # photographs are large
    assert config.preprocess.interpolation == 'area'
  (tmp_path / 'Valid').mkdir()
  (tmp_path / 'train' / 'cat').rename(tmp_path / 'Valid' / 'cat')
  (tmp_path / 'train' / 'cat').mkdir()
  (tmp_path / 'Valid' / 'cat' / '1.png').rename(
    tmp_path / 'train' / 'cat' / '1.png'
  )
  parted = overrides.load(f'configs/folder.py:path={tmp_path}')
  assert parted.evals.val.split == 'val' and parted.train.num_examples == 11
  tune = overrides.load(f'configs/folder.py:path={tmp_path},tune=1')
  assert tune.optimizer.name == 'sgd' and tune.image_size == (384, 384)
  with pytest.raises(UserError, match='gs://bucket/photos is remote'):
    overrides.load('configs/folder.py:path=gs://bucket/photos')
  with pytest.raises(UserError, match='which folder'):
    overrides.load('configs/folder.py')


def test_bad_arguments_are_user_errors():
  """Unknown keys, rows and lengths are refused with what is allowed."""
  for argument, message in (
    ('vit.py:vraiant=B/16', "did you mean 'variant'"),
    ('vit.py:variant=B/17', 'no row of Table 3'),
    ('vit.py:variant=B/16,data=i21k,epochs=91', 'for 90'),
    ('vit.py:epochs=many', 'type int'),
    ('finetune.py:data=cifar', "did you mean 'cifar1"),
    ('finetune.py:data=cifar10,task=dtd', 'for data=vtab'),
    ('finetune.py:data=vtab,task=dtt', "did you mean 'dtd'"),
    ('finetune_imagenet.py:table=2', 'variant=L/16'),
    ('finetune_imagenet.py:table=3', '2 and 4'),
    ('nothing.py', 'no config file'),
  ):
    with pytest.raises(UserError, match=message):
      overrides.load(f'configs/{argument}')
