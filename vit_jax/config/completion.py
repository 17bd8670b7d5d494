"""Completes configs with the defaults of signatures, and checks their keys.

Every section of a config contains the keyword arguments of one constructor. It
is found by `SECTIONS`, and by the section's `name` if there are several.
Defaults are only in the signatures. `complete`, which every config file calls
last, copies them into the config, so that each key can be overridden on the
command line.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict, config_dict

from vit_jax.config import durations, plugins
from vit_jax.config.arguments import parse_arg as parse_arg  # for config files
from vit_jax.config.plugins import Nested
from vit_jax.config.sections import DEFAULT_NAMES, EVALS, SECTIONS
from vit_jax.errors import UserError, check_range, closest

Config = Any  # a completed ml_collections.ConfigDict

# Larger than any real batch, but the row indices of a batch still fit into the
# memory of a host.
MAX_BATCH_SIZE = 2**26
MAX_CLASSES = 2**31 - 1  # labels are int32


@plugins.operational('paper_core_days')
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
  position_resize: str = 'aligned',
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
    init_weights: set of weights of that checkpoint: 'params', 'ema' for the
      moving average, or another set of its objective ('teacher' for DINO).
    position_resize: 'aligned' or 'bicubic', see `positions.resize`.
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
  check_range('paper_core_days', paper_core_days, above=0)


def train_data(*, split: str, num_examples: int, repeats: int = 1) -> None:
  """Declares and checks the keys of the training data.

  Args:
    split: split of the source, in the syntax of TFDS.
    num_examples: number of examples of the split, which defines the length of
      an epoch; it is compared with the source.
    repeats: number of copies of each example in a batch, augmented
      independently (repeated augmentation: 3 in DeiT). An epoch still has
      `num_examples` images, which come from `num_examples / repeats` examples.

  Raises:
    UserError: a number is outside its range.
  """
  del split
  check_range('train.num_examples', num_examples, at_least=1, at_most=2**62)
  check_range('train.repeats', repeats, at_least=1, at_most=64)


def complete(config: ConfigDict) -> Config:
  """Adds the default of every missing key to a config, and locks the config.

  Args:
    config: values of a config file.

  Returns:
    The completed config.

  Raises:
    UserError: a key is unknown, a key without a default is missing, or a value
      has a wrong type.
  """
  values = config.to_dict()
  _check_sections(values)
  result = ConfigDict(
    _section(
      '',
      plugins.keys(top_level),
      {k: v for k, v in values.items() if not _is_section(k)},
    )
  )
  for section, pattern in SECTIONS.items():
    result[section] = complete_section(
      section, Nested(pattern), values.get(section, {})
    )
  result.evals = ConfigDict(
    {
      name: complete_section(f'evals.{name}', Nested(EVALS), section)
      for name, section in values.get('evals', {}).items()
    }
  )
  return result.lock()


def _check_sections(values: dict[str, Any]) -> None:
  """Checks that every section is a dict.

  Raises:
    UserError: a section has another type.
  """
  sections = {k: v for k, v in values.items() if _is_section(k)}
  if isinstance(sections.get('evals'), dict):
    evals = sections.pop('evals')
    sections |= {f'evals.{name}': section for name, section in evals.items()}
  for name, section in sections.items():
    if not isinstance(section, dict):
      raise UserError(
        f'config.{name} is {section!r}; it must be a section, dict(key=value, '
        '…).'
      )


def _is_section(key: str) -> bool:
  return key in SECTIONS or key == 'evals'


def complete_section(
  section: str, mark: Nested, values: Mapping[str, Any]
) -> ConfigDict:
  """Adds the default of every missing key to one section.

  Args:
    section: path of the section, for messages.
    mark: pattern of the constructors that the section's name selects from.
    values: values of the config file.

  Raises:
    UserError: as in `complete`.
  """
  named = '{name}' in mark.pattern
  if named:
    values = {'name': DEFAULT_NAMES.get(section), **values}
    if not isinstance(values['name'], str):
      raise UserError(
        f'config.{section}.name is missing; it selects the class to build.'
      )
  keys = mark.keys(values.get('name', ''))
  arguments = {
    key: value for key, value in values.items() if not (named and key == 'name')
  }
  head = {'name': values['name']} if named else {}
  return ConfigDict(head | _section(section + '.', keys, arguments))


def complete_nested(path: str, mark: Nested, values: Any) -> ConfigDict:
  """Adds the default of every missing key to the value of a nested key.

  Args:
    path: path of the key, for messages.
    mark: mark of the key.
    values: values of the config file.

  Raises:
    UserError: as in `complete`.
  """
  if not isinstance(values, Mapping | ConfigDict):
    raise UserError(
      f'config.{path} is {values!r}; it must be a section, dict(key=value, …).'
    )
  if not mark.many:
    section: Any = values
    return complete_section(path, mark, section)
  return ConfigDict(
    {
      name: complete_nested(
        f'{path}.{name}', dataclasses.replace(mark, many=False), section
      )
      for name, section in values.items()
    }
  )


def _section(
  prefix: str, allowed: dict[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the values of one section, completed with defaults.

  Args:
    prefix: path of the section with a dot at the end; '' for the top level.
    allowed: parameters of the constructor by key.
    values: values of the config file.

  Returns:
    Values by key. A None is a typed placeholder, which a flag can replace.
  """
  unknown = [key for key in values if key not in allowed]
  if unknown:
    sections = [*SECTIONS, 'evals'] if not prefix else []
    raise UserError(
      f'config.{prefix}{unknown[0]} is not a key; '
      f'{closest(str(unknown[0]), [*allowed, *sections])}.'
    )
  result = {}
  for key, parameter in allowed.items():
    value = values.get(key, parameter.default)
    if value is parameter.empty:
      raise UserError(f'config.{prefix}{key} is missing: it has no default.')
    mark = plugins.nested(parameter.annotation)
    if mark is not None:
      # None stays None, because a placeholder cannot be replaced by a section.
      result[key] = (
        None if value is None else complete_nested(prefix + key, mark, value)
      )
      continue
    kind, optional = plugins.value_type(parameter.annotation)
    member = plugins.member_type(parameter.annotation)
    if value is None and optional:
      result[key] = config_dict.placeholder(kind)
    else:
      result[key] = typed(f'config.{prefix}{key}', value, kind, member)
  return result


