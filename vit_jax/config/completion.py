"""Completes configs with the defaults of signatures, and checks their keys.

Every section of a config contains the keyword arguments of one constructor.
`SECTIONS` determines the constructor, together with the section's `name` if
there are several. Defaults are only in the signatures. `complete`, which every
config file calls last, copies them into the config, so that each key can be
overridden on the command line.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict, config_dict

from vit_jax.config import durations, plugins
from vit_jax.config.arguments import parse_arg as parse_arg  # for config files
from vit_jax.config.plugins import Nested
from vit_jax.config.sections import DEFAULT_NAMES, MARKS
from vit_jax.config.values import FlagText, is_none, typed
from vit_jax.errors import UserError, check_range, closest

Config = Any  # a completed ml_collections.ConfigDict

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


@plugins.operational(
  'early_stop_patience', 'paper_core_days', 'position_resize'
)
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


@plugins.operational('leave_out')
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
  result = ConfigDict(_completed('', plugins.keys(top_level), top))
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
  has_name = '{name}' in mark.pattern
  if not isinstance(values, Mapping | ConfigDict):
    key = 'name' if has_name else 'KEY'
    if mark.many:
      key = f'NAME.{key}'
    raise UserError(
      f'config.{path} is {values!r}; it is a section: dict(key=value, …) in a '
      f'config file, and --config.{path}.{key}=… as a flag.'
    )
  if mark.many:
    member = dataclasses.replace(mark, many=False)
    return ConfigDict(
      {
        name: complete_section(f'{path}.{name}', member, section, drop_unknown)
        for name, section in values.items()
      }
    )
  arguments, name, head = dict(values), '', {}
  if has_name:
    name = arguments.pop('name', DEFAULT_NAMES.get(path))
    if not isinstance(name, str):
      raise UserError(
        f'config.{path}.name is missing; it selects the class to build, for '
        f'example by --config.{path}.name=….'
      )
    head = {'name': str(name)}
  keys = mark.keys(name)
  if drop_unknown or isinstance(name, FlagText):
    arguments = {
      key: value
      for key, value in arguments.items()
      if key in keys or isinstance(value, FlagText)
    }
  return ConfigDict(head | _completed(f'{path}.', keys, arguments))


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
    mark = plugins.nested(parameter.annotation)
    kind, optional = plugins.value_type(parameter.annotation)
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
  synonym = SYNONYMS.get(key.rpartition('.')[2])
  if synonym:  # a similar spelling in this section would mislead
    hint = f'did you mean --{synonym}?'
  else:
    hint = f'{closest(key, known)}.'
  return UserError(f'config.{prefix}{key} is not a key; {hint}')


def flatten(config: Any, prefix: str = '') -> dict[str, Any]:
  """Returns a flat dict {'model.depth': 24, …}, with tuples as lists."""
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
