"""Tests of completion, checks and identity of configs."""

import json
import os

import pytest
from minimal_config import completed, minimal, sections
from ml_collections import ConfigDict

from vit_jax.config import completion, identity, loading, predicted, schema
from vit_jax.config.completion import complete, parse_arg


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


RESNET = dict(name='resnet', width_factor=1)


def test_an_optional_tuple_accepts_lists():
  """A key of type tuple or None takes tuples, and lists from JSON."""
  for depths in ((1, 2), [1, 2]):
    config = completed(model=RESNET | dict(depths=depths))
    assert config.model.depths == (1, 2)
  assert completed(model=RESNET | dict(variant='R50x1')).model.depths is None


LAB = 'tests.plugins.lab_nested'
HEADS = {'a': {'name': LAB, 'outputs': 3}, 'b': {'name': LAB, 'outputs': 5}}


def nested(**stem):
  """Returns a config whose model has two heads, and a stem with these keys."""
  stem = {'stem': {'name': LAB} | stem} if stem else {}
  return completed(model={'name': LAB, 'heads': HEADS} | stem)


def test_nested_sections_are_completed_and_built():
  """Each `name` selects the constructor with the defaults."""
  config = nested(kernel_size=7)
  head = {'name': LAB, 'outputs': 3, 'shown': False, 'weight': 1.0}
  assert config.model.to_dict() == {
    'name': LAB,
    'width': 8,
    'stem': {'name': LAB, 'kernel_size': 7, 'bias': True},
    'heads': {'a': head, 'b': head | {'outputs': 5}},
  }
  built = schema.build_section(config, 'model', 4)
  assert (built.stem.width, built.stem.kernel_size) == (8, 7)
  assert [head.outputs for head in built.heads.values()] == [3, 5]
  assert built.weights == {'a': 1.0, 'b': 1.0}
  assert schema.build_section(nested(), 'model', 4).stem is None


def test_a_default_in_a_nested_section_keeps_predicted_costs():
  """A new key with a default does not change the hash; another value does."""
  older = nested(kernel_size=3)
  with older.unlocked():
    del older.model.stem['bias']
  hashes = [
    predicted.fingerprint(config)
    for config in (older, nested(bias=False), nested(kernel_size=5), nested())
  ]
  assert hashes[0] == predicted.fingerprint(nested(kernel_size=3))
  assert len({*hashes}) == 4


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
  keys = set(identity.identity(config))
  assert set(operational.split()) <= set(completion.flatten(config))
  assert not set(operational.split()) & keys
  assert set(ours.split()) <= keys
  # Each nested constructor marks its own operational keys.
  keys = {k for k in identity.identity(nested()) if 'heads.a.' in k}
  assert keys == {f'model.heads.a.{k}' for k in ('name', 'outputs', 'weight')}


def test_identity_of_rules_is_the_same_after_json():
  """A run with `optimizer.rules` can be resumed from its config.json."""
  rules = (('cls', dict(frozen=True)), ('head/.*', dict(lr=2.0)))
  config = completed(**{'optimizer.rules': rules})
  read = identity.identity(json.loads(completion.to_json(config)))
  assert identity.identity(config) == read
  other = completed(**{'optimizer.rules': (*rules[:1], ('.*', dict(lr=2.0)))})
  assert identity.identity(other) != read


@pytest.mark.parametrize(
  'given, stored',
  [
    ('photos/{a,b}-*.tar', '/lab/project/photos/{a,b}-*.tar'),
    ('../photos', '/lab/photos'),
    ('/data/photos', '/data/photos'),
    ('~/photos', '~/photos'),
    ('gs://bucket/photos', 'gs://bucket/photos'),
  ],
)
def test_paths_of_data_are_stored_as_absolute_paths(monkeypatch, given, stored):
  monkeypatch.setattr(os, 'getcwd', lambda: '/lab/project')
  config = completed(source=dict(name='tar', path=given))
  assert identity.absolute(config).source.path == stored
  assert config.source.path == given  # unchanged


def test_paths_in_all_sections_of_data_are_absolute(monkeypatch):
  """Members, evaluators' data and lists; other keys are not paths."""
  monkeypatch.setattr(os, 'getcwd', lambda: '/lab/project')
  folder = dict(name='folder', path='photos', class_map='lists/names.txt')
  tfds = dict(name='tfds', dataset='cifar10', data_dir='tfds')
  members = {'a': folder | {'weight': 1.0}, 'b': tfds | {'weight': 1.0}}
  config = completed(
    source=dict(name='mixture', members=members),
    evals=dict(
      knn=dict(name='neighbours', split='test', source=folder),
      draw=dict(name='figures', split='test'),
    ),
    **{'train.leave_out': 'same.jsonl'},
  )
  found, expected = identity.absolute(config), completion.flatten(config)
  expected |= {
    'source.members.a.path': '/lab/project/photos',
    'source.members.a.class_map': '/lab/project/lists/names.txt',
    'source.members.b.data_dir': '/lab/project/tfds',
    'evals.knn.source.path': '/lab/project/photos',
    'evals.knn.source.class_map': '/lab/project/lists/names.txt',
    'train.leave_out': '/lab/project/same.jsonl',
  }
  assert completion.flatten(found) == expected


def test_a_tokenizer_has_an_absolute_path_that_may_change(monkeypatch):
  """Also that of an evaluator; it does not belong to a run's identity."""
  monkeypatch.setattr(os, 'getcwd', lambda: '/lab/project')
  config = loading.load('configs/lit.py:data=coco')
  found = identity.absolute(config)
  for section in (found.augment, found.evals.retrieval.preprocess):
    assert section.tokenizer == '/lab/project/sentencepiece.model'
  assert identity.identity(found) == identity.identity(config)
