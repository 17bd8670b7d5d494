"""Properties of weights that their arrays do not determine, and JSON settings.

The settings of other projects and the notes that this package stores next to
weights are not trusted. A table contains the type of each key, so that other
modules do not have to check the values.
"""

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import pydantic
from pydantic import Field

from vit_jax.arrays.pixels import NONE
from vit_jax.errors import UserError
from vit_jax.files import paths
from vit_jax.models.layers import ACTIVATIONS, EPSILON
from vit_jax.models.positions import METHODS
from vit_jax.models.swin import RULES as WINDOW_RULES
from vit_jax.weights.description import Description

# Kind of GELU by its name in configs of other projects. The last name of a kind
# is that of transformers, which is written.
GELUS = {
  'gelu_python': 'exact',
  'gelu': 'exact',
  'gelu_new': 'tanh',
  'gelu_fast': 'tanh',
  'gelu_accurate': 'tanh',
  'gelu_python_tanh': 'tanh',
  'gelu_tanh': 'tanh',
  'gelu_pytorch_tanh': 'tanh',
  'quick_gelu': 'quick',
  'relu': 'relu',
  'swish': 'silu',
  'silu': 'silu',
}
ACTIVATION_NAMES = {kind: name for name, kind in GELUS.items()}


# The maximum prevents running out of memory.
Count = Annotated[int, Field(ge=1, le=2**15, strict=True)]


class _Sides(pydantic.BaseModel):
  """Sides of an image in pixels."""

  height: Count
  width: Count


class _Shortest(pydantic.BaseModel):
  """Length of the shorter side of an image in pixels."""

  shortest_edge: Count


_Size = (
  Count | Annotated[list[Count], Field(min_length=1, max_length=2)] | _Sides
)


def _number(low: float, high: float) -> Any:
  """Returns the type of numbers from `low` to `high`."""
  return Annotated[float, Field(ge=low, le=high)]


def _choice(names: Iterable[str]) -> Any:
  """Returns the type of text that is one of the names."""
  return Annotated[str, Field(pattern=f'^({"|".join(names)})$')]


# Objects whose keys are validated, too.
_OBJECTS = (
  'model_args',
  'pretrained_cfg',
  'preprocess',
  'vision_config',
  'text_config',
  'vit_jax_preprocess',
)
# Types of the keys of this package's notes, of timm's config.json, of PEFT's
# adapter_config.json, and of Hugging Face's config.json, index of shards and
# preprocessor_config.json. The same key has the same meaning in all of them,
# except for `num_heads` of a Swin.
_TYPES: tuple[tuple[Any, tuple[str, ...]], ...] = (
  (dict, _OBJECTS),
  (str, ('architecture', 'model_type', 'global_pool')),
  (str, ('crop_mode', 'interpolation', 'resize')),
  (list[str], ('class_names', 'label_names')),
  (bool, ('do_rescale', 'do_normalize', 'do_center_crop', 'norm_pix_loss')),
  (Count, ('num_heads', 'num_attention_heads', 'decoder_num_attention_heads')),
  (Count, ('window_size', 'embed_dim')),
  (list[Count], ('depths',)),
  (_Size, ('image_size', 'crop_size')),
  (_Size | _Shortest, ('size',)),
  (Annotated[list[Count], Field(min_length=3, max_length=3)], ('input_size',)),
  (_number(0, 1), ('norm_eps', 'layer_norm_eps')),
  (_number(0.01, 1), ('crop_pct', 'central_fraction')),
  (_number(1.001, 1e9), ('rope_theta',)),
  (_number(0, 1e6), ('lora_alpha',)),
  (_number(1e-6, 1e6), ('rescale_factor',)),
  (Annotated[int, Field(ge=0, le=5)], ('resample',)),
  (list[_number(-10, 10)], ('mean', 'image_mean')),  # one for each channel
  (list[_number(1e-3, 10)], ('std', 'image_std')),
  (_choice(ACTIVATIONS), ('gelu',)),
  (_choice(GELUS), ('act_layer', 'hidden_act')),
  (_choice(METHODS), ('position_resize',)),
  (_choice(WINDOW_RULES), ('window_rule',)),
  (dict[Annotated[str, Field(pattern='^[0-9]{1,9}$')], str], ('id2label',)),
  # Names of files, without directories
  (dict[str, Annotated[str, Field(pattern='^[^/]*$')]], ('weight_map',)),
)
_FIELDS: Any = {key: (kind, None) for kind, keys in _TYPES for key in keys}
SETTINGS = pydantic.create_model(
  'Settings',
  __config__=pydantic.ConfigDict(
    strict=True, extra='allow', allow_inf_nan=False, protected_namespaces=()
  ),
  **_FIELDS,
)
# The settings of a Swin, which has a number of heads for each stage.
SWIN_SETTINGS = pydantic.create_model(
  'SwinSettings', __base__=SETTINGS, num_heads=(list[Count], None)
)


