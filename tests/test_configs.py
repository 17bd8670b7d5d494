"""Tests of shipped configs: what follows from other configs, and messages.

tests/test_papers.py compares their numbers with the papers.
"""

import csv
import pathlib

import jax
import pytest

from vit_jax.config import loading
from vit_jax.data.sources import vtab
from vit_jax.errors import UserError
from vit_jax.sweeps import grid
from vit_jax.training.experiment import Experiment

PAPERS = pathlib.Path(__file__).parent / 'papers'


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


@pytest.mark.long
def test_the_19_tasks_of_vtab_are_validated_on_200_images():
  with pytest.raises(UserError, match='has 19 tasks') as caught:
    loading.load('configs/finetune.py:data=vtab')
  with (PAPERS / 'vtab.csv').open(newline='') as file:
    _, *rows = csv.DictReader(file)
  assert len(rows) == 19
  for row in rows:
    task = row['config'].partition('task=')[2]
    assert task in str(caught.value)
    config = loading.load(f'configs/{row["config"]}')
    dev = loading.load(f'configs/{row["config"]},dev=1')
    assert config.train.split == f'train[:800]+{dev.evals.test.split}'
    assert dev.train.num_examples == 800
    assert config.evals.test.split != dev.evals.test.split
    if task in vtab.TASKS:
      assert config.source.to_dict()['task'] == task
      names = vtab.TASKS[task].class_names
      assert len(names) == config.num_classes
  azimuth = loading.load('configs/finetune.py:data=vtab,task=smallnorb_azimuth')
  assert azimuth.source.label_key == 'label_azimuth'


def test_imagenet_real_is_evaluated_on_request():
  """Multi-label accuracy of the last step, from a dataset of its own."""
  assert 'real' not in loading.load('configs/finetune_imagenet.py').evals
  real = loading.load('configs/finetune_imagenet.py:real=1').evals.real
  assert real.name == 'calibration' and real.labels == 'real_label'
  assert real.every == '100 %'
  assert real.source.dataset == 'imagenet2012_real'
  assert real.labels in real.source.others


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
  # These need a folder, see below, or weights of a teacher or a backbone.
  unbuilt = ('manifest', 'segment', 'students')
  for file in sorted(pathlib.Path('configs').glob('*.py')):
    if file.stem.endswith('folder') or file.stem in unbuilt:
      continue
    config = loading.load(str(file))
    needs_weights = file.stem == 'lit' or file.stem.startswith(
      ('finetune', 'linear_')
    )
    if config.init_from or needs_weights:
      with config.unlocked():  # a fine-tuning reads this from the weights
        is_resnet = config.model.name == 'resnet'
        config.model.variant = 'R50x1' if is_resnet else 'B/16'
        config.image_size = (32, 32)
    assert Experiment.build(config, jax.devices()).total_steps > 0, file


@pytest.mark.long
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


def write_images(folder):
  """Writes ten files for each of two classes."""
  for name in ('cat', 'dog'):
    (folder / name).mkdir(parents=True)
    for i in range(10):
      (folder / name / f'{i}.png').write_bytes(b'not read here')


def test_folder_config_counts_classes(tmp_path):
  """Without a val folder, a tenth is held out."""
  write_images(tmp_path / 'train')
  for path in (tmp_path, tmp_path / 'train'):
    config = loading.load(f'configs/folder.py:path={path}')
    assert (config.num_classes, config.train.num_examples) == (2, 18)
    assert config.evals.val.split == 'train[90%:]'
    assert config.train.split != 'train[:90%]'  # the split of older workdirs
    assert config.augment.interpolation == 'area'  # photographs are large
    assert config.preprocess.interpolation == 'area'
  write_images(tmp_path / 'Valid')
  parted = loading.load(f'configs/folder.py:path={tmp_path}')
  assert parted.evals.val.split == 'val' and parted.train.num_examples == 20
  tune = loading.load(f'configs/folder.py:path={tmp_path},tune=1')
  assert tune.optimizer.name == 'sgd' and tune.image_size == (384, 384)


