"""Properties of weights that their arrays do not determine, and JSON settings.

The settings of other projects and the notes that this package stores next to
weights are not trusted. A table of rules contains the allowed values of each
key, so that other modules do not have to check them.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from vit_jax.arrays.pixels import NONE
from vit_jax.data.augment.transforms import square
from vit_jax.errors import UserError
from vit_jax.files import paths
from vit_jax.models.layers import ACTIVATIONS, EPSILON
from vit_jax.models.positions import METHODS
from vit_jax.models.swin import RULES as WINDOW_RULES

# Kind of GELU by its name in configs of other projects. The last name of a kind
# is that of transformers, which is written.
GELUS = {
  'gelu': 'exact',
  'gelu_new': 'tanh',
  'gelu_tanh': 'tanh',
  'gelu_pytorch_tanh': 'tanh',
  'quick_gelu': 'quick',
  'relu': 'relu',
  'swish': 'silu',
  'silu': 'silu',
}
ACTIVATION_NAMES = {kind: name for name, kind in GELUS.items()}


class Rule(NamedTuple):
  """Condition for the value of one key.

  Attributes:
    allowed: description of the allowed values, which follows "it must be".
    holds: function that returns whether a value is allowed.
  """

  allowed: str
  holds: Callable[[Any], bool]


def number(low: float, high: float, kind: Any = int | float) -> Rule:
  """Returns a rule for numbers in [low, high]; `kind=int` for integers."""
  return Rule(
    f'{"an integer" if kind is int else "a number"} from {low:g} to {high:g}',
    lambda value: (
      isinstance(value, kind)
      and not isinstance(value, bool)
      and low <= value <= high
    ),
  )


def choice(names: Iterable[str]) -> Rule:
  """Returns a rule for one of several strings."""
  names = tuple(names)
  return Rule(f'one of {", ".join(names)}', lambda value: value in names)


def several(rule: Rule) -> Rule:
  """Returns a rule for lists of any length."""
  return Rule(
    f'a list of elements, each {rule.allowed}',
    lambda value: (
      isinstance(value, list | tuple) and all(map(rule.holds, value))
    ),
  )


def pair(size: Any) -> tuple[int, int]:
  """Returns (height, width) of a size: a number, a list or an object."""
  if isinstance(size, Mapping):
    return size['height'], size['width']
  sides = [size] if isinstance(size, int) else list(size)
  return sides[0], sides[-1]


def _is_size(value: Any) -> bool:
  """Returns whether `pair` can convert a value."""
  if isinstance(value, dict):
    value = [value.get('height'), value.get('width')]
  sides = value if isinstance(value, list | tuple) else [value]
  return len(sides) in (1, 2) and all(map(COUNT.holds, sides))


def _are_texts(value: Any) -> bool:
  return isinstance(value, dict) and all(map(TEXT.holds, value.values()))


TEXT = Rule('a string', lambda value: isinstance(value, str))
FLAG = Rule('true or false', lambda value: isinstance(value, bool))
# The maximum prevents running out of memory.
COUNT = number(1, 2**15, int)
COUNTS = several(COUNT)
_SIZE = Rule(
  f'a number of pixels, a list of one or two, or {{height, width}}, each '
  f'{COUNT.allowed}',
  _is_size,
)
# Objects whose keys are validated, too.
_OBJECTS = ('model_args', 'pretrained_cfg', 'preprocess', 'vit_jax_preprocess')
# Keys of this package's notes, of timm's config.json, and of Hugging Face's
# config.json, preprocessor_config.json and index of shards. The same key has
# the same meaning in all of them, except for `num_heads` of a Swin.
_KEYS: tuple[tuple[Rule, tuple[str, ...]], ...] = (
  (TEXT, ('architecture', 'model_type', 'global_pool')),
  (TEXT, ('crop_mode', 'interpolation', 'resize')),
  (several(TEXT), ('class_names', 'label_names')),
  (FLAG, ('do_rescale', 'do_normalize', 'do_center_crop', 'norm_pix_loss')),
  (COUNT, ('num_heads', 'num_attention_heads', 'decoder_num_attention_heads')),
  (COUNT, ('window_size', 'embed_dim')),
  (COUNTS, ('depths',)),
  (_SIZE, ('image_size', 'crop_size')),
  # `epsilon` is the name of `norm_eps` in older files.
  (number(0, 1), ('norm_eps', 'epsilon', 'layer_norm_eps')),
  (number(0.01, 1), ('crop_pct', 'central_fraction')),
  (number(1.001, 1e9), ('rope_theta',)),
  (number(1e-6, 1e6), ('rescale_factor',)),
  (number(0, 5, int), ('resample',)),
  (several(number(-10, 10)), ('mean', 'image_mean')),  # one for each channel
  (several(number(1e-3, 10)), ('std', 'image_std')),
  (choice(ACTIVATIONS), ('gelu',)),
  (choice(GELUS), ('act_layer', 'hidden_act')),
  (choice(METHODS), ('position_resize',)),
  (choice(WINDOW_RULES), ('window_rule',)),
)
RULES: Mapping[str, Rule] = {
  **{key: rule for rule, keys in _KEYS for key in keys},
  'input_size': Rule(
    'a list of channels, height and width',
    lambda value: COUNTS.holds(value) and len(value) == 3,
  ),
  'size': Rule(
    f'{_SIZE.allowed}, or {{shortest_edge}}',
    lambda value: (
      _is_size(value)
      or isinstance(value, dict)
      and COUNT.holds(value.get('shortest_edge'))
    ),
  ),
  'id2label': Rule(
    'an object of class names, whose keys are numbers of up to 9 digits',
    lambda value: (
      _are_texts(value)
      and all(key.isdecimal() and len(key) < 10 for key in value)
    ),
  ),
  'weight_map': Rule(
    'an object of file names, without directories',
    lambda value: (
      _are_texts(value) and not any('/' in file for file in value.values())
    ),
  ),
}


def validated(
  path: str | os.PathLike,
  values: Any,
  required: Sequence[str] = (),
  rules: Mapping[str, Rule] = RULES,
  prefix: str = '',
) -> dict[str, Any]:
  """Checks settings, and returns them without keys whose value is null.

  Args:
    path: path of the file, for messages.
    values: settings; the values of keys without a rule are not checked.
    required: keys that must be present.
    rules: conditions by key.
    prefix: start of the keys' names in messages.

  Raises:
    UserError: a value is not allowed, or a required key is missing.
  """
  if not isinstance(values, Mapping):
    raise _wrong(path, prefix.rstrip('.') or 'the content', values, 'an object')
  present = {key: value for key, value in values.items() if value is not None}
  missing = [key for key in required if key not in present]
  if missing:
    raise UserError(f'{path} lacks {", ".join(missing)}.')
  for key, value in present.items():
    name = f'{prefix}{key}'
    if key in _OBJECTS:
      present[key] = validated(path, value, (), rules, f'{name}.')
    elif key in rules and not rules[key].holds(value):
      raise _wrong(path, name, value, rules[key].allowed)
  return present


def _wrong(
  path: str | os.PathLike, key: str, value: Any, allowed: str
) -> UserError:
  text = repr(value)
  shown = text if len(text) <= 60 else f'{text[:57]}...'
  return UserError(
    f'{path}: {key} is {shown}; it must be {allowed}. Correct the file, or '
    'fetch it again.'
  )


def parse(path: str | os.PathLike, text: str) -> dict[str, Any]:
  """Parses a JSON object.

  Args:
    path: path of the file that contains the text, for messages.
    text: JSON.

  Raises:
    UserError: the text is not a JSON object.
  """
  try:
    return validated(path, json.loads(text), rules={})
  except (ValueError, RecursionError) as error:
    raise UserError(f'{path} is not valid JSON: {error}.') from error


def read(path: str | os.PathLike) -> dict[str, Any]:
  """Returns the JSON object in a file; {} if the file does not exist.

  Args:
    path: path of the file, local or gs://.

  Raises:
    UserError: the file cannot be read, or is not a JSON object.
  """
  file = paths.locate(path)
  if not file.exists():
    return {}
  try:
    return parse(path, file.read_text())
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(f'{path} cannot be read: {error}.') from error


# Fields of `ModelMetadata` that notes do not contain.
_NOT_STORED = ('known_from', 'assumed', 'other_patches')


@dataclasses.dataclass(frozen=True)
class ModelMetadata:
  """Properties of weights that their arrays do not determine.

  Attributes:
    image_size: (height, width) of the images that the model expects, pixels.
    known_from: source of the values, for the log.
    assumed: whether the values are assumptions, which are logged as a warning.
    gelu: 'exact', 'tanh' or 'quick'; None for a model without GELU.
    norm_eps: epsilon of LayerNorm; None for a model without LayerNorm.
    mean: mean of each channel of pixels in [0, 1].
    std: standard deviation of each channel of pixels in [0, 1].
    preprocess: config section of the evaluation's transform.
    class_names: names in the order of the head's outputs; empty if unknown.
    position_resize: method by which the project interpolates positions, see
      `resizing.METHODS`; None for the method of the model.
    other_patches: number of patches for which the positions fit as well, in a
      grid that is not square; None if the image size is certain.
  """

  image_size: tuple[int, int]
  known_from: str = ''
  assumed: bool = False
  gelu: str | None = 'exact'
  norm_eps: float | None = EPSILON
  mean: Sequence[float] = NONE[0]
  std: Sequence[float] = NONE[1]
  preprocess: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  class_names: Sequence[str] = ()
  position_resize: str | None = None
  other_patches: int | None = None

  def updated(self, **values: Any) -> 'ModelMetadata':
    """Returns a copy with other values, except for those that are None."""
    given = {k: value for k, value in values.items() if value is not None}
    return dataclasses.replace(self, **given)

  @classmethod
  def of(cls, model: Any, about: Mapping[str, Any]) -> 'ModelMetadata':
    """Returns the metadata of weights to write.

    Args:
      model: model of the weights.
      about: description of the weights, see `Pretrained.about`.
    """
    return cls(
      image_size=square(tuple(about['image_size'])),
      gelu=getattr(model, 'gelu', None),
      norm_eps=getattr(model, 'norm_eps', None),
      preprocess=about.get('preprocess', {}),
      class_names=list(about.get('class_names', ())),
      position_resize=about.get('position_resize'),
      **about.get('normalization', {}),
    )

  def notes(self) -> dict[str, Any]:
    """Returns the values as JSON, to be stored next to weights."""
    return {
      key: value
      for key, value in dataclasses.asdict(self).items()
      if value is not None and key not in _NOT_STORED
    }


def read_notes(path: str, notes: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the values in notes, by the names of `ModelMetadata`'s fields.

  The key `model_args` contains keys of the model's section.

  Args:
    path: path of the file with the notes, for messages.
    notes: content of the notes.

  Raises:
    UserError: a value is not allowed, or a key is unknown.
  """
  values = validated(path, notes)
  allowed = {each.name for each in dataclasses.fields(ModelMetadata)}
  unknown = sorted(values.keys() - allowed - {'epsilon', 'model_args'})
  if unknown:
    raise UserError(
      f'{path} has the keys {", ".join(unknown)}, which this version does not '
      'read: load it with the version of vit_jax that wrote it.'
    )
  if 'epsilon' in values:
    values['norm_eps'] = values.pop('epsilon')
  if 'image_size' in values:
    values['image_size'] = pair(values['image_size'])
  return values
