"""Names in a config become constructors; nothing is registered anywhere.

`'vit_jax.models.{name}:Model'` with the name `vit` is the symbol `Model` of the
module `vit_jax.models.vit`. A name with a dot is a module of your own, anywhere
on the Python path, with the same symbol in it.

A constructor's keyword-only parameters are the keys of its config section; its
positional parameters are what the caller provides at run time. Those keys that
do not change what is computed are marked there too (`operational`).
"""

import dataclasses
import importlib
import inspect
import pkgutil
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ml_collections import ConfigDict

from vit_jax.errors import UserError, closest

T = TypeVar('T')
# Symbols that a config still names by the place where they were once.
MOVED = {
  'vit_jax.evaluators.figures:Evaluator': 'vit_jax.training.figures:Figures'
}


@dataclasses.dataclass(frozen=True)
class Nested:
  """Marks a key whose value is a section.

  `stem: Annotated[Section | None, Nested('vit_jax.models.stems.{name}:Stem')]`
  is completed, checked and overridable by flags like any other section. The
  constructor gets the completed values and builds what they describe, with
  `build(mark.constructor(values['name']), values, …)`.

  Attributes:
    pattern: pattern of the constructors that the section's `name` chooses from.
    many: whether the value is {name of your choice: section}.
    beside: function whose keyword-only parameters are further keys of the
      section.
  """

  pattern: str
  many: bool = False
  beside: Callable[..., None] | None = None

  def constructor(self, name: str) -> Callable[..., Any]:
    """Returns the constructor of a section of that name; see `resolve`."""
    return resolve(self.pattern, name)

  def keys(self, name: str) -> dict[str, inspect.Parameter]:
    """Returns the keys of a section of that name.

    Raises:
      UserError: the constructor does not exist.
    """
    beside = keys(self.beside) if self.beside else {}
    return keys(self.constructor(name)) | beside


Section = Mapping[str, Any]


def resolve(pattern: str, name: str = '') -> Callable[..., Any]:
  """Finds the constructor that a pattern and a name stand for.

  Raises:
    UserError: no such module or symbol; lists the names there are.
  """
  module_name, symbol = pattern.split(':')
  if '.' in name:
    module_name = name
  place = f'{module_name}:{symbol}'.format(name=name)
  path, symbol = MOVED.get(place, place).split(':')
  try:
    module = importlib.import_module(path)
    if hasattr(module, symbol):
      return getattr(module, symbol)
  except ModuleNotFoundError as error:
    if not f'{path}.'.startswith(f'{error.name}.'):
      raise UserError(
        f'{path} needs the package {error.name!r}, which is not '
        f'installed: pip install {error.name}.'
      ) from error
  raise UserError(
    f'{name!r} stands for {symbol} of the module {path}, and there is none; '
    f'{closest(name, names(pattern))}; or give the dotted path of a module '
    f'of your own that defines {symbol}.'
  )


def names(pattern: str) -> list[str]:
  """Returns the names that a pattern allows within this package."""
  module_pattern, symbol = pattern.split(':')
  if '{name}' not in module_pattern:
    module = importlib.import_module(module_pattern)
    return [
      name
      for name, value in vars(module).items()
      if inspect.isfunction(value)
      and value.__module__ == module_pattern
      and not name.startswith('_')
      and keys(value)
    ]
  package = importlib.import_module(module_pattern.removesuffix('.{name}'))
  found = []
  for info in pkgutil.iter_modules(package.__path__, package.__name__ + '.'):
    if info.name.endswith('.contract'):  # describes the symbol, is none
      continue
    try:
      defines = hasattr(importlib.import_module(info.name), symbol)
    except ImportError:  # an optional package is absent
      defines = True
    found += [info.name.rpartition('.')[2]] if defines else []
  moved = (place for place in MOVED if place.startswith(package.__name__ + '.'))
  return found + [place.partition(':')[0].rpartition('.')[2] for place in moved]