@pytest.mark.parametrize('labelled', [True, False])
def test_mae_on_a_folder(tmp_path, labelled):
  """Images without labels have no evaluation."""
  write_images(tmp_path / 'photos')
  path = tmp_path / 'photos' / ('' if labelled else 'cat')
  path = f'configs/folder.py:path={path},objective=mae'
  config = loading.load(path)
  experiment = Experiment.build(config, jax.devices()[:1])
  assert experiment.objective.num_classes == 0
  assert config.train.num_examples == (18 if labelled else 9)
  assert [*config.evals] == (['knn'] if labelled else [])
  if labelled:
    assert config.evals.knn.split == 'train[90%:]'
  with pytest.raises(UserError, match='objective=mae,tune=1'):
    loading.load(f'{path},tune=1')


@pytest.mark.parametrize(
  'version, model, gpus, batch',
  [('dinov2', 'S', 1, 64), ('dinov2', 'L', 8, 256), ('dinov3', 'L', 8, 256)],
)
def test_dino_on_a_folder(tmp_path, version, model, gpus, batch):
  """The groups of masks are the images of one GPU."""
  write_images(tmp_path)
  path = f'configs/{version}_folder.py'
  config = loading.load(f'{path}:path={tmp_path},model={model},gpus={gpus}')
  experiment = Experiment.build(config, jax.devices()[:1])
  assert config.batch_size == batch == gpus * config.augment.group
  assert config.train.num_examples == 18
  assert config.evals.knn.split == 'train[90%:]'
  assert experiment.total_steps == 10_000
  with pytest.raises(UserError, match='gpus=3'):
    loading.load(f'{path}:path={tmp_path},gpus=3')
  if version == 'dinov3':
    # Only heads are trained at first, and every rule of the backbone says so.
    rules = config.optimizer.rules
    late = [pattern for pattern, rule in rules if 'after' in rule]
    assert late == ['model/(embedding|patch_norm)/.*', 'model/.*|mask']
    assert experiment.steps(rules[0][1]['after']) == 1000
    assert experiment.config.objective.head.weight_norm is False
    # As in the released files.
    assert (
      experiment.model.registers == 4 and experiment.model.config.rope_random
    )
    assert experiment.image_size == (224, 224) and experiment.augment.exact


@pytest.mark.parametrize(
  'protocol, dropout, decay', [('dinov3', 0.1, 1e-3), ('dinov2', 0.0, 1e-4)]
)
def test_segmentation_of_ade20k(tmp_path, protocol, dropout, decay):
  """The values of the authors' files; windows of 512 at distances of 341."""
  for split in ('training', 'validation'):
    (tmp_path / 'images' / split).mkdir(parents=True)
    (tmp_path / 'images' / split / '1.jpg').write_bytes(b'not read here')
  path = f'configs/segment.py:path={tmp_path},protocol={protocol}'
  config = loading.load(path)
  assert (config.batch_size, config.total) == (16, '40000 steps')
  assert config.objective.dropout == dropout
  assert config.optimizer.weight_decay == decay
  with config.unlocked():
    config.model.variant = 'S/16'  # else read from the weights
  run = Experiment.build(config, jax.devices()[:1])
  assert run.objective.classes == 150 and run.image_size == (512, 512)
  windows = run.config.evals.val.preprocess
  assert windows.reduce_zero_label and windows.classes == 150
  assert int(512 * windows.stride) == 341
  rates = [float(run.trainer.schedule(step)) for step in (1500, 40_000)]
  assert rates == pytest.approx([1e-3, 0], abs=1e-6)


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
    ('noisy_student.py:labels=none', 'result of .*pseudo_label'),
    ('dino.py:recipe=boosted', "did you mean 'boost'"),
    ('dinov2.py:recipe=shorter', "did you mean 'short'"),
    ('cifar10.py:objective=dinos', "did you mean 'dino'"),
    ('finetune.py:data=cifar10,crop=bat', "crop is 'bat'.*bit"),
    ('mae.py:model=S', 'not a row of the paper'),
    ('mae.py:epochs=300', 'for 800 or 1600'),
    ('finetune_mae.py:model=S', 'not a row of the paper'),
    ('linear_mae.py:model=S', 'model=S'),
    ('linear_dino.py:model=L', 'model=L'),
    ('masked_patch.py:data=i1k', "did you mean 'i21k'|allowed"),
    ('folder.py:path=gs://bucket/photos', 'gs://bucket/photos is remote'),
    ('folder.py', 'which folder'),
    ('dinov2_folder.py', 'which folder'),
    ('dinov3_folder.py', 'which folder'),
    ('dinov3.py:recipe=grams', "did you mean 'gram'"),
    ('dinov3.py:gram=early', 'needs recipe=gram'),
    ('dinov3.py:model=XL', 'model=XL'),
    ('segment.py', 'path='),
    ('segment.py:path=.,protocol=dino', 'protocol=dino'),
    ('segment.py:path=.,data=folder', 'number of classes'),
    ('students.py', 'which teacher'),
    ('students.py:teacher=none,model=L', 'model=L'),
    ('nothing.py', 'no config file'),
  ):
    with pytest.raises(UserError, match=message):
      loading.load(f'configs/{argument}')