def pair(size: Any) -> tuple[int, int]:
  """Returns (height, width) of a size: a number, a list or an object."""
  if isinstance(size, Mapping):
    return size['height'], size['width']
  sides = [size] if isinstance(size, int) else list(size)
  return sides[0], sides[-1]


def validated(
  path: str | os.PathLike,
  values: Mapping[str, Any],
  required: Sequence[str] = (),
  settings: type[pydantic.BaseModel] = SETTINGS,
  prefix: str = '',
) -> dict[str, Any]:
  """Checks settings, and returns them without keys whose value is null.

  Args:
    path: path of the file, for messages.
    values: settings; the values of unknown keys are not checked.
    required: keys that must be present.
    settings: types of the keys.
    prefix: start of the keys' names in messages.

  Raises:
    UserError: a value is not allowed, or a required key is missing.
  """
  present = {key: value for key, value in values.items() if value is not None}
  missing = [key for key in required if key not in present]
  if missing:
    raise UserError(f'{path} lacks {", ".join(missing)}.')
  try:
    settings.model_validate(present)
  except pydantic.ValidationError as error:
    # A key of several types, such as a size, has an error for each of them.
    key = error.errors()[0]['loc'][0]
    reasons = [e['msg'] for e in error.errors() if e['loc'][0] == key]
    name = f'{prefix}{key}'
    raise _wrong(
      path, name, present[str(key)], ', or: '.join(reasons)
    ) from None
  for key in present.keys() & _OBJECTS:
    inner = f'{prefix}{key}.'
    present[key] = validated(path, present[key], (), settings, inner)
  return present


def _wrong(
  path: str | os.PathLike, key: str, value: Any, reason: str
) -> UserError:
  """Returns the error for a value that is not allowed, shortened."""
  text = repr(value)
  shown = text if len(text) <= 60 else f'{text[:57]}...'
  return UserError(
    f'{path}: {key} is {shown}. {reason[:300]}. Correct the file, or fetch it '
    'again.'
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
    values = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise UserError(f'{path} is not valid JSON: {error}.') from error
  if not isinstance(values, dict):
    raise _wrong(path, 'the content', values, 'Input should be an object')
  return values


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
      `positions.METHODS`; None for the method of the model.
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
    """Returns a copy with other values; None leaves a value as it is."""
    given = {k: value for k, value in values.items() if value is not None}
    return dataclasses.replace(self, **given)


def notes(description: Description) -> dict[str, Any]:
  """Returns the values as JSON that are stored next to weights.

  They are those of `ModelMetadata` that are not None.
  """
  model = description.built_model
  mean, std = description.statistics or NONE
  values = {
    'image_size': description.image_size,
    'gelu': getattr(model, 'gelu', None),
    'norm_eps': getattr(model, 'norm_eps', None),
    'mean': mean,
    'std': std,
    'preprocess': description.preprocess,
    'class_names': description.class_names,
    'position_resize': description.position_resize,
  }
  return {key: value for key, value in values.items() if value is not None}


def read_notes(
  path: str, notes: Mapping[str, Any], required: Sequence[str] = ()
) -> dict[str, Any]:
  """Returns the values in notes, by the names of `ModelMetadata`'s fields.

  The key `model_args` contains keys of the model's section.

  Args:
    path: path of the file with the notes, for messages.
    notes: content of the notes.
    required: keys that must be present.

  Raises:
    UserError: a value is not allowed, or a key is unknown.
  """
  values = validated(path, notes, required)
  allowed = {each.name for each in dataclasses.fields(ModelMetadata)}
  unknown = sorted(values.keys() - allowed - {'model_args'})
  if unknown:
    raise UserError(
      f'{path} has the keys {", ".join(unknown)}, which this version does not '
      'read: load it with the version of vit_jax that wrote it.'
    )
  if 'image_size' in values:
    values['image_size'] = pair(values['image_size'])
  return values