def keys(constructor: Callable[..., Any]) -> dict[str, inspect.Parameter]:
  """Returns the config keys of a constructor: its keyword-only parameters."""
  hints = typing.get_type_hints(
    constructor.__init__ if inspect.isclass(constructor) else constructor,
    include_extras=True,
  )
  return {
    name: parameter.replace(annotation=hints.get(name, str))
    for name, parameter in inspect.signature(constructor).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
  }


def operational(*names: str) -> Callable[[T], T]:
  """Marks keys of a constructor that do not change what is computed.

  A resumed run may change them.
  """

  def mark(constructor: T) -> T:
    marked: Any = constructor
    marked.OPERATIONAL = names
    return constructor

  return mark


def keyed_by(config: type) -> Callable[[T], T]:
  """Makes the fields of a keyword-only dataclass the keys of a constructor.

  The constructor has `**keys`, which it passes to the dataclass. Its signature
  lists the fields in addition to parameters of its own, so they are documented
  and validated in one place. A parameter with the name of a field replaces it,
  for example with another default. The constructor has the operational keys of
  the dataclass.
  """

  def mark(constructor: T) -> T:
    marked: Any = constructor
    own = {
      name: parameter
      for name, parameter in inspect.signature(marked).parameters.items()
      if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
    fields = [each for name, each in keys(config).items() if name not in own]
    marked.__signature__ = inspect.Signature([*own.values(), *fields])
    marked.__annotations__ |= {x.name: x.annotation for x in fields}
    marked.OPERATIONAL = operational_keys(config)
    return constructor

  return mark


def operational_keys(constructor: Callable[..., Any]) -> tuple[str, ...]:
  """Returns the names that `operational` (or OPERATIONAL) marks."""
  return tuple(getattr(constructor, 'OPERATIONAL', ()))


def nested(annotation: Any) -> Nested | None:
  """Returns the mark of a key that is a section.

  The result is None if it is not a section.
  """
  if typing.get_origin(annotation) is not typing.Annotated:
    return None
  marks = typing.get_args(annotation)[1:]
  return next((mark for mark in marks if isinstance(mark, Nested)), None)


def value_type(annotation: Any) -> tuple[type, bool]:
  """Splits an annotation into (plain type, whether None is allowed)."""
  plain, optional = _plain(annotation)
  return typing.get_origin(plain) or plain, optional


def member_type(annotation: Any) -> type:
  """Returns the type of the members of a tuple.

  It is `object` if the annotation does not specify it.
  """
  return next(iter(typing.get_args(_plain(annotation)[0])), object)


def _plain(annotation: Any) -> tuple[Any, bool]:
  """Returns the annotation without marks and None.

  The second result is whether it allowed None.
  """
  if typing.get_origin(annotation) is typing.Annotated:
    annotation = typing.get_args(annotation)[0]
  if typing.get_origin(annotation) in (types.UnionType, typing.Union):
    members = typing.get_args(annotation)
    plain = next(m for m in members if m is not types.NoneType)
    return _plain(plain)[0], types.NoneType in members
  return annotation, False


def build(constructor: Callable[..., Any], section: Any, *runtime: Any) -> Any:
  """Calls a constructor with a section's keys and the run-time arguments.

  Args:
    constructor: from `resolve`.
    section: a config section or a dict; keys of others (`name`) are left out,
      and sections within it are handed on as dicts. One that was read from
      JSON has lists where it had tuples: they become tuples again.
    *runtime: positional arguments.
  """
  allowed = keys(constructor)
  values = {key: section[key] for key in section if key in allowed}
  return constructor(
    *runtime, **{key: _plain_value(value) for key, value in values.items()}
  )


def _plain_value(value: Any) -> Any:
  if isinstance(value, ConfigDict):
    return value.to_dict()
  if isinstance(value, list | tuple):
    return tuple(_plain_value(each) for each in value)
  return value