@pytest.mark.parametrize(
  'config', ['finetune.py:data=cifar10', 'finetune_imagenet.py:table=4']
)
def test_finetuning_crops(config):
  """The default is the public code's; crop=bit selects BiT's (section 4.1)."""
  default = loading.load(f'configs/{config}').augment
  assert (default.crop, default.min_area) == ('inception', 0.05)
  bits = loading.load(f'configs/{config},crop=bit').augment
  assert bits.crop == 'squash' and round(384 * bits.enlarge) == 448


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
  rows = grid.load('configs/studies/finetuned.py:table=5', grid.Study).rows
  numbers = rows['H/14 jft'].paper
  found = numbers['ImageNet'].mean, numbers['CIFAR-100'].mean
  assert found == (88.04, 94.55)


@pytest.mark.parametrize('recipe, patch_size', [('short', 16), ('long', 14)])
def test_sizes_of_dinov2(recipe, patch_size):
  for model, depth in (('S', 12), ('B', 12), ('L', 24)):
    config = loading.load(f'configs/dinov2.py:recipe={recipe},model={model}')
    built = Experiment.build(config, jax.devices()[:1]).model
    assert (built.patch_size, built.depth) == (patch_size, depth)
  assert built.mlp_dim == {'short': 4096, 'long': 2736}[recipe]


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


def test_dinov3_at_high_resolution_has_five_sizes():
  """Probabilities, global and local crops; a patch is not cut at 168 pixels."""
  config = loading.load('configs/dinov3.py:recipe=gram,model=S,stage=highres')
  experiment = Experiment.build(config, jax.devices()[:1])
  found = [
    (probability, each.image_size[0], *each.augment.local_size)
    for probability, each in experiment.variants
  ]
  assert found[2] == (0.3, 768, 168) and len(found) == 5
  assert sum(row[0] for row in found) == pytest.approx(1)
  assert {
    s['gram'][0][1] for s in [e.augment.spec for _, e in experiment.variants]
  } == {768, 1152}


@pytest.mark.parametrize('recipe, count', [('short', 4), ('long', 12)])
def test_a_micro_batch_of_eight_gpus_has_a_group_for_each(recipe, count):
  config = loading.load(f'configs/dinov2.py:recipe={recipe},gpu=80')
  assert config.micro_batches == count and config.model.remat == 'dots'
  assert config.batch_size == count * 8 * config.augment.group


def test_manifest_config_chooses_the_loss(tmp_path):
  """Means and stds are those of the training data."""
  rows = ['image,label,age,split', 'a.png,cat|dog,1,train', 'b.png,cat,4,train']
  (tmp_path / 'list.csv').write_text('\n'.join([*rows, 'c.png,dog,9,val']))
  path = f'configs/manifest.py:path={tmp_path}/list.csv'
  plain = loading.load(path)
  assert plain.objective.cross_entropy == 'softmax' and plain.num_classes == 3
  several = loading.load(f'{path},separator=|')
  assert several.objective.cross_entropy == 'sigmoid'
  assert several.augment.classes == several.preprocess.classes == 2
  assert (several.train.num_examples, several.evals.val.split) == (2, 'val')
  numbers = loading.load(f'{path},numbers=age')
  assert numbers.objective.name == 'regression'
  assert (numbers.objective.mean, numbers.objective.std) == ((2.5,), (1.5,))
  assert numbers.num_classes == 1 and numbers.preprocess.numbers == ('age',)
  (tmp_path / 'list.csv').write_text('image,label\na.png,1\nb.png,0')
  assert loading.load(path).evals.val.split == 'train[90%:]'
  with pytest.raises(UserError, match='at most one'):
    loading.load(f'{path},numbers=age,separator=|')
