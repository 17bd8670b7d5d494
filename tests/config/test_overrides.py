"""Configs on the command line: every key a flag, every mistake a message."""

import math
import os
import pathlib
import subprocess
import sys

import pytest
from absl import flags
from minimal_config import completed, minimal

from vit_jax.config import completion as config_lib
from vit_jax.config import loading
from vit_jax.errors import UserError

ROOT = pathlib.Path(__file__).parents[2]
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
  """Parses a command line in this process; flags vanish after the test."""
  file = tmp_path / 'minimal.py'
  file.write_text(CONFIG_FILE.replace('{values!r}', repr(minimal())))

  def parse(*arguments, config=f'--config={file}'):
    return command_line(*([config] if config else []), *arguments)

  parse.file = str(file)
  return parse


def test_every_kind_of_key_is_a_flag(parse):
  """Given keys, defaults, placeholders and tuples can all be overridden."""
  config = parse(
    *('--config.batch_size=16', '--config.mesh.fsdp=2'),
    *('--config.average_decay=.99', '--config.image_size=384'),
    *('--config.model.pool=gap', '--config.augment.flip=false'),
    *('--config.optimizer.clip_norm=1', '--config.model.variant=B/16'),
    *('--config.evals.test.batch_size=4', '--config.log.every=7 steps'),
  )
  assert (config.batch_size, config.mesh.fsdp) == (16, 2)
  assert config.average_decay == 0.99
  assert config.image_size == (384,)
  assert (config.model.pool, config.augment.flip) == ('gap', False)
  assert math.isclose(config.optimizer.clip_norm, 1.0)
  assert config.model.variant == 'B/16'
  assert (config.evals.test.batch_size, config.log.every) == (4, '7 steps')


def test_tuples_of_numbers_and_of_names(parse):
  """Each holds what its constructor says; whole numbers are numbers."""
  config = parse(
    '--config.augment.name=multicrop',
    *('--config.augment.blur=(0.3, 0, .1)', '--config.augment.local_size=8'),
    "--config.optimizer.clip_joined=('query|key', 'fc1')",
  )
  assert config.augment.blur == (0.3, 0, 0.1)
  assert config.augment.local_size == (8,)
  assert config.optimizer.clip_joined == ('query|key', 'fc1')


@pytest.mark.parametrize(
  'flag, wanted',
  [
    ('augment.local_size=8.5', 'whole number'),
    ('augment.local_size=(8, True)', 'whole number'),
    ("augment.blur=(0.3, '0', 0)", 'one number'),
    ('augment.blur=much', 'one number'),
    ('optimizer.clip_joined=fc1', 'in quotes'),
    ('optimizer.clip_joined=(1, 2)', 'in quotes'),
  ],
)
def test_tuples_of_something_else(parse, flag, wanted):
  """One message that says what may be given."""
  with pytest.raises(UserError, match=wanted):
    parse('--config.augment.name=multicrop', f'--config.{flag}')


def test_two_numbers_for_the_image_size(parse):
  """Height and width can be given apart."""
  assert parse('--config.image_size=(384,256)').image_size == (384, 256)


def test_arguments_of_the_file(parse):
  """What follows the colon reaches `get_config`; flags win over it."""
  path = f'--config={parse.file}:depth=5'
  config = parse('--config.model.width=16', config=path)
  assert (config.model.depth, config.model.width) == (5, 16)
  assert flags.FLAGS.config_path == f'{parse.file}:depth=5'


def test_config_may_stand_apart_from_its_value(parse):
  """`--config FILE` is `--config=FILE`."""
  assert parse('--config', parse.file, config=None).batch_size == 8


def test_a_new_name_completes_its_section_anew(parse):
  """Another source has other keys; those that both have keep their values."""
  config = parse('--config.source.name=synthetic', '--config.source.height=4')
  assert config.source.to_dict() == dict(
    name='synthetic', num_examples=1024, num_classes=10, height=4, width=32
  )


def test_renaming_keeps_what_both_have(tmp_path, parse):
  """A key given in the file survives the renaming where it exists."""
  values = minimal()
  values['optimizer'] = dict(name='adam', b1=0.5, weight_decay=0.3)
  file = tmp_path / 'other.py'
  file.write_text(CONFIG_FILE.replace('{values!r}', repr(values)))
  section = parse('--config.optimizer.name=sgd', config=f'--config={file}')
  section = section.optimizer.to_dict()
  assert (section['name'], section['weight_decay']) == ('sgd', 0.3)
  assert 'momentum' in section and 'b1' not in section


def test_a_new_name_apart_from_its_flag(parse):
  """`--config.source.name synthetic` renames just as with '='."""
  config = parse('--config.source.name', 'synthetic')
  assert 'dataset' not in config.source


