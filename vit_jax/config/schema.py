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

import ast
import contextlib
import dataclasses
import importlib
import inspect
import json
import pkgutil
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from absl import flags
from ml_collections import ConfigDict, config_dict

from vit_jax.config import durations
from vit_jax.errors import UserError, check_range, closest

T = TypeVar('T')
Section = Mapping[str, Any]
Config = Any  # a completed ml_collections.ConfigDict

# Constructors of the sections of a config.
SECTIONS = {
  'model': 'vit_jax.models.{name}:Model',
  'objective': 'vit_jax.objectives.{name}:Objective',
  'optimizer': 'vit_jax.optim.optimizers:{name}',
  'schedule': 'vit_jax.optim.{name}:make_schedule',
  'source': 'vit_jax.data.sources.{name}:Source',
  'train': 'vit_jax.config.schema:train_data',
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

# Larger than any real batch, but the row indices of a batch still fit into the
# memory of a host.
MAX_BATCH_SIZE = 2**26
MAX_CLASSES = 2**31 - 1  # labels are int32
# Names of other projects, and the corresponding flags.
SYNONYMS = {
  'lr': 'config.schedule.base_lr',
  'learning_rate': 'config.schedule.base_lr',
  'epochs': 'config.total',
  'num_epochs': 'config.total',
  'steps': 'config.total',
  'wd': 'config.optimizer.weight_decay',
  'workers': 'config.reader.threads',
  'num_workers': 'config.reader.threads',
  'output_dir': 'workdir',
  'resume': 'workdir',
}

# Flags of earlier versions, and what replaces them.
REMOVED_FLAGS = {
  'average': 'docs/weights.md shows the mean of several weights in Python; '
}

_PARSERS: dict[type, flags.ArgumentParser] = {
  bool: flags.BooleanParser(),
  int: flags.IntegerParser(),
  float: flags.FloatParser(),
}
_EXAMPLES = {
  int: ': give a whole number, such as 64',
  float: ': give a number, such as 0.001',
  bool: ': give true or false',
  tuple: ": give one value, or several, such as (384, 512) or ('a', 'b')",
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
    additional = config_keys(self.beside) if self.beside else {}
    own = config_keys(self.constructor(name))
    # A key of the constructor has precedence over an additional one.
    return own | {key: additional[key] for key in additional if key not in own}


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
    module = importlib.import_module(path)
    if hasattr(module, symbol):
      return getattr(module, symbol)
  except ModuleNotFoundError as error:
    reason = f'there is no module {path} in PYTHONPATH'
    if not f'{path}.'.startswith(f'{error.name}.'):
      package = str(error.name).partition('.')[0]
      reason = f'{error.name!r} is not installed: pip install {package}'
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
  """Converts sections to dicts, and lists to tuples, at any depth."""
  if isinstance(value, ConfigDict):
    return value.to_dict()
  if isinstance(value, list | tuple):
    return tuple(_plain_value(entry) for entry in value)
  return value


def evaluation(
  *,
  every: str = '1 epochs',
  batch_size: int | None = None,
  image_size: tuple[int, ...] | None = None,
  preprocess: typing.Annotated[
    Section | None, Nested(SECTIONS['preprocess'])
  ] = None,
) -> None:
  """Declares and checks the keys that all sections of `config.evals` have.

  Args:
    every: duration between evaluations, used by the training loop, which also
      evaluates at the end.
    batch_size: global batch size; by default that of training.
    image_size: size of the images, as at the top level, if it is another one.
    preprocess: preprocessing of the images, if it is another one.

  Raises:
    UserError: a value is invalid.
  """
  del image_size, preprocess
  durations.check('every', every)
  check_range('batch_size', batch_size, at_least=1, at_most=MAX_BATCH_SIZE)


MARKS = {section: Nested(pattern) for section, pattern in SECTIONS.items()}
MARKS['evals'] = Nested(EVALS, many=True, beside=evaluation)


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


def parse_arg(arg: str | None, **defaults: Any) -> types.SimpleNamespace:
  """Parses the argument of a config file, such as 'key=value,key=value'.

  A value may contain commas: a comma separates two arguments only if `key=`, a
  known key, another comma or the end of the text follows.

  Args:
    arg: text after the colon, or None.
    **defaults: allowed keys with their defaults, which determine the types.

  Raises:
    UserError: a key is unknown, or a value has another type.
  """
  values = dict(defaults)
  comma = rf',(?=\w+=|(?:{"|".join(map(re.escape, defaults))})?(?:,|$))'
  for argument in filter(None, re.split(comma, arg or '')):
    key, equals, text = argument.partition('=')
    if key not in defaults or not equals:
      raise UserError(
        f'config argument {argument!r} is not key=value with a known key; '
        f'{closest(key, defaults)}.'
      )
    name = f'config argument {key}'
    values[key] = typed(name, FlagText(text), type(defaults[key]))
  return types.SimpleNamespace(**values)


class FlagText(str):
  """Text of a flag, which is parsed once the type of its key is known."""


def typed(key: str, value: Any, annotation: Any) -> Any:
  """Converts a value to the type of its key.

  An int is also accepted for a float, and a single value for a tuple.

  Args:
    key: path of the key, for messages.
    value: value in a config file, or the text of a flag.
    annotation: annotation of the constructor's parameter.

  Raises:
    UserError: the value has another type.
  """
  kind, member, optional = value_type(annotation)
  if optional and is_none(value):
    return None
  parsed = _parsed(value, kind) if isinstance(value, FlagText) else value
  # The text of a flag for a tuple must be a Python literal.
  is_text = kind is tuple and isinstance(value, FlagText) and parsed == value
  with contextlib.suppress(TypeError):
    if not is_text:
      return _converted(parsed, kind, member)
  of = f' of {member.__name__}' if kind is tuple else ''
  example = _EXAMPLES.get(kind, '')
  if is_text:
    example += ", in quotes: \"('a', 'b')\""
  raise UserError(
    f'{key} is {value!r}; it must be of type {kind.__name__}{of}{example}.'
  )


def is_none(value: Any) -> bool:
  """Returns whether a value is None, or the text of a flag that says so."""
  return value is None or (isinstance(value, FlagText) and value == 'None')


def _parsed(text: FlagText, kind: type) -> Any:
  """Parses the text of a flag; returns the text if it cannot be parsed."""
  if kind is str:
    return str(text)
  parser = _PARSERS.get(kind)
  with contextlib.suppress(SyntaxError, ValueError):
    return parser.parse(text) if parser else ast.literal_eval(text)
  return str(text)


def _converted(value: Any, kind: type, member: type) -> Any:
  """Converts an int to float and a value to a tuple.

  Raises:
    TypeError: the value has another type.
  """
  if kind is tuple:
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    return tuple(_converted(entry, member, object) for entry in values)
  if kind is float and type(value) is int:
    return float(value)
  if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
    raise TypeError
  return value


@operational('early_stop_patience', 'paper_core_days', 'position_resize')
def top_level(
  *,
  seed: int = 0,
  total: str,
  batch_size: int,
  micro_batches: int = 1,
  image_size: tuple[int, ...],
  num_classes: int,
  average_decay: float | None = None,
  init_from: str | None = None,
  init_weights: str = 'params',
  position_resize: str | None = None,
  early_stop_patience: int | None = None,
  paper_core_days: float | None = None,
) -> None:
  """Declares and checks the keys of a config outside its sections.

  Args:
    seed: seed of initialization, order, augmentation and dropout; 32 bits.
    total: length of the training, a duration ('90 epochs') above 0.
    batch_size: number of examples in a global batch.
    micro_batches: number of parts in which a batch is computed, one after the
      other; their gradients are averaged.
    image_size: (height, width) in pixels, or one number for both.
    num_classes: number of outputs of the head; 0 for a model without a head.
    average_decay: decay of the moving average of parameters, between 0 and 1;
      the average is evaluated in addition to the parameters. None for no
      average.
    init_from: weights that the training starts from: a workdir, a checkpoint
      step directory or a file of any known format. Pre-training uses all
      parameters that fit the model, fine-tuning all except the head.
    init_weights: set of weights in `init_from`: 'params', 'ema' for the
      moving average, or another set of its objective ('teacher' for DINO).
    position_resize: method of interpolation for positions in `init_from`, see
      `resizing.METHODS`; None for the method of the project that the weights
      are from. It has no effect on a run that resumes.
    early_stop_patience: number of evaluations without a new best value of the
      metric `checkpoint.best` after which the run ends; None to train to the
      end. The schedule still has the length `total`.
    paper_core_days: TPUv3 core-days that the paper reports, for comparison.

  Raises:
    UserError: a number is outside its range. The other keys are checked where
      they are used.
  """
  del image_size, init_from, init_weights, position_resize
  check_range('seed', seed, at_least=0, at_most=2**32 - 1)
  durations.check('total', total, positive=True)
  check_range('batch_size', batch_size, at_least=1, at_most=MAX_BATCH_SIZE)
  check_range('micro_batches', micro_batches, at_least=1)
  check_range('num_classes', num_classes, at_least=0, at_most=MAX_CLASSES)
  check_range('average_decay', average_decay, above=0, below=1)
  check_range('early_stop_patience', early_stop_patience, at_least=1)
  check_range('paper_core_days', paper_core_days, above=0)


@operational('leave_out')
def train_data(
  *,
  split: str,
  num_examples: int,
  repeats: int = 1,
  leave_out: str | None = None,
  balanced: bool = False,
) -> None:
  """Declares and checks the keys of the training data.

  Args:
    split: split of the source, in the syntax of TFDS.
    num_examples: number of examples of the split, which defines the length of
      an epoch; it is compared with the source.
    repeats: number of copies of each example in a batch, augmented
      independently (repeated augmentation: 3 in DeiT). An epoch still has
      `num_examples` images, which come from `num_examples / repeats` examples.
    leave_out: list of examples that are not used, which `check_data --against`
      writes, for example because they are also in a test set. `num_examples` is
      the number of remaining examples. The path may change when a run is
      resumed; the examples that are left out may not.
    balanced: whether each class is drawn equally often, see
      `data.balanced.Balanced`. An epoch still has `num_examples` images, so an
      example of a rare class occurs several times in it.

  Raises:
    UserError: a number is outside its range.
  """
  del split, leave_out, balanced
  check_range('train.num_examples', num_examples, at_least=1, at_most=2**62)
  check_range('train.repeats', repeats, at_least=1, at_most=64)


def complete(config: ConfigDict) -> Config:
  """Adds the default of every missing key to a config, and locks the config.

  Args:
    config: values of a config file and of flags.

  Returns:
    The completed config.

  Raises:
    UserError: a key is unknown, a key without a default is missing, or a value
      has a wrong type.
  """
  values = config.to_dict()
  top = {key: value for key, value in values.items() if key not in MARKS}
  result = ConfigDict(_completed('', config_keys(top_level), top))
  for section, mark in MARKS.items():
    result[section] = complete_section(section, mark, values.get(section, {}))
  return result.lock()


def complete_section(
  path: str, mark: Nested, values: Any, drop_unknown: bool = False
) -> ConfigDict:
  """Adds the default of every missing key to one section.

  Args:
    path: path of the section, for messages.
    mark: `Nested` mark of the section, which determines its constructor.
    values: values of the config file and of flags.
    drop_unknown: whether to leave out keys that the constructor does not have,
      unless they are set by flags. They are always left out if a flag sets the
      name, because they may belong to the name in the config file.

  Raises:
    UserError: see `complete`.
  """
  has_name = '{name}' in mark.pattern  # the section selects a class by name
  if not isinstance(values, Mapping | ConfigDict):
    key = ('NAME.' if mark.many else '') + ('name' if has_name else 'KEY')
    raise UserError(
      f'config.{path} is {values!r}; it is a section: give its keys, such as '
      f'--config.{path}.{key}=….'
    )
  if mark.many:
    member = dataclasses.replace(mark, many=False)
    return ConfigDict(
      {
        name: complete_section(f'{path}.{name}', member, section, drop_unknown)
        for name, section in values.items()
      }
    )
  name: Any = ''
  arguments, result = dict(values), {}
  if has_name:
    default = DEFAULT_NAMES.get(path.rpartition('.')[2])
    name = arguments.pop('name', default)
    result['name'] = typed(f'config.{path}.name', name, str)
  keys = mark.keys(name)
  if drop_unknown or isinstance(name, FlagText):
    arguments = {
      key: value
      for key, value in arguments.items()
      if key in keys or _has_flag(value)
    }
  return ConfigDict(result | _completed(f'{path}.', keys, arguments))


def _has_flag(value: Any) -> bool:
  """Returns whether a value, or one of a section, is the text of a flag."""
  if isinstance(value, Mapping | ConfigDict):
    return any(map(_has_flag, value.values()))
  return isinstance(value, FlagText)


def _completed(
  prefix: str, allowed: dict[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the values of one section, completed with defaults.

  Args:
    prefix: path of the section with a dot at the end; '' for the top level.
    allowed: parameters of the constructor by key.
    values: values of the config file and of flags.

  Returns:
    Values by key. A None is a typed placeholder, to which a value can be
    assigned.
  """
  unknown = [str(key) for key in values if key not in allowed]
  if unknown:
    known = allowed if prefix else [*allowed, *MARKS]
    raise unknown_key(prefix, unknown[0], known)
  result = {}
  for key, parameter in allowed.items():
    value = values.get(key, parameter.default)
    if value is parameter.empty:
      raise UserError(f'config.{prefix}{key} is missing: it has no default.')
    mark = nested(parameter.annotation)
    kind, _, optional = value_type(parameter.annotation)
    if mark is None:
      value = typed(f'config.{prefix}{key}', value, parameter.annotation)
      result[key] = config_dict.placeholder(kind) if value is None else value
    elif optional and is_none(value):
      # A placeholder could not be replaced by a section.
      result[key] = None
    else:
      result[key] = complete_section(prefix + key, mark, value)
  return result


def unknown_key(prefix: str, key: str, known: Iterable[str]) -> UserError:
  """Returns the error for a key that does not exist.

  Args:
    prefix: path of the section with a dot at the end; '' for the top level.
    key: path of the key within the section.
    known: keys of the section.
  """
  # A similar spelling in this section would mislead if there is a synonym.
  synonym = SYNONYMS.get(key.rpartition('.')[2])
  hint = f'did you mean --{synonym}?' if synonym else f'{closest(key, known)}.'
  return UserError(f'config.{prefix}{key} is not a key; {hint}')


def flatten(config: Any, prefix: str = '') -> dict[str, Any]:
  """Returns a flat dict {'model.depth': 24, …}, with tuples as lists."""
  flat = {}
  values = config.to_dict() if isinstance(config, ConfigDict) else config
  for key, value in json.loads(json.dumps(values)).items():
    if isinstance(value, dict):
      flat |= flatten(value, f'{prefix}{key}.')
    else:
      flat[prefix + key] = value
  return flat


def to_json(config: Config) -> str:
  """Returns a completed config as indented JSON."""
  return json.dumps(config.to_dict(), indent=2) + '\n'


def from_dict(values: dict[str, Any]) -> Config:
  """Returns the config whose values `to_json` wrote.

  Raises:
    UserError: a key does not exist; see `complete`.
  """
  return complete(ConfigDict(values))
