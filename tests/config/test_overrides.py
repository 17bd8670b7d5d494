"""Tests of config files and flags."""

import math
import re

import pytest
from absl import flags
from minimal_config import completed, minimal

from vit_jax.cli import inputs
from vit_jax.config import completion, loading, overrides
from vit_jax.errors import UserError

CONFIG_FILE = """
from ml_collections import ConfigDict
from vit_jax.config import complete, parse_arg

def get_config(arg=None):
  args = parse_arg(arg, depth=2)
  values = {values!r}
  values['model']['depth'] = args.depth
  return complete(ConfigDict(values))
"""


@pytest.fixture
def parse(tmp_path, command_line):
  """Returns a function that parses flags in this process."""
  file = tmp_path / 'minimal.py'
  file.write_text(CONFIG_FILE.replace('{values!r}', repr(minimal())))

  def parse(*arguments, config=f'--config={file}'):
    return command_line(*([config] if config else []), *arguments)

  parse.file = str(file)
  return parse


def test_every_kind_of_key_is_a_flag(parse):
  """Keys of the file, defaults, placeholders and tuples can be overridden."""
  config = parse(
    '--config.batch_size=16',
    '--config.mesh.fsdp=2',
    '--config.average_decay=.99',
    '--config.image_size=(384,256)',
    '--config.model.pool=gap',
    '--config.augment.flip=false',
    '--config.optimizer.clip_norm=1',
    '--config.model.variant=B/16',
    '--config.evals.test.batch_size=4',
    '--config.log.every=7 steps',
  )
  assert (config.batch_size, config.mesh.fsdp) == (16, 2)
  assert config.average_decay == 0.99
  assert config.image_size == (384, 256)
  assert (config.model.pool, config.augment.flip) == ('gap', False)
  assert math.isclose(config.optimizer.clip_norm, 1.0)
  assert config.model.variant == 'B/16'
  assert (config.evals.test.batch_size, config.log.every) == (4, '7 steps')


def test_flags_of_tuples(parse):
  """Whole numbers are accepted for floats, and one number for a tuple."""
  config = parse(
    '--config.augment.name=multicrop',
    '--config.augment.blur=(0.3, 0, .1)',
    '--config.augment.local_size=8',
    "--config.optimizer.clip_joined=('query|key', 'fc1')",
  )
  assert config.augment.blur == (0.3, 0, 0.1)
  assert config.augment.local_size == (8,)
  assert config.optimizer.clip_joined == ('query|key', 'fc1')


@pytest.mark.parametrize(
  'flag, expected',
  [
    ('augment.local_size=8.5', 'tuple of int'),
    ('augment.local_size={[]: 1}', 'tuple of int'),
    ("augment.blur=(0.3, '0', 0)", 'tuple of float'),
    ('optimizer.clip_joined=fc1', 'tuple of str'),
  ],
)
def test_messages_of_wrong_tuples(parse, flag, expected):
  """The message says what may be given."""
  with pytest.raises(UserError, match=expected):
    parse('--config.augment.name=multicrop', f'--config.{flag}')


@pytest.mark.parametrize(
  'flag, expected',
  [
    ('augment.flip=0', False),
    ('augment.flip', True),
    ('batch_size=0x10', 16),
    ('optimizer.clip_norm=inf', math.inf),
    ('init_from=1', '1'),
    ('optimizer.clip_norm=None', None),
  ],
)
def test_flags_have_the_notation_of_absl(parse, flag, expected):
  """Text is converted to the type of its key."""
  value = parse(f'--config.{flag}')
  for part in flag.partition('=')[0].split('.'):
    value = value[part]
  assert value == expected and type(value) is type(expected)


def test_flags_create_a_section_in_a_section_that_is_none(parse):
  """`log.trackers` has sections with names of the user's choice."""
  tracker = '--config.log.trackers.mine'
  trackers = parse(f'{tracker}.name=tensorboard').log.trackers
  assert trackers.to_dict() == {'mine': {'name': 'tensorboard'}}


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
  for section in ('evals.knn.split', 'model.more.name', 'more.name'):
    with pytest.raises(UserError, match=f'config.{section.rpartition(".")[0]}'):
      parse(f'--config.{section}=x')
  with pytest.raises(UserError, match='config.source.more is not a key'):
    overrides.apply(
      {'source': {'name': 'tar'}}, ['--config.source.more.name=x']
    )


@pytest.mark.parametrize('text', ['-1', '-.5', '-2e3'])
def test_a_negative_number_may_follow_its_key(text):
  argv = ['train', '--config.a.b', text, '--config.c', '--config.d', 'x']
  assert overrides.extract(argv) == [
    f'--config.a.b={text}',
    '--config.c',
    '--config.d=x',
  ]
  assert argv == ['train']


