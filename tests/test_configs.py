"""Tests of shipped configs: what follows from other configs, and messages.

tests/test_papers.py compares their numbers with the papers.
"""

import pathlib
import re

import jax
import pytest

from vit_jax.config import loading
from vit_jax.data.sources import vtab
from vit_jax.errors import UserError
from vit_jax.sweeps import grid
from vit_jax.training.experiment import Experiment


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


@pytest.mark.parametrize(
  'data', ['cifar10', 'oxford_iiit_pet', 'oxford_flowers102', 'vtab,task=dtd']
)
def test_rates_of_fine_tuning_are_not_chosen_on_the_test_split(data):
  for file in ('finetune', 'finetune_bit'):
    if file == 'finetune' or 'task' not in data:
      config = loading.load(f'configs/{file}.py:data={data}')
      dev = loading.load(f'configs/{file}.py:data={data},dev=1')
      assert config.evals.test.split == 'test' != dev.evals.test.split
      assert dev.train.num_examples < config.train.num_examples


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


def test_resnets_by_sgd():
  """Table 7's other optimizer, with BiT's hyper-parameters for 7 epochs."""
  config = loading.load('configs/resnet.py:variant=R50x1,optimizer=sgd')
  assert (config.optimizer.name, config.optimizer.weight_decay) == ('sgd', 1e-3)
  assert config.schedule.base_lr == pytest.approx(0.03 * 4096 / 256)
  assert config.schedule.decay_at == (0.25, 0.575, 0.75, 0.925)
  assert config.total == '7 epochs'


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


@pytest.mark.slow
def test_every_config_builds():
  """Each file gives a model and a schedule on eight devices."""
  files = sorted(pathlib.Path('configs').glob('*.py'))
  assert len(files) >= 7
  for file in files:
    if file.stem.endswith('folder'):  # needs a folder, see below
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
    ('noisy_student.py:labels=none.npz', 'as pseudo-labels'),
    ('dino.py:recipe=boosted', "did you mean 'boost'"),
    ('dinov2.py:recipe=shorter', "did you mean 'short'"),
    ('cifar10.py:objective=dinos', "did you mean 'dino'"),
    ('nothing.py', 'no config file'),
  ):
    with pytest.raises(UserError, match=message):
      loading.load(f'configs/{argument}')


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
  with pytest.raises(UserError, match="crop is 'bat'.*bit"):
    loading.load(f'configs/{config},crop=bat')


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
