"""Configs: completed from signatures, overridden by flags, checked once.

Every section of a config is the keyword arguments of one constructor, found by
`SECTIONS` (and the section's `name` where there are several). Defaults live in
those signatures alone; `complete`, which every config file calls last, writes
them into the config so that each key can be overridden on the command line.
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

# Beyond any training, and row numbers of a batch still fit a host's memory.
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
    micro_batches: number of parts of a batch whose gradients are averaged.
    image_size: (height, width), or one number for both; pixels.
    num_classes: outputs of the head; 0 for a model without one.
    average_decay: decay of the moving average of parameters, which is evaluated
      next to them, between 0 and 1; None for no average.
    init_from: weights that the training starts from: a workdir, a checkpoint
      step directory or a file of any known format. A pre-training uses all that
      fits, a fine-tuning all but the head.
    init_weights: set of weights of that checkpoint: 'params', 'ema' for the
      moving average, or another name of its objective ('teacher' for DINO).
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
    split: split of the source, written as in TFDS.
    num_examples: number of examples of the split, checked against the source;
      it defines the length of an epoch.
    repeats: copies of each example in a batch, each augmented by itself
      (repeated augmentation: 3 in DeiT). An epoch is as many images as before,
      of which only one in `repeats` is another example.

  Raises:
    UserError: there are no examples, or no copies.
  """
  del split
  check_range('train.num_examples', num_examples, at_least=1, at_most=2**62)
  check_range('train.repeats', repeats, at_least=1, at_most=64)


def complete(config: ConfigDict) -> Config:
  """Fills in every key that a config leaves to its default, and locks it.

  Raises:
    UserError: a key that no constructor takes, a missing one, a wrong type.
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
  """Raises UserError unless every section is a dict."""
  sections = {k: v for k, v in values.items() if _is_section(k)}
  if isinstance(sections.get('evals'), dict):
    evals = sections.pop('evals')
    sections |= {f'evals.{name}': section for name, section in evals.items()}
  for name, section in sections.items():
    if not isinstance(section, dict):
      raise UserError(
        f'config.{name} is {section!r}; it is a section: dict(key=value, …).'
      )


def _is_section(key: str) -> bool:
  return key in SECTIONS or key == 'evals'


def complete_section(
  section: str, mark: Nested, values: Mapping[str, Any]
) -> ConfigDict:
  """Completes one section with all of its keys; `complete` does this with all.

  Args:
    section: path of the section, for messages.
    mark: mark of the constructors that its name chooses from.
    values: values that are given.

  Raises:
    UserError: as in `complete`.
  """
  named = '{name}' in mark.pattern
  if named:
    values = {'name': DEFAULT_NAMES.get(section), **values}
    if not isinstance(values['name'], str):
      raise UserError(
        f'config.{section} needs a name, which selects the {section}.'
      )
  keys = mark.keys(values.get('name', ''))
  given = {key: v for key, v in values.items() if not (named and key == 'name')}
  head = {'name': values['name']} if named else {}
  return ConfigDict(head | _section(section + '.', keys, given))


def complete_nested(where: str, mark: Nested, values: Any) -> ConfigDict:
  """Completes the value of a nested key.

  Args:
    where: path of the section, for messages.
    mark: mark of the key.
    values: values that are given.

  Raises:
    UserError: as in `complete`.
  """
  if not isinstance(values, Mapping | ConfigDict):
    raise UserError(
      f'config.{where} is {values!r}; it is a section: dict(key=value, …).'
    )
  if not mark.many:
    section: Any = values
    return complete_section(where, mark, section)
  return ConfigDict(
    {
      name: complete_nested(
        f'{where}.{name}', dataclasses.replace(mark, many=False), each
      )
      for name, each in values.items()
    }
  )


def _section(
  prefix: str, allowed: dict[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the values of one section, or defaults, or None as placeholders."""
  wrong = [key for key in values if key not in allowed]
  if wrong:
    sections = [*SECTIONS, 'evals'] if not prefix else []
    raise UserError(
      f'config.{prefix}{wrong[0]} is not a key; '
      f'{closest(str(wrong[0]), [*allowed, *sections])}.'
    )
  result = {}
  for key, parameter in allowed.items():
    value = values.get(key, parameter.default)
    if value is parameter.empty:
      raise UserError(f'config.{prefix}{key} is missing: it has no default.')
    mark = plugins.nested(parameter.annotation)
    if mark is not None:  # a placeholder would refuse to become a section
      given = value is not None
      nested = complete_nested(prefix + key, mark, value) if given else None
      result[key] = nested
      continue
    kind, optional = plugins.value_type(parameter.annotation)
    member = plugins.member_type(parameter.annotation)
    if value is None and optional:
      result[key] = config_dict.placeholder(kind)
    else:
      result[key] = typed(f'config.{prefix}{key}', value, kind, member)
  return result


def typed(key: str, value: Any, kind: type, member: type = object) -> Any:
  """Converts a value to its type: an int may stand for a float or a 1-tuple.

  Args:
    key: key, for the message.
    value: value in a config.
    kind: plain type that it must have.
    member: type of the members of a tuple.

  Raises:
    UserError: the value is of another type.
  """
  if kind is tuple:
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    return tuple(typed(key, each, member) for each in values)
  if kind is float and type(value) is int:
    return float(value)
  if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
    raise UserError(f'{key} is {value!r}; it must be of type {kind.__name__}.')
  return value


def flatten(config: Any, prefix: str = '') -> dict[str, Any]:
  """{'model.depth': 24, …} with tuples as lists, as JSON has them."""
  flat = {}
  values = config.to_dict() if isinstance(config, ConfigDict) else config
  for key, value in values.items():
    if isinstance(value, dict):
      flat |= flatten(value, f'{prefix}{key}.')
    else:
      flat[prefix + key] = _with_lists(value)
  return flat


def _with_lists(value: Any) -> Any:
  """Tuples as lists, at any depth: `optimizer.rules` holds pairs."""
  if isinstance(value, dict):
    return {key: _with_lists(each) for key, each in value.items()}
  if isinstance(value, list | tuple):
    return [_with_lists(each) for each in value]
  return value


def to_json(config: Config) -> str:
  """Returns the resolved config as indented JSON."""
  return json.dumps(config.to_dict(), indent=2) + '\n'


def from_dict(values: dict[str, Any]) -> Config:
  """Returns a completed config from the values that `to_json` wrote.

  `complete` refuses keys that this version does not have any more.
  """
  return complete(ConfigDict(values))