@pytest.mark.parametrize(
  'argument, words',
  [
    ('--config.batch_size=many', ['config.batch_size', 'many']),
    ('--config.average_decay=x', ['config.average_decay', 'x']),
    ('--config.model.name=vti', ["'vti'", "mean 'vit'"]),
    ('--config.evals.test.name=clasification', ["mean 'classification'"]),
  ],
)
def test_wrong_values_on_the_command_line(parse, argument, words):
  """A value of another type, or a name that is none, is one message."""
  with pytest.raises(UserError) as error:
    parse(argument)
  for word in words:
    assert word in str(error.value)


@pytest.mark.parametrize(
  'argument, words',
  [
    ('--config.model.dpth=2', ['config.model.dpth', "mean 'model.depth'"]),
    ('--config.modle.depth=2', ['config.modle.depth', "mean 'model.depth'"]),
    ('--config.batchsize=2', ['config.batchsize', "mean 'batch_size'"]),
    ('--config.evals.tset.split=x', ["mean 'evals.test.split'"]),
    ('--config.schedule.name=x', ['schedule.base_lr, schedule.decay']),
    ('--noconfig.augment.flop', ["mean 'augment.flip'"]),
    ('--config.source.height=4', ['source.dataset']),  # of another source
    ('--config.model=vit', ['config.model is a section', '--config.model.']),
    ('--confg_path=x', ['mean --config_path']),
  ],
)
def test_wrong_keys_on_the_command_line(parse, argument, words):
  """A mistyped key is one message that names the nearest."""
  with pytest.raises(UserError) as error:
    parse(argument)
  for word in words:
    assert word in str(error.value)


def test_wrong_numbers_on_the_command_line(tmp_path, parse):
  """Text is no image size, nor is it depths where there were none before."""
  with pytest.raises(UserError, match='image_size'):
    parse('--config.image_size=large')
  model = dict(name='resnet', variant='R50x1')
  file = tmp_path / 'config.json'
  file.write_text(config_lib.to_json(completed(model=model)))
  with pytest.raises(UserError, match="model.depths is 'deep'; give one whole"):
    parse('--config.model.depths=deep', config=f'--config={file}')


@pytest.mark.parametrize('count', [0, 2])
def test_config_is_needed_once(parse, count):
  """No config, or two, is an error that says so."""
  with pytest.raises(UserError, match=f'--config=FILE.py.*{count} times'):
    parse(*[f'--config={parse.file}'] * count, config=None)


def test_no_such_file(parse, monkeypatch):
  """A file that is not there is answered with the nearest that is."""
  monkeypatch.chdir(ROOT)
  with pytest.raises(UserError, match="mean 'configs/quickstart.py'"):
    parse(config='--config=configs/quickstrat.py')


def test_a_file_without_get_config(tmp_path, parse):
  """A Python file that is no config says what it lacks."""
  (tmp_path / 'empty.py').write_text('x = 1\n')
  with pytest.raises(UserError, match='get_config'):
    parse(config=f'--config={tmp_path}/empty.py')


def test_an_argument_that_the_file_does_not_take(tmp_path, parse):
  """An argument to a config without arguments is the user's error."""
  (tmp_path / 'plain.py').write_text('def get_config(): return 1\n')
  with pytest.raises(UserError, match='argument'):
    parse(config=f'--config={tmp_path}/plain.py:depth=3')


# The text of a config file, and what the message must say.
WRONG_FILES = [
  ('def get_config(:\n', ['line 1', 'SyntaxError']),
  (b'\x00\x7fELF\xff', ['SyntaxError', 'null bytes']),
  (b'\xff\xfe', ['SyntaxError', 'utf-8']),
  ('x = 1\ndef get_config():\n  return nme\n', ['line 3', "'nme' is not"]),
  ('import package_that_is_not\n', ['line 1', 'package_that_is_not']),
  ('def get_config(): return int("a")\n', ['line 1', 'ValueError']),
  (
    'import json\ndef get_config(): return json.loads("{")\n',
    ['line 2', 'JSONDecodeError', 'decoder.py, line'],
  ),
  ('def get_config(needed): return 1\n', ["argument: 'needed'"]),
  ('get_config = 3\n', ['defines no get_config()']),
  ('def get_config(): pass\n', ['gives None', 'ConfigDict']),
  ('def get_config(): return 3\n', ['gives 3', 'ConfigDict']),
  ('def get_config(): return {"a.b": 1}\n', ['is no config', 'a.b']),
  ('def get_config(): return {}\n', ['config.total is missing']),
]


@pytest.mark.parametrize('text, words', WRONG_FILES)
def test_config_files_with_mistakes(tmp_path, text, words):
  """One message with the file, the line and Python's own words."""
  file = tmp_path / 'mine.py'
  file.write_bytes(text if isinstance(text, bytes) else text.encode())
  with pytest.raises(UserError) as error:
    loading.load(str(file))
  for word in words:
    assert word in str(error.value)


