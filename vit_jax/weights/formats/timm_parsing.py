"""Derives a model from arrays with timm's names and the settings next to them.

`parse` starts with the keys of the model that the arrays determine
(`vit.section`), and adds the keys of which only the settings know: rotations,
pooling, options of an architecture, heads and positions. The functions below it
return the keys that they add; none changes its arguments.
"""

import dataclasses
import logging
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models.layers import EPSILON
from vit_jax.weights import foreign
from vit_jax.weights import names as names_lib
from vit_jax.weights.foreign import ParsedWeights
from vit_jax.weights.formats import swin, timm_layouts, timm_models, vit
from vit_jax.weights.formats.timm_models import Architecture
from vit_jax.weights.metadata import ModelMetadata
from vit_jax.weights.names import NameMap

log = logging.getLogger('vit_jax')
Arrays = Mapping[str, np.ndarray]  # of a file, by name
Model = dict[str, Any]  # keys of the `model` section
_LAYER = 'encoder/layers/'
NAMES = NameMap(names_lib.table('timm'))
# Names of models without a bias of the keys
WITHOUT_KEY_BIAS = NameMap(
  {
    **NAMES.names,
    f'{_LAYER}attention/query/bias': 'blocks.{i}.attn.q_bias',
    f'{_LAYER}attention/value/bias': 'blocks.{i}.attn.v_bias',
  }
)
PATCH_BIAS = 'patch_embed.proj.bias'
_KIND = "a Vision Transformer with timm's names"
_TORCH_EPSILON = 1e-5  # PyTorch's default
# Size of images of DINOv3, whose arrays do not depend on it
_DINOV3_SIZE = (256, 256)
# {description: pattern} of arrays that an encoder does not use.
_OTHER_HEAD = 'a head that is not a single matrix, and has to be replaced'
_LEFT_OUT = {
  'parts of DINO or DINOv3': r'(\w+_)?head\.(mlp|last_layer)\b|local_cls_norm',
  _OTHER_HEAD: r'head\.(?!(weight|bias)$)',
}


@dataclasses.dataclass(frozen=True)
class Settings:
  """Settings next to a file that determine its model.

  Attributes:
    args: timm's `model_args`.
    image_size: (height, width), pixels; None if unknown.
    pool: timm's `global_pool`; None if unknown.
    architecture: architecture that is specified by the config, the user or the
      name of the file.
    is_noted: whether they are notes of this package, which contain every key of
      the model that the arrays do not show.
  """

  args: Mapping[str, Any]
  image_size: tuple[int, int] | None
  pool: str | None = None
  architecture: Architecture | None = None
  is_noted: bool = False

  def fitting(self, model: Mapping[str, Any]) -> Architecture | None:
    """Returns the architecture if it has the width and depth of a model.

    A config may contain the name of an architecture with other sizes.
    """
    found = self.architecture
    sizes = model['width'], model['depth']
    return found if found and (found.width, found.depth) == sizes else None


def parse(path: str, arrays: Arrays, settings: Settings) -> ParsedWeights:
  """Parses a file, given its arrays and settings.

  Args:
    path: path of the file, for messages.
    arrays: all arrays of the file.
    settings: settings next to the file.

  Raises:
    UserError: the arrays are not those of a Vision Transformer or a Swin, or
      contradict the settings.
  """
  if swin.is_swin(arrays):
    return swin.parse(path, arrays, settings.args, settings.image_size)
  named = settings.architecture
  arrays = _encoder_arrays(path, arrays)
  rotations = timm_layouts.rotations(arrays, named)
  arrays = timm_layouts.joined(arrays)
  has_key_bias = 'blocks.0.attn.q_bias' not in arrays
  names = NAMES if has_key_bias else WITHOUT_KEY_BIAS
  model = vit.section(path, arrays, names, _KIND) | rotations
  if 'pos_embed' not in arrays:
    if not rotations and not settings.is_noted:
      raise UserError(
        f'{path} has no pos_embed, and its arrays do not show which rotary '
        'positions the model has instead: name its architecture, as in '
        'timm:ARCHITECTURE:PATH.'
      )
    model['position'] = 'none'
  pooling = _pooling(path, model, settings)
  model |= pooling.keys
  model |= _architecture_options(pooling.name, named)
  model['num_heads'] = _num_heads(pooling.name, model, settings)
  # The order of the channels, see `Architecture.rope_order`. Without a named
  # architecture, 'mixed' follows from `rope.freqs`, as in timm.
  order = 'columns' if model.get('rope') == 'mixed' else 'halves'
  if named is not None:
    order = named.rope_order
  if order != 'halves':
    arrays = timm_layouts.planes_apart(
      path, arrays, model['num_heads'], model['rope'], order == 'columns'
    )
  # CLIP and DINOv3 have PyTorch's ε.
  from_torch = 'pre_norm' in model or model.get('rope') == 'centered'
  size = settings.image_size or (named.size if named else _DINOV3_SIZE)
  properties = ModelMetadata(
    size,
    norm_eps=_TORCH_EPSILON if from_torch else EPSILON,
    position_resize='bicubic',
  )
  if 'pos_embed' in arrays:
    positions = _positions(path, arrays, model, settings)
    if not positions.with_prefix:
      model['prefix_positions'] = False
    if positions.only_class:
      arrays = foreign.without_class_position(arrays, 'cls_token', 'pos_embed')
    properties = dataclasses.replace(
      properties,
      image_size=positions.image_size,
      other_patches=positions.other_patches,
    )
  return ParsedWeights(arrays, names, model, properties)


