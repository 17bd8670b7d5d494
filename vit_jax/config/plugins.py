"""Finds the constructors that names in a config select, without a registry.

With the name `vit`, the pattern `'vit_jax.models.{name}:Model'` selects the
symbol `Model` of the module `vit_jax.models.vit`. A name with a dot is the path
of a module of your own, which must define the same symbol.

The keyword-only parameters of a constructor are the keys of its config section.
Its positional parameters are passed at run time. `operational` marks the keys
that do not affect the trained weights.
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
# Old path of a symbol, which configs still use, and its present path.
MOVED = {
  'vit_jax.evaluators.figures:Evaluator': 'vit_jax.training.figures:Figures',
  'vit_jax.models.axial_vit:Model': 'examples.axial_vit:Model',
  'vit_jax.models.axial_resnet:Model': 'examples.axial_resnet:Model',
}


@dataclasses.dataclass(frozen=True)
class Nested:
  """Mark of a key whose value is a section.

  The key `stem: Annotated[Section | None,
  Nested('vit_jax.models.{name}:Stem')]` is completed, checked and
  overridden by flags like any other section. The constructor receives the
  completed values, and builds the object that they describe with
  `build(mark.constructor(values['name']), values, …)`.

  Attributes:
    pattern: 'MODULE:SYMBOL' of the constructor, see `resolve`; it may contain
      '{name}', which stands for the section's `name`.
    many: whether the value is {name of your choice: section}.
    beside: function whose keyword-only parameters are additional keys of the
      section.
  """

  pattern: str
  many: bool = False
  beside: Callable[..., None] | None = None

  def constructor(self, name: str) -> Callable[..., Any]:
    """Returns the constructor of a section with a given `name`."""
    return resolve(self.pattern, name)

  def keys(self, name: str) -> dict[str, inspect.Parameter]:
    """Returns the keys of a section with a given `name`.

    Raises:
      UserError: the constructor does not exist.
    """
    additional = keys(self.beside) if self.beside else {}
    return keys(self.constructor(name)) | additional


Section = Mapping[str, Any]


def resolve(pattern: str, name: str = '') -> Callable[..., Any]:
  """Returns the constructor that a name selects from a pattern.

  Args:
    pattern: 'MODULE:SYMBOL', which may contain '{name}'.
    name: name in this package, or the dotted path of another module.

  Raises:
    UserError: the module or symbol does not exist, or the module needs a
      package that is not installed.
  """
  module_name, symbol = pattern.split(':')
  if '.' in name:
    module_name = name
  target = f'{module_name}:{symbol}'.format(name=name)
  path, symbol = MOVED.get(target, target).split(':')
  reason = f'the module {path} does not define {symbol}'
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
    if '.' in name:
      reason = (
        f'there is no module {path} in the current directory or in PYTHONPATH'
      )
  raise UserError(
    f'the name {name!r} is unknown, because {reason}; '
    f'{closest(name, names(pattern))}; or give the dotted path of a module of '
    f'your own that defines {symbol}.'
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
    if info.name.endswith('.contract'):  # its symbol is the Protocol
      continue
    try:
      defines = hasattr(importlib.import_module(info.name), symbol)
    except ImportError:  # an optional package is absent
      defines = True
    found += [info.name.rpartition('.')[2]] if defines else []
  moved = (path for path in MOVED if path.startswith(package.__name__ + '.'))
  return found + [path.partition(':')[0].rpartition('.')[2] for path in moved]


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
  """Marks keys of a constructor that a resumed run may change.

  They must not affect the trained weights.
  """

  def mark(constructor: T) -> T:
    marked: Any = constructor
    marked.OPERATIONAL = names
    return constructor

  return mark


def keyed_by(config: type) -> Callable[[T], T]:
  """Makes the fields of a keyword-only dataclass the keys of a constructor.

  The constructor must have a parameter `**keys`, which it passes to the
  dataclass. The fields are added to its signature, so they are documented and
  validated only in the dataclass. A parameter of the constructor with the name
  of a field replaces the field, for example to change its default. The
  operational keys of the dataclass become those of the constructor.
  """

  def mark(constructor: T) -> T:
    marked: Any = constructor
    declared = {
      name: parameter
      for name, parameter in inspect.signature(marked).parameters.items()
      if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
    fields = [
      field for name, field in keys(config).items() if name not in declared
    ]
    marked.__signature__ = inspect.Signature([*declared.values(), *fields])
    marked.__annotations__ |= {x.name: x.annotation for x in fields}
    marked.OPERATIONAL = operational_keys(config)
    return constructor

  return mark


def operational_keys(constructor: Callable[..., Any]) -> tuple[str, ...]:
  """Returns the keys that `operational` or an attribute OPERATIONAL marks."""
  return tuple(getattr(constructor, 'OPERATIONAL', ()))


def nested(annotation: Any) -> Nested | None:
  """Returns the mark of a key that is a section; None for any other key."""
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
  """Removes marks and None from an annotation.

  Returns:
    The remaining type, and whether the annotation allows None.
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
    constructor: result of `resolve`.
    section: config section or dict. Keys that the constructor does not have
      (such as `name`) are left out, nested sections are passed as dicts, and
      lists (of a section that was read from JSON) are converted to tuples.
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
    return tuple(_plain_value(entry) for entry in value)
  return value
