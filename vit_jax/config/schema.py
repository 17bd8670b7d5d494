"""Sections of a config: their constructors, keys, types and defaults.

Every section of a config contains the keyword arguments of one constructor.
`SECTIONS` determines the constructor, together with the section's `name` if
there are several; there is no registry. With the name `vit`, the pattern
`'vit_jax.models.{name}:Model'` selects the symbol `Model` of the module
`vit_jax.models.vit`. A name with a dot is the path of a module of your own,
which must define the same symbol.

The keyword-only parameters of a constructor are the keys of its section. Its
positional parameters are passed at run time. `operational` marks the keys that
do not affect the trained weights. Defaults are only in the signatures.
`complete`, which every config file calls last, copies them into the config, so
that each key can be overridden on the command line.
"""

import dataclasses
import importlib
import inspect
import pkgutil
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from ml_collections import ConfigDict, FrozenConfigDict

from vit_jax.errors import UserError, closest

T = TypeVar('T')
if typing.TYPE_CHECKING:
  Section = Mapping[str, Any]
else:  # a frozen section is not a subclass of Mapping
  Section = Mapping[str, Any] | FrozenConfigDict
Config = Any  # a completed ml_collections.ConfigDict
# Default of a key that is a section. Fields of dataclasses need a hashable one.
EMPTY: Any = FrozenConfigDict()

