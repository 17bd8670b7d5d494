"""Tests of completion, checks and identity of configs."""

import json

import pytest
from minimal_config import completed, minimal, sections
from ml_collections import ConfigDict

from vit_jax.config import completion, schema
from vit_jax.config.completion import complete, parse_arg
from vit_jax.config.identity import identity
from vit_jax.errors import UserError


def test_complete_adds_every_key_with_its_default():
  """A section has exactly the keys of its constructor's signature."""
  given = minimal()
  config = complete(ConfigDict(given))
  for section, keys in sections(config):
    assert set(section) - {'name'} == set(keys)
  adam = schema.config_keys(schema.resolve('vit_jax.optim.optimizers:adam'))
  assert config.optimizer.b2 == adam['b2'].default
  assert config.mesh.data == -1
  assert config.seed == 0
  assert config.model.width == given['model']['width']


def test_complete_is_idempotent():
  """Writing config.json and reading it does not change a config, either."""
  config = completed()
  again = complete(ConfigDict(config.to_dict()))
  assert again.to_dict() == config.to_dict()
  read = completion.from_dict(json.loads(completion.to_json(config)))
  assert read.to_dict() == config.to_dict()


@pytest.mark.parametrize(
  'key, value, expected',
  [
    ('image_size', 384, (384,)),
    ('image_size', [384, 256], (384, 256)),
    ('schedule.base_lr', 1, 1.0),
    ('average_decay', 0, 0.0),
  ],
)
def test_values_of_related_types_are_converted(key, value, expected):
  """A number to a tuple, an int to a float, and a list to a tuple."""
  result = completion.flatten(completed(**{key: value}))[key]
  expected = list(expected) if isinstance(expected, tuple) else expected
  assert result == expected and type(result) is type(expected)


@pytest.mark.parametrize(
  'key, value, words',
  [
    ('batchsize', 8, ['config.batchsize', "mean 'batch_size'"]),
    ('optimizer.momentum', 0.9, ['config.optimizer.momentum', 'b1, b2']),
    ('total', ..., ['config.total', 'missing']),
    ('train', ..., ['config.train.split', 'missing']),
    ('model.name', ..., ['config.model', 'name']),
    ('batch_size', 8.0, ['config.batch_size', '8.0', 'int']),
    ('model.dropout', 'a', ['config.model.dropout', "'a'", 'float']),
    ('augment.flip', 1, ['config.augment.flip', '1', 'bool']),
    ('model', 'vit', ['config.model']),
    ('image_size', (8.5, 8), ['config.image_size']),
  ],
)
def test_messages_of_wrong_keys_and_values(key, value, words):
  """The message names the key and what is allowed."""
  with pytest.raises(UserError) as error:
    completed(**{key: value})
  for word in words:
    assert word in str(error.value)


RESNET = dict(name='resnet', width_factor=1)


def test_an_optional_tuple_accepts_lists():
  """A key of type tuple or None takes tuples, and lists from JSON."""
  for depths in ((1, 2), [1, 2]):
    config = completed(model=RESNET | dict(depths=depths))
    assert config.model.depths == (1, 2)
  assert completed(model=RESNET | dict(variant='R50x1')).model.depths is None
  with pytest.raises(UserError, match=r"model.depths is \(1, 'x'\); .* of int"):
    completed(model=RESNET | dict(depths=(1, 'x')))


def test_parse_arg_uses_the_types_of_the_defaults():
  args = parse_arg(
    'variant=L/16,epochs=30,lr=1e-3', variant='', epochs=7, lr=0.1
  )
  assert vars(args) == dict(variant='L/16', epochs=30, lr=1e-3)
  assert vars(parse_arg(None, depth=2)) == dict(depth=2)
  assert vars(parse_arg('depth=3', depth=2, width=4)) == dict(depth=3, width=4)
  assert parse_arg('flip=false', flip=True).flip is False


def test_parse_arg_keeps_commas_in_values():
  """A comma that is not followed by a key belongs to the value."""
  for arg, path in (
    ('path=a,b', 'a,b'),
    ('path=a,b,depth=3', 'a,b'),
    ('depth=3,path=/x, y/a=b,c', '/x, y/a=b,c'),
    ('path=a,depth=3,', 'a'),
  ):
    assert vars(parse_arg(arg, path='', depth=3)) == dict(path=path, depth=3)
  for arg in ('path=a,depth', 'path=a,depth,b', 'path=a,dpeth=3'):
    with pytest.raises(UserError, match='key=value'):
      parse_arg(arg, path='', depth=3)


@pytest.mark.parametrize(
  'arg, words',
  [
    ('dpeth=3', ["'dpeth=3'", "mean 'depth'"]),
    ('depth=deep', ["depth is 'deep'", 'int']),
  ],
)
def test_messages_of_parse_arg(arg, words):
  """The message names the wrong argument, and the nearest key or the type."""
  with pytest.raises(UserError) as error:
    parse_arg(arg, depth=2)
  for word in words:
    assert word in str(error.value)


def test_identity_leaves_out_operational_keys():
  """Keys that do not change the result are not part of a run's identity."""
  operational = (
    'mesh.fsdp reader.threads checkpoint.keep checkpoint.every log.every '
    'evals.test.every model.remat model.unroll source.data_dir '
    'recovery.watchdog_eval_s'
  )
  ours = (
    'seed total batch_size image_size num_classes average_decay init_from '
    'model.depth model.dropout model.dtype optimizer.b1 schedule.base_lr '
    'source.dataset augment.flip preprocess.resize train.split objective.name'
  )
  config = completed()
  keys = set(identity(config))
  assert set(operational.split()) <= set(completion.flatten(config))
  assert not set(operational.split()) & keys
  assert set(ours.split()) <= keys


def test_identity_of_rules_is_the_same_after_json():
  """A run with `optimizer.rules` can be resumed from its config.json."""
  rules = (('cls', dict(frozen=True)), ('head/.*', dict(lr=2.0)))
  config = completed(**{'optimizer.rules': rules})
  read = identity(json.loads(completion.to_json(config)))
  assert identity(config) == read
  other = completed(**{'optimizer.rules': (*rules[:1], ('.*', dict(lr=2.0)))})
  assert identity(other) != read
