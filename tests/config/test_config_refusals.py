"""Tests of the messages about wrong keys, values, flags and config files."""

import re

import pytest
from minimal_config import completed

from vit_jax.config import loading, overrides
from vit_jax.config.completion import parse_arg
from vit_jax.errors import UserError

LAB = 'tests.plugins.lab_nested'
STEM = {'name': LAB}
HEADS = {'b': {'name': LAB, 'outputs': 5}}


def lab(**changes):
  """Returns the section of a model with a nested stem and heads."""
  return {'model': {'name': LAB, 'stem': STEM, 'heads': HEADS} | changes}


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'batchsize': 8}, "config.batchsize .*mean 'batch_size'"),
    ({'optimizer.momentum': 0.9}, 'config.optimizer.momentum .*b1, b2'),
    ({'total': ...}, 'config.total is missing'),
    ({'train': ...}, 'config.train.split is missing'),
    ({'model.name': ...}, 'config.model.name is missing'),
    ({'batch_size': 8.0}, 'config.batch_size is 8.0.* int'),
    ({'model.dropout': 'a'}, "config.model.dropout is 'a'.* float"),
    ({'augment.flip': 1}, 'config.augment.flip is 1.* bool'),
    ({'model': 'vit'}, "config.model is 'vit'"),
    ({'image_size': (8.5, 8)}, 'config.image_size'),
    (
      {'model': dict(name='resnet', width_factor=1, depths=(1, 'x'))},
      r"model.depths is \(1, 'x'\); .* of int",
    ),
    (lab(stem=STEM | {'bias': 1}), 'model.stem.bias is 1.* bool'),
    (lab(stem={'name': 'lab_nestd'}), "'lab_nestd'.* Stem"),
    (lab(heads={'c': STEM}), 'model.heads.c.outputs is missing'),
    (lab(heads={'c': 3}), 'model.heads.c is 3'),
    (lab(heads=[1]), r'model.heads is \[1\]'),
  ],
)
def test_wrong_values_of_a_config_file(changes, message):
  """The message contains the whole path of the key, and what is allowed."""
  with pytest.raises(UserError, match=message):
    completed(**changes)


MULTICROP = {'augment': {'name': 'multicrop'}}
HYBRID = {'model': dict(name='vit', variant='R50+B/16')}


@pytest.mark.parametrize(
  'changes, flags, message',
  [
    ({}, 'model.dpth=2', "config.model.dpth .*mean 'depth'"),
    ({}, 'modle.depth=2', "config.modle.depth .*mean 'model.depth'"),
    ({}, 'evals.tset.split=x', "mean 'test'"),
    # The evaluators of the config are listed, not similar keys.
    ({}, 'evals.fewshot.a.b=5', 'evals.fewshot is not.* allowed: test.'),
    ({}, 'reader.name=x', 'allowed: max_bad_share, on_bad'),
    ({}, 'source.height=4', 'source.height .*dataset'),  # of another source
    ({}, 'model=vit', r"config.model is 'vit'.*--config\.model\."),
    ({}, 'evals.test.name=clasification', "mean 'classification'"),
    ({}, 'evals.knn.split=x', 'config.evals.knn'),
    ({}, 'model.more.name=x', 'config.model.more'),
    ({}, 'more.name=x', 'config.more'),
    (MULTICROP, 'augment.local_size=8.5', 'tuple of int'),
    (MULTICROP, 'augment.local_size={[]:1}', 'tuple of int'),
    (MULTICROP, "augment.blur=(0.3,'0',0)", 'tuple of float'),
    ({}, 'optimizer.clip_joined=fc1', 'tuple of str'),
    (lab(), 'model.stem.bia=1', "model.stem.bia .*mean 'bias'"),
    (lab(), 'model.heads.c.weight=1', 'heads.c.weight is not a key'),
    (lab(), 'model.heads=5', 'is a section'),
    (lab(stem=None), 'model.stem=conv', 'is a section.*stem.name='),
    # The messages do not list all keys of the config.
    (HYBRID, 'model.stem.name=resnet', 'model.stem.depths is missing'),
    (HYBRID, 'model.stem.depths=1', 'model.stem.name is missing'),
    (
      HYBRID,
      'model.stem.name=resnet model.stem.depths=many',
      "stem.depths is 'many'; ",
    ),
  ],
)
def test_wrong_flags_of_keys(parse, changes, flags, message):
  """The message contains the key, and the nearest key or what is allowed."""
  with pytest.raises(UserError, match=message):
    parse(
      *(f'--config.{flag}' for flag in flags.split()),
      base=completed(**changes),
    )


