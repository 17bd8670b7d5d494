"""Tests of names of constructors, and of signatures that define keys."""

import dataclasses
import inspect

import pytest

from vit_jax.config import schema
from vit_jax.config.schema import SECTIONS
from vit_jax.errors import UserError
from vit_jax.models import vit


@pytest.fixture
def own_module(tmp_path, monkeypatch):
  """Returns a function that puts a module on the Python path."""

  def make(name, text):
    (tmp_path / f'{name}_package').mkdir()
    (tmp_path / f'{name}_package' / '__init__.py').touch()
    (tmp_path / f'{name}_package' / 'module.py').write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return f'{name}_package.module'

  return make


def test_a_name_selects_a_module(own_module):
  """It is one of the package, or any on the Python path, by its dotted name."""
  assert schema.resolve(SECTIONS['model'], 'vit') is vit.Model
  name = own_module('own', 'def Model(): return 7')
  assert schema.resolve(SECTIONS['model'], name)() == 7


def test_only_modules_with_the_symbol_are_suggested():
  """A contract defines the symbol as a Protocol; `layers` is not a model."""
  with pytest.raises(UserError, match="did you mean 'vit'") as error:
    schema.resolve(SECTIONS['model'], 'vti')
  allowed = str(error.value).split('allowed: ')[1].split(';')[0].split(', ')
  assert 'vit' in allowed and not {'layers', 'contract'} & set(allowed)


def test_messages_of_modules_that_cannot_be_used(own_module):
  """Other names are only listed if no package is missing."""
  needy = own_module('needy', 'import package_that_is_not')
  empty = own_module('empty', 'x = 1')
  for name, message in (
    (needy, 'pip install package_that_is_not'),
    ('my_lab.model', 'no module my_lab.model .*PYTHONPATH'),
    (empty, f'{empty}.* Model'),
  ):
    with pytest.raises(UserError, match=message) as error:
      schema.resolve(SECTIONS['model'], name)
    assert ('allowed' in str(error.value)) == (name != needy)


def test_a_bug_in_a_plug_in_keeps_its_traceback(own_module):
  """An AttributeError during the import is not reported as a missing symbol."""
  name = own_module('buggy', 'import math; math.no_such_function')
  with pytest.raises(AttributeError, match='no_such_function'):
    schema.resolve(SECTIONS['model'], name)


def test_keys_are_keyword_only_parameters():
  """Positional parameters and other fields are passed at run time."""

  def constructor(runtime, /, other, *, a: int = 1, b: str | None = None):
    del runtime, other, a, b

  @dataclasses.dataclass(frozen=True)
  class Thing:
    runtime: int
    rate: float = dataclasses.field(default=0.5, kw_only=True)
    needed: int = dataclasses.field(kw_only=True)

  keys = schema.config_keys(constructor)
  assert list(keys) == ['a', 'b']
  assert (keys['a'].default, keys['a'].annotation) == (1, int)
  keys = schema.config_keys(Thing)
  assert set(keys) == {'rate', 'needed'}
  assert keys['needed'].default is inspect.Parameter.empty


def test_build_converts_lists_to_tuples():
  """Sections of a checkpoint come from JSON, where tuples are lists."""

  def make(*, depths: tuple[int, ...], rules: tuple = ()):
    return depths, rules

  section = {'depths': [1, 1], 'rules': [['head/.*', {'lr': 2.0}]]}
  assert schema.construct(make, section) == (
    (1, 1),
    (('head/.*', {'lr': 2.0}),),
  )
