"""Tests of config files, and of flags that override their keys."""

import math

import pytest
from absl import flags
from minimal_config import completed, minimal

from vit_jax.cli import inputs
from vit_jax.config import loading, overrides

LAB = 'tests.plugins.lab_nested'


@pytest.mark.parametrize(
  'flag, expected',
  [
    ('batch_size=16', 16),  # of the file
    ('mesh.fsdp=2', 2),  # a default
    ('average_decay=.99', 0.99),  # a placeholder
    ('image_size=(384,256)', (384, 256)),
    ('evals.test.batch_size=4', 4),
    ('log.every=7 steps', '7 steps'),
    ("optimizer.clip_joined=('query|key', 'fc1')", ('query|key', 'fc1')),
    ('augment.flip=0', False),
    ('augment.flip', True),
    ('batch_size=0x10', 16),
    ('optimizer.clip_norm=1', 1.0),
    ('optimizer.clip_norm=inf', math.inf),
    ('init_from=1', '1'),
    ('optimizer.clip_norm=None', None),
  ],
)
def test_text_is_converted_to_the_type_of_its_key(parse, flag, expected):
  """The notation is that of absl, and of Python for tuples."""
  value = parse(f'--config.{flag}')
  for part in flag.partition('=')[0].split('.'):
    value = value[part]
  assert value == expected and type(value) is type(expected)


def test_flags_of_tuples(parse):
  """Whole numbers are accepted for floats, and one number for a tuple."""
  augment = parse(
    '--config.augment.name=multicrop',
    '--config.augment.blur=(0.3, 0, .1)',
    '--config.augment.local_size=8',
  ).augment
  assert (augment.blur, augment.local_size) == ((0.3, 0, 0.1), (8,))


def test_a_name_adds_a_section_to_those_of_the_users_choice(parse):
  """Evaluators, their sources, and trackers next to others."""
  knn, tracker = '--config.evals.knn', '--config.log.trackers'
  config = parse(
    f'{knn}.source.members.a.weight=2',
    f'{knn}.source.members.a.name=synthetic',
    f'{knn}.source.name=mixture',
    f'{knn}.split=test',
    f'{knn}.name=neighbours',
    f'{tracker}.one.name=tensorboard',
    f'{tracker}.two.name=tensorboard',
  )
  assert {*config.evals} == {'test', 'knn'}
  assert config.evals.knn.name == 'neighbours'
  assert config.evals.knn.source.members.a.weight == 2
  assert {*config.log.trackers} == {'one', 'two'}


def test_flags_of_nested_sections(parse):
  """A name creates a section in place of None, in any order of the flags."""
  heads = {name: {'name': LAB, 'outputs': 3} for name in 'ab'}
  model = parse(
    '--config.model.heads.b.weight=2',
    '--config.model.stem.kernel_size=5',
    f'--config.model.stem.name={LAB}',
    base=completed(model={'name': LAB, 'heads': heads}),
  ).model
  assert (model.heads.a.weight, model.heads.b.weight) == (1.0, 2.0)
  assert model.stem.to_dict() == {'name': LAB, 'kernel_size': 5, 'bias': True}


@pytest.mark.parametrize('depths', ['(2,1)', '2, 1', '[2,1]'])
def test_flags_set_keys_without_defaults(parse, depths):
  """Tuples can be given together with the name of a new section."""
  model = parse(
    f'--config.model.stem.depths={depths}',
    '--config.model.stem.name=resnet',
    base=completed(model=dict(name='vit', variant='R50+B/16')),
  ).model
  expected = {'name': 'resnet', 'depths': (2, 1), 'width_factor': 1}
  assert model.stem.to_dict() == expected and model.variant == 'R50+B/16'


@pytest.mark.parametrize('text', ['-1', '-.5', '-2e3'])
def test_a_negative_number_may_follow_its_key(text):
  argv = ['train', '--config.a.b', text, '--config.c', '--config.d', 'x']
  expected = [f'--config.a.b={text}', '--config.c', '--config.d=x']
  assert overrides.extract(argv) == expected
  assert argv == ['train']