def _encoder_arrays(path: str, arrays: Arrays) -> dict[str, np.ndarray]:
  """Returns the arrays that an encoder uses, with timm's names.

  Args:
    path: path of the file, for messages.
    arrays: all arrays of the file.
  """
  result = names_lib.renamed(arrays, names_lib.aliases('authors'))
  for what, pattern in _LEFT_OUT.items():
    unused = [name for name in result if re.match(pattern, name)]
    if unused:
      level = logging.WARNING if what == _OTHER_HEAD else logging.INFO
      log.log(level, '%s: left out %s, %d arrays', path, what, len(unused))
    for name in unused:
      del result[name]
  if 'norm_pre.weight' in result:  # CLIP's patch embedding has no bias
    width = result['norm_pre.weight'].shape
    result.setdefault(PATCH_BIAS, np.zeros(width, np.float32))
  return result


class _Pooling(NamedTuple):
  """Pooling of a file.

  Attributes:
    name: 'token', 'map', 'gap', 'max' or 'avgmax', also where `fc_norm` implies
      'gap'.
    keys: keys of the model whose values differ from what the arrays show.
  """

  name: str
  keys: Model


def _pooling(path: str, model: Model, settings: Settings) -> _Pooling:
  """Returns the pooling according to the settings, or else to the arrays.

  Args:
    path: path of the file, for messages.
    model: keys that the arrays determine.
    settings: settings of the file.

  Raises:
    UserError: the arrays are those of another pooling than the settings.
  """
  architecture = settings.fitting(model)
  specified = settings.pool or getattr(architecture, 'pool', None)
  shown = 'gap' if 'fc_norm' in model else model['pool']
  wanted = 'gap' if specified == 'avg' else (specified or shown)
  if wanted == shown:
    return _Pooling(shown, {})
  if wanted not in ('gap', 'max', 'avgmax') or model['pool'] == 'map':
    raise UserError(
      f'the settings of {path} specify the pooling {specified!r}, but its '
      f'arrays are those of {shown!r}: correct the settings.'
    )
  keys: Model = dict(pool=wanted)
  if model['pool'] == 'token':
    keys['class_token'] = True
  return _Pooling(wanted, keys)


def _architecture_options(pool: str, named: Architecture | None) -> Model:
  """Returns the keys that only the table of architectures contains."""
  if named is None:
    return {}
  keys: Model = dict(
    final_norm=bool(named.final_norm), post_norm='Post' in named.block
  )
  if pool == 'map':
    keys['map_heads'] = named.map_heads or None
    keys['map_prefix'] = bool(named.map_prefix)
  return keys


def _num_heads(pool: str, model: Model, settings: Settings) -> int:
  """Returns the number of heads of the first source that contains it."""
  architecture = settings.fitting(model)
  if architecture is not None:
    most_probable = architecture.num_heads
  else:
    timms = 'avg' if pool == 'gap' else pool
    most_probable = timm_models.num_heads(model['width'], model['depth'], timms)
  given = settings.args.get('num_heads') or model.get('num_heads')
  return given or most_probable


class _Positions(NamedTuple):
  """What the position embeddings of a file are for.

  Attributes:
    image_size: (height, width) of images that they fit, pixels.
    with_prefix: whether all tokens before the patches have positions.
    only_class: whether the class token has one, and other tokens have none.
    other_patches: number of patches, if another grid may be right as well;
      None if the settings contain the size.
  """

  image_size: tuple[int, int]
  with_prefix: bool
  only_class: bool
  other_patches: int | None


def _positions(
  path: str, arrays: Arrays, model: Model, settings: Settings
) -> _Positions:
  """Returns which tokens have positions, and the images that they fit.

  Depending on the source, there are positions for all tokens, only for the
  patches, or (in DINOv2's repository) for the patches and the class token.

  Args:
    path: path of the file, for messages.
    arrays: arrays with timm's names.
    model: keys of the model.
    settings: settings of the file.

  Raises:
    UserError: in none of these cases does the number of positions fit a square
      of patches or the image size in the settings.
  """
  specified, named = settings.image_size, settings.architecture
  count = names_lib.shape_of(path, arrays, 'pos_embed', 3, _KIND)[1]
  patch_size = model['patch_size']
  cls = int('cls_token' in arrays)
  prefix = cls + model.get('distilled', 0) + model.get('registers', 0)
  height, width = specified or (0, 0)
  wanted = (height // patch_size, width // patch_size)
  # The first number of other tokens is used with which the remaining positions
  # are those of a whole grid.
  for others in dict.fromkeys((prefix, 0, cls)):
    patches = count - others
    side = math.isqrt(max(patches, 0))
    grid = wanted if math.prod(wanted) == patches else (side, side)
    if side and math.prod(grid) == patches:
      break
  else:
    raise UserError(
      f'{path}: {count} positions are not a square of patches, with or without '
      f'{prefix} other tokens; set input_size in a config.json next to it.'
    )
  size = (grid[0] * patch_size, grid[1] * patch_size)
  # Otherwise the grid is a guess: the same number of positions may be those of
  # a grid that is not square, or of `prefix` other tokens and fewer patches.
  is_known = size in (specified, named.size if named else None)
  return _Positions(
    image_size=size,
    with_prefix=others == prefix,
    only_class=0 < others < prefix,
    other_patches=None if is_known else count - prefix,
  )