# Constructors of the sections of a config.
SECTIONS = {
  'model': 'vit_jax.models.{name}:Model',
  'objective': 'vit_jax.objectives.{name}:Objective',
  'lora': 'vit_jax.objectives.lora:Lora',
  'optimizer': 'vit_jax.optim.optimizers:{name}',
  'schedule': 'vit_jax.optim.{name}:make_schedule',
  'source': 'vit_jax.data.sources.{name}:Source',
  'train': 'vit_jax.config.keys:train_data',
  'augment': 'vit_jax.data.augment.{name}:TrainTransform',
  'mix': 'vit_jax.objectives.mixing:DeviceAugment',
  'preprocess': 'vit_jax.data.augment.{name}:EvalTransform',
  'reader': 'vit_jax.data.pipeline.stream:Reader',
  'mesh': 'vit_jax.arrays.sharding:make_mesh',
  'checkpoint': 'vit_jax.checkpoint:Checkpointer',
  'recovery': 'vit_jax.run.guards:Recovery',
  'log': 'vit_jax.run.metrics:Log',
}
# Default names of sections whose `name` is optional.
DEFAULT_NAMES = {
  'augment': 'transforms',
  'preprocess': 'transforms',
  'schedule': 'schedule',
}
EVALS = 'vit_jax.evaluators.{name}:Evaluator'


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
    many: whether the value is {name of your choice: section}, as in `evals`
      and in `recovery.limits`.
    beside: 'MODULE:SYMBOL' of a function whose keyword-only parameters are
      additional keys of the section, as in `evals` (when an evaluator runs)
      and in the members of a `mixture`; '' for none.
  """

  pattern: str
  many: bool = False
  beside: str = ''

  def constructor(self, name: str) -> Callable[..., Any]:
    """Returns the constructor of a section with a given `name`."""
    return resolve(self.pattern, name)

  def keys(self, name: str) -> dict[str, inspect.Parameter]:
    """Returns the keys of a section with a given `name`.

    Raises:
      UserError: the constructor does not exist.
    """
    additional = config_keys(resolve(self.beside)) if self.beside else {}
    own = config_keys(self.constructor(name))
    # A key of the constructor has precedence over an additional one.
    return own | {key: additional[key] for key in additional if key not in own}

  def operational_keys(self, values: Any) -> tuple[str, ...]:
    """Returns the operational keys of a section with these values."""
    return operational_keys(self.constructor(values.get('name') or ''))


def resolve(pattern: str, name: str = '') -> Callable[..., Any]:
  """Returns the constructor that a name selects from a pattern.

  Args:
    pattern: 'MODULE:SYMBOL', which may contain '{name}'.
    name: name in this package, or the dotted path of another module; a symbol
      '{name}' is then the last part of the path.

  Raises:
    UserError: the module or symbol does not exist, or the module needs a
      package that is not installed.
  """
  module_name, symbol = pattern.split(':')
  if '.' in name:
    module_name = name
  path = module_name.format(name=name)
  # A function named by the config, such as an optimizer, has the name of the
  # module in which a plug-in defines it.
  symbol = symbol.format(name=name.rpartition('.')[2])
  reason = f'{path} does not define {symbol}'
  try:
    if path.startswith('.'):  # importlib would take it for a relative name
      raise ModuleNotFoundError(name=path)
    module = importlib.import_module(path)
    if hasattr(module, symbol):
      return getattr(module, symbol)
  except ModuleNotFoundError as error:
    reason = f'there is no module {path} in PYTHONPATH'
    # Not the module or a package that contains it, but one that it imports.
    if not f'{path}.'.startswith(f'{error.name}.'):
      package = str(error.name).partition('.')[0]
      raise UserError(
        f'the name {name!r} cannot be used, because {error.name!r} is not '
        f'installed: pip install {package}.'
      ) from error
  raise UserError(
    f'the name {name!r} cannot be used, because {reason}; '
    f'{closest(name, names(pattern))}; or the dotted path of a module of your '
    f'own that defines {symbol}.'
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
      and config_keys(value)
    ]
  package = importlib.import_module(module_pattern.removesuffix('.{name}'))
  result = []
  for info in pkgutil.iter_modules(package.__path__, package.__name__ + '.'):
    if info.name.endswith('.contract'):  # its symbol is the Protocol
      continue
    try:
      defines = hasattr(importlib.import_module(info.name), symbol)
    except ImportError:  # an optional package is absent
      defines = True
    if defines:
      result.append(info.name.rpartition('.')[2])
  return result


def config_keys(
  constructor: Callable[..., Any],
) -> dict[str, inspect.Parameter]:
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

  For example, `clip` is a field of `Common`, and becomes a key of `sgd`, which
  still receives it in `common`:

      @keyed_by(Common)
      def sgd(rate, /, *, momentum: float = 0.9, **common): …

      # has the signature (rate, /, *, momentum: float = 0.9, clip: float = 1.0)

  The constructor must have a parameter for other keywords (`**common` above),
  which it passes to the dataclass. The fields are added to its signature, so
  they are documented and validated only in the dataclass. A parameter of the
  constructor with the name of a field replaces the field, for example to change
  its default. The operational keys of the dataclass become those of the
  constructor.
  """

  def mark(constructor: T) -> T:
    marked: Any = constructor
    declared = {
      name: parameter
      for name, parameter in inspect.signature(marked).parameters.items()
      if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
    fields = {
      name: field
      for name, field in config_keys(config).items()
      if name not in declared
    }
    marked.__signature__ = inspect.Signature([*(declared | fields).values()])
    # The types of a class's keys are those of its constructor.
    typed: Any = marked.__init__ if inspect.isclass(constructor) else marked
    typed.__annotations__ |= {
      name: field.annotation for name, field in fields.items()
    }
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


def sections(
  path: str, mark: Nested, values: Any
) -> Iterator[tuple[str, Nested, Any]]:
  """Yields a section, and all sections nested in it.

  Args:
    path: path of the section in the config.
    mark: mark of the section.
    values: values of the completed section; sections by name if `mark.many`.

  Yields:
    Path, mark and values of each section.
  """
  if mark.many:
    member = dataclasses.replace(mark, many=False)
    for name, section in values.items():
      yield from sections(f'{path}.{name}', member, section)
    return
  yield path, mark, values
  for key, parameter in mark.keys(values.get('name') or '').items():
    inner, value = nested(parameter.annotation), values.get(key)
    if inner is not None and value is not None:
      yield from sections(f'{path}.{key}', inner, value)


def value_type(annotation: Any) -> tuple[type, type, bool]:
  """Splits an annotation into its type and what it allows.

  Returns:
    The type without marks, such as `Nested`, and without None; the type of the
    members of a tuple (`object` if it is not specified); and whether None is
    allowed.
  """
  if typing.get_origin(annotation) is typing.Annotated:
    annotation = typing.get_args(annotation)[0]
  if typing.get_origin(annotation) in (types.UnionType, typing.Union):
    members = typing.get_args(annotation)
    plain = next(m for m in members if m is not types.NoneType)
    return *value_type(plain)[:2], types.NoneType in members
  member = next(iter(typing.get_args(annotation)), object)
  return typing.get_origin(annotation) or annotation, member, False


def construct(
  constructor: Callable[..., Any], section: Any, *runtime: Any
) -> Any:
  """Calls a constructor with a section's keys and the run-time arguments.

  Args:
    constructor: result of `resolve`.
    section: config section or dict. Keys that the constructor does not have
      (such as `name`) are left out, nested sections are passed as dicts, and
      lists (of a section that was read from JSON) are converted to tuples.
    *runtime: positional arguments.
  """
  allowed = config_keys(constructor)
  values = {key: section[key] for key in section if key in allowed}
  return constructor(
    *runtime, **{key: _plain_value(value) for key, value in values.items()}
  )


def _plain_value(value: Any) -> Any:
  """Converts a section to a dict, or nested lists to tuples."""
  if isinstance(value, ConfigDict):
    return value.to_dict()
  if isinstance(value, list | tuple):
    return tuple(_plain_value(entry) for entry in value)
  return value


MARKS = {section: Nested(pattern) for section, pattern in SECTIONS.items()}
MARKS['evals'] = Nested(
  EVALS, many=True, beside='vit_jax.config.keys:evaluation'
)


def constructor(section: str, values: Any) -> Callable[..., Any]:
  """Returns the constructor that the values of a section select.

  Args:
    section: name of the section in a config; 'evals' for an evaluator.
    values: dict or config section. Values that an older version wrote may lack
      a name for which there is a default now.

  Raises:
    UserError: the constructor does not exist.
  """
  name = values.get('name', DEFAULT_NAMES.get(section, ''))
  return MARKS[section].constructor(name)


def build(section: str, values: Any, *runtime: Any) -> Any:
  """Builds the object that values describe; see `constructor`."""
  return construct(constructor(section, values), values, *runtime)


def build_section(config: Any, section: str, *runtime: Any) -> Any:
  """Builds the object that a section of a completed config describes."""
  return build(section, config[section], *runtime)