def typed(key: str, value: Any, kind: type, member: type = object) -> Any:
  """Converts a value to the type of its key.

  An int is converted to a float, and a single value to a tuple of one.

  Args:
    key: key, for the message.
    value: value in a config.
    kind: plain type of the key.
    member: type of the members of a tuple.

  Raises:
    UserError: the value has another type.
  """
  if kind is tuple:
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    return tuple(typed(key, entry, member) for entry in values)
  if kind is float and type(value) is int:
    return float(value)
  if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
    raise UserError(f'{key} is {value!r}; it must be of type {kind.__name__}.')
  return value


def flatten(config: Any, prefix: str = '') -> dict[str, Any]:
  """Returns {'model.depth': 24, …}, with tuples as lists like in JSON."""
  flat = {}
  values = config.to_dict() if isinstance(config, ConfigDict) else config
  for key, value in values.items():
    if isinstance(value, dict):
      flat |= flatten(value, f'{prefix}{key}.')
    else:
      flat[prefix + key] = _with_lists(value)
  return flat


def _with_lists(value: Any) -> Any:
  """Converts tuples to lists, at any depth (`optimizer.rules` has pairs)."""
  if isinstance(value, dict):
    return {key: _with_lists(entry) for key, entry in value.items()}
  if isinstance(value, list | tuple):
    return [_with_lists(entry) for entry in value]
  return value


def to_json(config: Config) -> str:
  """Returns a completed config as indented JSON."""
  return json.dumps(config.to_dict(), indent=2) + '\n'


def from_dict(values: dict[str, Any]) -> Config:
  """Returns the config whose values `to_json` wrote.

  Raises:
    UserError: a key no longer exists in this version; see `complete`.
  """
  return complete(ConfigDict(values))