def test_flags_with_another_prefix():
  """Those of pre-trainings of a study; the others stay in argv."""
  argv = ['study', '--pretrain.total=3 steps', '--pretrain', '--workdir=w']
  assert overrides.extract(argv, 'pretrain') == ['--config.total=3 steps']
  assert argv == ['study', '--pretrain', '--workdir=w']
  argv = ['study', '--pretrain.a', '-1', '--nopretrain.b', '--config.c=2']
  found = ['--config.a=-1', '--noconfig.b']
  assert overrides.extract(argv, 'pretrain') == found
  assert argv == ['study', '--config.c=2']


@pytest.mark.parametrize('dataset', ['cifar10:3.0.2', 'vtab/dtd:1.0.0', 'pets'])
def test_names_of_tfds_may_have_a_version(dataset):
  """A dot makes a name a module only before the version."""
  request = inputs.Request(dataset=dataset)
  section = inputs.source_section({}, request)
  assert section == {'name': 'tfds', 'dataset': dataset}
  request = inputs.Request(dataset='my_lab.squares')
  assert inputs.source_section({}, request) == {'name': 'my_lab.squares'}


@pytest.mark.parametrize('key', ['evals', 'log.trackers', 'model'])
def test_the_advice_for_a_section_is_a_flag(parse, key):
  with pytest.raises(UserError, match='is a section') as error:
    parse(f'--config.{key}=3')
  advice = re.findall(r'--config\.[\w.]+=', str(error.value))[0]
  with pytest.raises(UserError, match='the name .no_such. cannot be used'):
    parse(f'{advice}no_such')


def test_arguments_of_a_config_file(parse):
  """Text after the colon reaches `get_config`; flags take precedence."""
  path = f'--config={parse.file}:depth=5'
  config = parse('--config.model.width=16', config=path)
  assert (config.model.depth, config.model.width) == (5, 16)
  assert flags.FLAGS.config_path == f'{parse.file}:depth=5'


def test_a_new_name_replaces_the_keys_of_a_section(tmp_path, parse):
  """A key given in the file stays if the new constructor has it."""
  config = parse('--config.source.name=synthetic', '--config.source.height=4')
  assert config.source.to_dict() == dict(
    name='synthetic', num_examples=1024, num_classes=10, height=4, width=32
  )
  values = minimal()
  values['optimizer'] = dict(name='adam', b1=0.5, weight_decay=0.3)
  file = tmp_path / 'other.py'
  file.write_text(CONFIG_FILE.replace('{values!r}', repr(values)))
  section = parse('--config.optimizer.name=sgd', config=f'--config={file}')
  section = section.optimizer.to_dict()
  assert (section['name'], section['weight_decay']) == ('sgd', 0.3)
  assert 'momentum' in section and 'b1' not in section


def test_flags_without_equals_sign(parse):
  """`--config FILE` and `--config.source.name synthetic` work as with '='."""
  config = parse(
    '--config',
    parse.file,
    '--config.source.name',
    'synthetic',
    config=None,
  )
  assert config.batch_size == 8 and 'dataset' not in config.source


@pytest.mark.parametrize(
  'argument, words',
  [
    ('--config.model.dpth=2', ['config.model.dpth', "mean 'depth'"]),
    ('--config.modle.depth=2', ['config.modle.depth', "mean 'model.depth'"]),
    ('--config.evals.tset.split=x', ["mean 'test'"]),
    # The evaluators of the config are named, not keys of others.
    (
      '--config.evals.fewshot.a.b=5',
      ['evals.fewshot is not', 'allowed: test.'],
    ),
    ('--config.reader.name=x', ['allowed: max_bad_share, on_bad']),
    # a key of another source
    ('--config.source.height=4', ['source.height', 'dataset']),
    ('--config.model=vit', ["config.model is 'vit'", '--config.model.']),
    ('--confg_path=x', ['mean --config_path']),
    ('--config.evals.test.name=clasification', ["mean 'classification'"]),
  ],
)
def test_messages_of_mistyped_keys(parse, argument, words):
  """The message contains the nearest key."""
  with pytest.raises(UserError) as error:
    parse(argument)
  for word in words:
    assert word in str(error.value)


