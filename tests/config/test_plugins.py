"""Tests of names of constructors, and of signatures that define keys."""

import dataclasses
import inspect

import pytest

from vit_jax.config import schema
from vit_jax.config.schema import EVALS, SECTIONS
from vit_jax.errors import UserError, closest
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


def test_a_name_selects_a_module_of_the_package():
  """'vit' selects `Model` of the module `vit_jax.models.vit`."""
  assert schema.resolve(SECTIONS['model'], 'vit') is vit.Model


def test_a_dotted_name_selects_any_module(own_module):
  """The module is looked up on the Python path, with the same symbol."""
  name = own_module('own', 'def Model(): return 7')
  assert schema.resolve(SECTIONS['model'], name)() == 7


@pytest.mark.parametrize(
  'pattern, wrong, right',
  [
    (SECTIONS['model'], 'vti', 'vit'),
    (SECTIONS['source'], 'syntetic', 'synthetic'),
    (SECTIONS['optimizer'], 'adamm', 'adam'),
    (SECTIONS['objective'], 'superwised', 'supervised'),
    (EVALS, 'clasification', 'classification'),
  ],
)
def test_a_mistyped_name_gets_a_suggestion(pattern, wrong, right):
  with pytest.raises(UserError, match=f'did you mean {right!r}'):
    schema.resolve(pattern, wrong)


@pytest.mark.parametrize(
  'pattern', [SECTIONS['model'], SECTIONS['objective'], EVALS]
)
def test_contracts_are_not_names(pattern):
  """The module `contract` of a package defines the symbol as a Protocol."""
  assert 'contract' not in schema.names(pattern)


def test_only_modules_with_the_symbol_are_suggested():
  """For example, `layers` and `posemb` are not models."""
  with pytest.raises(UserError) as error:
    schema.resolve(SECTIONS['model'], 'nothing')
  allowed = str(error.value).split('allowed: ')[1].split(';')[0].split(', ')
  assert 'vit' in allowed
  assert 'layers' not in allowed and 'posemb' not in allowed


def test_a_missing_package_is_named_in_the_message(own_module):
  """The message says which package a plug-in needs."""
  name = own_module('needy', 'import package_that_is_not')
  with pytest.raises(UserError, match='pip install package_that_is_not'):
    schema.resolve(SECTIONS['model'], name)


def test_a_module_that_does_not_exist_is_refused():
  """The message says where modules are searched for."""
  with pytest.raises(UserError, match='no module my_lab.model .*PYTHONPATH'):
    schema.resolve(SECTIONS['model'], 'my_lab.model')


def test_a_module_without_the_symbol_is_refused(own_module):
  name = own_module('symbolless', 'x = 1')
  with pytest.raises(UserError, match=f'{name}.* Model'):
    schema.resolve(SECTIONS['model'], name)


def test_a_bug_in_a_plug_in_keeps_its_traceback(own_module):
  """An AttributeError during the import is not reported as a missing symbol."""
  name = own_module('buggy', 'import math; math.no_such_function')
  with pytest.raises(AttributeError, match='no_such_function'):
    schema.resolve(SECTIONS['model'], name)


def test_keys_are_keyword_only_parameters():
  """Positional parameters are passed at run time and are not keys."""

  def constructor(runtime, /, other, *, a: int = 1, b: str | None = None):
    del runtime, other, a, b

  keys = schema.config_keys(constructor)
  assert list(keys) == ['a', 'b']
  assert (keys['a'].default, keys['a'].annotation) == (1, int)
  assert keys['b'].default is None


def test_keyword_only_fields_are_keys():
  """Other fields of a dataclass are not."""

  @dataclasses.dataclass(frozen=True)
  class Thing:
    runtime: int
    rate: float = dataclasses.field(default=0.5, kw_only=True)
    needed: int = dataclasses.field(kw_only=True)

  keys = schema.config_keys(Thing)
  assert set(keys) == {'rate', 'needed'}
  assert keys['rate'].default == 0.5
  assert keys['needed'].default is inspect.Parameter.empty


def test_closest_suggests_and_lists():
  """The nearest name comes first, then all allowed names."""
  text = closest('depht', ['width', 'depth'])
  assert text == "did you mean 'depth'? allowed: depth, width"
  assert closest('xyz', ['width']) == 'allowed: width'
  assert closest('xyz', []) == 'allowed: nothing'


def test_build_converts_lists_to_tuples():
  """Sections of a checkpoint come from JSON, where tuples are lists."""

  def make(*, depths: tuple[int, ...], rules: tuple = ()):
    return depths, rules

  section = {'depths': [1, 1], 'rules': [['head/.*', {'lr': 2.0}]]}
  assert schema.construct(make, section) == (
    (1, 1),
    (('head/.*', {'lr': 2.0}),),
  )