def test_flags_with_another_prefix():
  """Flags of pre-trainings of a study; the others stay in argv."""
  argv = ['study', '--pretrain.a', '-1', '--nopretrain.b', '--pretrain']
  argv += ['--pretrain.total=3 steps', '--config.c=2']
  expected = ['--config.a=-1', '--noconfig.b', '--config.total=3 steps']
  assert overrides.extract(argv, 'pretrain') == expected
  assert argv == ['study', '--pretrain', '--config.c=2']


@pytest.mark.parametrize('dataset', ['cifar10:3.0.2', 'vtab/dtd:1.0.0', 'pets'])
def test_names_of_tfds_may_have_a_version(dataset):
  """A dot makes a name a module only before the version."""
  request = inputs.Request(dataset=dataset)
  section = inputs.source_section({}, request)
  assert section == {'name': 'tfds', 'dataset': dataset}
  request = inputs.Request(dataset='my_lab.squares')
  assert inputs.source_section({}, request) == {'name': 'my_lab.squares'}


def test_a_new_name_replaces_the_keys_of_a_section(parse):
  """A key given in the file stays if the new constructor has it."""
  config = parse('--config.source.name=synthetic', '--config.source.height=4')
  assert config.source.to_dict() == dict(
    name='synthetic', num_examples=1024, num_classes=10, height=4, width=32
  )
  adam = dict(name='adam', b1=0.5, weight_decay=0.3)
  section = parse(
    '--config.optimizer.name=sgd', base=completed(optimizer=adam)
  ).optimizer.to_dict()
  assert (section['name'], section['weight_decay']) == ('sgd', 0.3)
  assert 'momentum' in section and 'b1' not in section


CONFIG_FILE = f"""
from ml_collections import ConfigDict
from vit_jax.config import complete, parse_arg

def get_config(arg=None):
  args = parse_arg(arg, depth=2, result='values')
  values = {minimal()!r}
  values['model']['depth'] = args.depth
  return eval(args.result)
"""


def test_config_files_and_their_arguments(tmp_path, command_line):
  """Flags take precedence; `--config FILE` works as with '='."""
  file = tmp_path / 'minimal.py'
  file.write_text(CONFIG_FILE)
  config = command_line(f'--config={file}:depth=5', '--config.model.width=16')
  assert (config.model.depth, config.model.width) == (5, 16)
  assert flags.FLAGS.config_path == f'{file}:depth=5'
  split = ('--config', str(file), '--config.source.name', 'synthetic')
  assert 'dataset' not in command_line(*split).source
  # A dict, a ConfigDict and a complete config give the same result.
  for form in ('values', 'ConfigDict(values)', 'complete(ConfigDict(values))'):
    config = loading.load(f'{file}:result={form}')
    assert config.to_dict() == completed().to_dict()
    with pytest.raises(AttributeError):
      config.new_key = 1


def test_config_json_is_a_config(parse):
  """A run's config.json can be passed to --config, with its keys as flags."""
  before = completed(image_size=12, average_decay=0.5)
  config = parse('--config.model.depth=3', base=before)
  assert config.model.depth == 3 and config.image_size == (12,)
  config.model.depth = before.model.depth
  assert config.to_dict() == before.to_dict()
  assert flags.FLAGS.config_path.endswith('/config.json')


def test_an_argument_may_be_the_path_of_a_json_file():
  config = loading.load('configs/siglip.py:tokens=siglip2,tokenizer=a/b.json')
  assert config.augment.tokenizer == config.preprocess.tokenizer == 'a/b.json'


def test_none_removes_evaluators(command_line):
  quickstart = '--config=configs/quickstart.py'
  assert not command_line(quickstart, '--config.evals.test=None').evals
  new = ('--config.evals.new.name=confusion', '--config.evals.new.split=test')
  config = command_line(quickstart, '--config.evals=None', *new)
  assert [*config.evals] == ['new']