# The text of a config file, and what the message must say.
WRONG_FILES = [
  ('def get_config(:\n', ['line 1', 'SyntaxError']),
  (b'\xff\xfe', ['SyntaxError', 'utf-8']),
  ('x = 1\ndef get_config():\n  return nme\n', ['line 3', "'nme' is not"]),
  (
    'import json\ndef get_config(): return json.loads("{")\n',
    ['line 2', 'JSONDecodeError'],
  ),
  ('def get_config(needed): return 1\n', ["argument: 'needed'"]),
  ('x = 1\n', ['get_config()']),
  ('def get_config(): pass\n', ['None', 'ConfigDict']),
  ('def get_config(): return {"a.b": 1}\n', ['is not a config', 'a.b']),
  ('def get_config(): return {}\n', ['config.total is missing']),
  (
    'from vit_jax.errors import UserError\n'
    'def get_config(): raise UserError("say which folder")\n',
    ['say which folder'],
  ),
]


@pytest.mark.parametrize('text, words', WRONG_FILES)
def test_messages_of_config_files_with_errors(tmp_path, text, words):
  """The message contains the file, the line and Python's own message."""
  file = tmp_path / 'mine.py'
  file.write_bytes(text if isinstance(text, bytes) else text.encode())
  with pytest.raises(UserError) as error:
    loading.load(str(file))
  for word in words:
    assert word in str(error.value)


@pytest.mark.parametrize(
  'expression',
  ['values', 'ConfigDict(values)', 'complete(ConfigDict(values))'],
)
def test_get_config_may_return_dicts(tmp_path, expression):
  """A dict, a ConfigDict and a complete config give the same result."""
  (tmp_path / 'mine.py').write_text(
    'from ml_collections import ConfigDict\n'
    'from vit_jax.config import complete\n'
    f'values = {minimal()!r}\n'
    f'def get_config(): return {expression}\n'
  )
  config = loading.load(str(tmp_path / 'mine.py'))
  assert config.to_dict() == completed().to_dict()
  with pytest.raises(AttributeError):
    config.new_key = 1


def test_config_json_is_a_config(tmp_path, parse):
  """A run's config.json can be passed to --config, with its keys as flags."""
  before = completed(image_size=12, average_decay=0.5)
  file = tmp_path / 'config.json'
  file.write_text(completion.to_json(before))
  config = parse('--config.model.depth=3', config=f'--config={file}')
  assert config.model.depth == 3
  config.model.depth = before.model.depth
  assert config.to_dict() == before.to_dict()
  assert config.image_size == (12,)
  assert flags.FLAGS.config_path == str(file)


def test_an_argument_may_be_the_path_of_a_json_file():
  config = loading.load('configs/siglip.py:tokens=siglip2,tokenizer=a/b.json')
  assert config.augment.tokenizer == config.preprocess.tokenizer == 'a/b.json'


@pytest.mark.parametrize(
  'text, words',
  [
    ('{', ['cannot be read', 'line 1']),
    ('[1]', ['[1]']),
    ('{"totl": "1 epochs"}', ["did you mean 'total'"]),
    (b'\xff', ['cannot be read', 'utf-8']),
    (None, ['cannot be read', 'No such file']),
  ],
)
def test_messages_of_wrong_config_json_files(tmp_path, text, words):
  """Files that are damaged, missing or of another program give one message."""
  file = tmp_path / 'config.json'
  if text is not None:
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
  with pytest.raises(UserError) as error:
    loading.load(str(file))
  for word in words:
    assert word in str(error.value)


@pytest.mark.parametrize(
  'path, word',
  [
    ('', 'no config file'),
    ('a.txt', 'FILE.py'),
    ('a.py:depth=3', 'takes no argument'),
  ],
)
def test_messages_of_paths_that_are_not_configs(tmp_path, path, word):
  """So is an argument for a function without parameters."""
  (tmp_path / 'a.txt').write_text('total = 3')
  (tmp_path / 'a.py').write_text('def get_config(): return 1\n')
  with pytest.raises(UserError, match=word):
    loading.load(f'{tmp_path}/{path}')


def test_flags_of_a_shipped_config(command_line):
  """None removes evaluators; at most five of many keys are suggested."""
  quickstart = '--config=configs/quickstart.py'
  assert not command_line(quickstart, '--config.evals.test=None').evals
  assert not command_line(quickstart, '--config.evals=None').evals
  flags = ('--config.evals.new.name=confusion', '--config.evals.new.split=test')
  config = command_line(quickstart, '--config.evals=None', *flags)
  assert [*config.evals] == ['new']
  with pytest.raises(UserError, match='nearest of 1') as error:
    command_line(quickstart, '--config.optimzer.b1=3')
  assert len(str(error.value).partition(': ')[2].split(', ')) <= 5