def test_a_users_error_in_a_config_file_stays_as_it_is(tmp_path):
  """What the file refuses itself is not wrapped."""
  (tmp_path / 'mine.py').write_text(
    'from vit_jax.errors import UserError\n'
    'def get_config(): raise UserError("say which folder")\n'
  )
  with pytest.raises(UserError, match='^say which folder$'):
    loading.load(str(tmp_path / 'mine.py'))


@pytest.mark.parametrize(
  'expression',
  ['values', 'ConfigDict(values)', 'complete(ConfigDict(values))'],
)
def test_what_get_config_may_return(tmp_path, expression):
  """A dict, a ConfigDict, a complete one: the same config."""
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


def test_a_resolved_config(tmp_path, parse):
  """A run's config.json is a config, with its keys as flags."""
  before = completed(image_size=12, average_decay=0.5)
  file = tmp_path / 'config.json'
  file.write_text(config_lib.to_json(before))
  config = parse('--config.model.depth=3', config=f'--config={file}')
  assert config.model.depth == 3
  config.model.depth = before.model.depth
  assert config.to_dict() == before.to_dict()
  assert config.image_size == (12,)
  assert flags.FLAGS.config_path == str(file)


@pytest.mark.parametrize(
  'text, words',
  [
    ('{', ['cannot be read', 'line 1']),
    ('[1]', ['gives [1]']),
    ('{"totl": "1 epochs"}', ["did you mean 'total'"]),
    (b'\xff', ['cannot be read', 'utf-8']),
    (None, ['cannot be read', 'No such file']),
  ],
)
def test_wrong_resolved_configs(tmp_path, text, words):
  """Damaged, absent or foreign: one message."""
  file = tmp_path / 'config.json'
  if text is not None:
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
  with pytest.raises(UserError) as error:
    loading.load(str(file))
  for word in words:
    assert word in str(error.value)


def test_paths_that_are_no_config(tmp_path):
  """A workdir is answered with its config.json, another file with the kinds."""
  (tmp_path / 'config.json').write_text('{}')
  (tmp_path / 'notes.txt').write_text('total = 3')
  with pytest.raises(UserError, match='did you mean .*config.json'):
    loading.load(str(tmp_path))
  with pytest.raises(UserError, match='neither a Python file'):
    loading.load(str(tmp_path / 'notes.txt'))


@pytest.mark.slow
@pytest.mark.parametrize(
  'argument, words',
  [
    ('--config.batch_size=many', 'config.batch_size=many'),
    ('--wrkdir=x', '--workdir'),
    ('--config.model.dpth=3', "mean 'model.depth'"),
  ],
)
def test_exit_code_of_a_users_error(argument, words):
  """A wrong flag ends with code 2, one message and no traceback."""
  done = subprocess.run(
    [
      *(sys.executable, '-m', 'vit_jax.train'),
      *('--config=configs/quickstart.py', argument),
    ],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert done.returncode == 2, done.stderr
  assert 'Traceback' not in done.stderr
  assert words in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
  'flag, meant',
  [
    ('--lr=0.1', 'config.schedule.base_lr'),
    ('--epochs=5', 'config.total'),
    ('--batch_size=64', 'config.batch_size'),
    ('--num_workers=4', 'config.reader.threads'),
    ('--config.optimizer.lr=0.1', 'config.schedule.base_lr'),
    ('--config.schedule.lr=0.1', 'config.schedule.base_lr'),
  ],
)
def test_what_people_write_instead_of_a_key(flag, meant):
  """The message names the key that they mean."""
  out = subprocess.run(
    [
      *(sys.executable, '-m', 'vit_jax.train'),
      '--config=configs/quickstart.py',
      flag,
    ],
    capture_output=True,
    text=True,
    env=os.environ | {'JAX_PLATFORMS': 'cpu'},
  )
  assert out.returncode == 2
  assert f'did you mean --{meant}?' in out.stderr
  assert 'Traceback' not in out.stderr


def test_an_evaluator_is_not_removed_by_a_flag(command_line):
  with pytest.raises(UserError, match=r'evals.test=None.*every=100%'):
    command_line('--config=configs/quickstart.py', '--config.evals.test=None')


def test_of_many_keys_the_nearest_are_shown(command_line):
  """Five of more than a hundred, and those with the same last part."""
  with pytest.raises(UserError) as error:
    command_line('--config=configs/quickstart.py', '--config.optimzer.b1=3')
  shown = str(error.value).partition(': ')[2].split(', ')
  assert len(shown) <= 5 and 'nearest of 1' in str(error.value)