def test_other_wrong_flags(parse, command_line):
  """At most five of many keys are suggested."""
  with pytest.raises(UserError, match='mean --config_path'):
    parse('--confg_path=x')
  with pytest.raises(UserError, match='nearest of 1') as error:
    command_line('--config=configs/quickstart.py', '--config.optimzer.b1=3')
  assert len(str(error.value).partition(': ')[2].split(', ')) <= 5
  with pytest.raises(UserError, match='config.source.more is not a key'):
    flags = ['--config.source.more.name=x']
    overrides.apply({'source': {'name': 'tar'}}, flags)


@pytest.mark.parametrize('name', ['./vit', '.vit'])
def test_names_do_not_begin_with_a_dot(parse, name):
  with pytest.raises(UserError, match=f'the name .{name}. cannot be used'):
    parse(f'--config.model.name={name}')


@pytest.mark.parametrize('key', ['evals', 'log.trackers', 'model'])
def test_the_advice_for_a_section_is_a_flag(parse, key):
  with pytest.raises(UserError, match='is a section') as error:
    parse(f'--config.{key}=3')
  advice = re.findall(r'--config\.[\w.]+=', str(error.value))[0]
  with pytest.raises(UserError, match='the name .no_such. cannot be used'):
    parse(f'{advice}no_such')


@pytest.mark.parametrize(
  'argument, message',
  [
    ('dpeth=3', "'dpeth=3'.*mean 'depth'"),
    ('depth=deep', "depth is 'deep'.*int"),
    ('depth=4', 'depth=4 here; allowed: 2, 3'),
    ('path=a,depth', 'key=value'),
    ('path=a,depth,b', 'key=value'),
    ('path=a,dpeth=3', 'key=value'),
  ],
)
def test_wrong_arguments_of_a_config_file(argument, message):
  with pytest.raises(UserError, match=message):
    parse_arg(argument, {'depth': (2, 3)}, path='', depth=2)


@pytest.mark.parametrize(
  'name, text, message',
  [
    ('a.py', 'def get_config(:\n', 'line 1.*SyntaxError'),
    ('a.py', b'\xff\xfe', 'SyntaxError.*utf-8'),
    ('a.py', 'x = 1\ndef get_config():\n  return nme\n', "line 3.*'nme' is"),
    (
      'a.py',
      'import json\ndef get_config(): return json.loads("{")\n',
      'line 2.*JSONDecodeError',
    ),
    ('a.py', 'def get_config(needed): return 1\n', "argument: 'needed'"),
    ('a.py', 'x = 1\n', r'get_config\(\)'),
    ('a.py', 'def get_config(): pass\n', 'None.*ConfigDict'),
    ('a.py', 'def get_config(): return {"a.b": 1}\n', 'not a config.*a.b'),
    ('a.py', 'def get_config(): return {}\n', 'config.total is missing'),
    (
      'a.py',
      'from vit_jax.errors import UserError\n'
      'def get_config(): raise UserError("say which folder")\n',
      '^say which folder',
    ),
    ('a.py:depth=3', 'def get_config(): return 1\n', 'takes no argument'),
    ('', None, 'no config file'),
    ('a.txt', 'total = 3', 'FILE.py'),
    ('config.json', '{', 'cannot be read.*line 1'),
    ('config.json', '[1]', r'\[1\]'),
    ('config.json', '{"totl": "1 epochs"}', "did you mean 'total'"),
    ('config.json', b'\xff', 'cannot be read.*utf-8'),
    ('config.json', None, 'cannot be read.*No such file'),
  ],
)
def test_wrong_config_files(tmp_path, name, text, message):
  """The message contains the file, the line and Python's own message."""
  if text is not None:
    content = text if isinstance(text, bytes) else text.encode()
    (tmp_path / name.partition(':')[0]).write_bytes(content)
  with pytest.raises(UserError, match=message):
    loading.load(f'{tmp_path}/{name}')
