"""Weights of Google's JAX projects: `.npz`.

Official Vision Transformers, hybrids and BiT's ResNets, and big_vision's plain
Vision Transformers can be read. `FILE.npz` is written with the official names,
with Flax's original numbering of submodules, and `big_vision:FILE.npz` with
those of big_vision. `FILE.npz.json` contains settings that the arrays do not
determine, and is read only by this package.

The official files and those of big_vision differ in the position embedding: in
files of big_vision, its name has no prefix and it is added before the class
token is prepended, or there is none (sincos2d). Only big_vision has attention
pooling, and scanned layers, whose arrays are stacked.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import re
import zipfile
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from etils import epath
from numpy.lib import npyio

from vit_jax.arrays import tree
from vit_jax.errors import UserError
from vit_jax.files import paths
from vit_jax.models.layers import EPSILON
from vit_jax.models.resnet import stride_of
from vit_jax.weights import foreign, metadata
from vit_jax.weights import names as names_lib
from vit_jax.weights.contract import Pretrained
from vit_jax.weights.description import Description
from vit_jax.weights.foreign import ParsedWeights
from vit_jax.weights.formats import damage, vit
from vit_jax.weights.metadata import ModelMetadata
from vit_jax.weights.names import NameMap

log = logging.getLogger('vit_jax')
PyTree = Any
_PREFIX = re.compile(r'(params|opt/target)/')  # prefix of big_vision's names
# Image size (pixels) of models whose arrays do not determine it: BiT, and
# Vision Transformers without learned positions.
_DEFAULT_SIZE = 224
_DEFAULTS = {'gelu': 'tanh', 'norm_eps': EPSILON}
_DIGEST = 'vit_jax_arrays'  # key of the notes: digest of the arrays
_KIND = 'a plain Vision Transformer'
_BLOCK = 'Transformer/encoderblock'
_OFFICIAL_POSITION = 'Transformer/posembed_input/pos_embedding'
_POSITION = 'pos_embedding'  # in big_vision's files
_ROOT = 'conv_root/kernel'  # first convolution of the stem of a hybrid
_BIT_ROOT = 'resnet/root_block/standardized_conv2d/kernel'
_BIT_HEAD = 'resnet/head/conv2d/kernel'
_ROOT_WIDTH = 64  # channels of the root of a ResNet of width_factor 1


def matches(path: str) -> bool | None:
  """Returns True if a path has the ending of the format, or else None."""
  return path.endswith('.npz') or None


def load(path: str, matched: Any = None) -> Pretrained:
  """Describes the weights in a file.

  Args:
    path: path of the file, local or gs://.
    matched: not used.

  Raises:
    UserError: the file cannot be read, or its arrays are not those of a
      supported model.
  """
  del matched
  arrays, digest = read(path)
  notes = _read_notes(path, digest)
  parsed = _parsed(path, arrays, notes)
  return foreign.imported(path, parsed._replace(own_pixels=True))


def _weights(
  path: str, arrays: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
  """Returns the weights in a file, without prefixes and dimensions of 1.

  Group norms may be `[1, 1, 1, channels]`; BiT's head is a 1x1 convolution.
  """
  prefixed = [name for name in arrays if _PREFIX.match(name)]
  if prefixed:
    others = sorted({n.partition('/')[0] for n in arrays if n not in prefixed})
    if others:
      log.info('%s: left out %s', path, ', '.join(others))
    arrays = {_PREFIX.sub('', name, count=1): arrays[name] for name in prefixed}

  def flat(name: str, array: np.ndarray) -> np.ndarray:
    if array.ndim == 4 and array.shape[:3] == (1, 1, 1) and '/gn' in f'/{name}':
      return array.reshape(-1)
    if name == _BIT_HEAD and array.ndim == 4 and array.shape[:2] == (1, 1):
      return array[0, 0]
    return array

  return {name: flat(name, array) for name, array in arrays.items()}


def _parsed(
  path: str, stored: Mapping[str, np.ndarray], notes: Mapping[str, Any]
) -> ParsedWeights:
  """Parses a BiT ResNet, or a Vision Transformer, optionally with a stem.

  Args:
    path: path of the file, for messages.
    stored: all arrays of the file.
    notes: result of `metadata.read_notes`.

  Raises:
    UserError: an array that determines a size is missing or has another rank.
  """
  arrays, values = _weights(path, stored), dict(notes)
  noted = values.pop('model_args', {})
  properties = ModelMetadata(
    (_DEFAULT_SIZE, _DEFAULT_SIZE),
    known_from="the authors' JAX code",
    gelu='tanh',
    position_resize='aligned',
  ).updated(**values)
  if _BIT_ROOT in arrays:
    model = _resnet_section(path, arrays, _BIT_ROOT)
    names = NameMap(names_lib.table('bit'), torch=False)
    return ParsedWeights(
      arrays, names, model, properties, _DEFAULTS, noted=noted
    )
  # See `_read_names`.
  is_original = any('/MultiHeadDotProductAttention_1/' in n for n in arrays)
  is_stacked = f'{_BLOCK}/LayerNorm_0/scale' in arrays
  names = _read_names(is_original, is_stacked)
  model = vit.section(path, arrays, names, _KIND)
  side = model['patch_size']  # of a patch, pixels of the image
  if _ROOT in arrays:
    # Patches are cut from the map of the stem, so these are channels of the
    # map, and a patch covers more pixels of the image.
    model.pop('channels', None)
    model['stem'] = _resnet_section(path, arrays, _ROOT)
    side *= stride_of(model['stem']['depths'])
  is_official = _OFFICIAL_POSITION in arrays
  name = _OFFICIAL_POSITION if is_official else _POSITION
  if name not in arrays:
    model['position'] = 'sincos2d'
  else:
    count = names_lib.shape_of(path, arrays, name, 3, _KIND)[1]
    # 1 if the model adds a position to the class token
    prefix = int('cls' in arrays and noted.get('prefix_positions', True))
    if 'image_size' not in values:
      patches = count - prefix if is_official else count
      rows = math.isqrt(max(patches, 0))
      if rows**2 != patches or not rows:
        raise UserError(
          f'{path}: {patches} positions are not a square of patches: put the '
          f'file {path}.json next to it, which contains the size of its images.'
        )
      size = (rows * side, rows * side)
      properties = dataclasses.replace(properties, image_size=size)
    # Files of big_vision lack the position of the class token, which becomes
    # zeros.
    patches = math.prod(pixels // side for pixels in properties.image_size)
    missing = 0 if is_official else max(prefix + patches - count, 0)
    table = np.pad(arrays.pop(name), ((0, 0), (missing, 0), (0, 0)))
    arrays[_OFFICIAL_POSITION] = table
  return ParsedWeights(arrays, names, model, properties, _DEFAULTS, noted=noted)


def _read_names(is_original: bool, is_stacked: bool) -> NameMap:
  """Returns the names of a Vision Transformer in a file.

  Args:
    is_original: whether layers have Flax's original numbering of submodules,
      which counts all kinds together, as in official files.
    is_stacked: whether the arrays of all layers are stacked.
  """
  names = names_lib.table('big_vision')
  if is_original:
    names = names | names_lib.table('official')
  if is_stacked:
    names = {
      path: entry._replace(name=entry.name.replace(f'{_BLOCK}_{{i}}', _BLOCK))
      for path, entry in names.items()
    }
  position = {'position/embedding': _OFFICIAL_POSITION}
  stem = names_lib.table('hybrid')
  return NameMap(names | position | stem, torch=False)


def _resnet_section(
  path: str, arrays: Mapping[str, np.ndarray], root: str
) -> dict[str, Any]:
  """Returns the config section of a ResNet, with sizes derived from its arrays.

  Args:
    path: path of the file, for messages.
    arrays: arrays of the file.
    root: name of the first convolution, `_ROOT` or `_BIT_ROOT`.

  Raises:
    UserError: a stage is missing, or the number of channels of the root is not
      a multiple of 64. (Missing units are found later, because their arrays are
      missing.)
  """
  channels = arrays[root].shape[-1] if arrays[root].ndim else 0
  factor, remainder = divmod(channels, _ROOT_WIDTH)
  depths: dict[int, int] = {}
  for name in arrays:
    match = re.match(r'(?:resnet/)?block(\d+)/unit(\d+)/', name)
    if match:
      stage, unit = int(match[1]), int(match[2])
      depths[stage] = max(depths.get(stage, 0), unit)
  stages = sorted(depths)
  if remainder or not factor or stages != list(range(1, len(stages) + 1)):
    raise UserError(
      f'{path} contains a ResNet of {channels} channels and stages {stages}; '
      f'supported: a multiple of {_ROOT_WIDTH}, and stages from 1 without gaps.'
    )
  counts = tuple(depths[stage] for stage in stages)
  return dict(name='resnet', depths=counts, width_factor=factor)


def save(path: str, params: PyTree, description: Description | None) -> None:
  """Writes parameters with the official names, and notes next to the file.

  Args:
    path: path of the .npz file, local or gs://.
    params: parameters of the objective that is described. The model is a ViT
      (`map` pooling has no official name), a hybrid or a ResNet.
    description: what the weights are; if None, `params` are those of the model,
      and no notes are written.

  Raises:
    UserError: a parameter has no official name.
    OSError: a file cannot be written.
  """
  flat = {k: np.asarray(v) for k, v in tree.flatten(params).items()}
  if description is not None:
    flat = foreign.native_params(params, description)
  names = names_lib.table('bit')
  if 'block1/unit1/conv1/kernel' not in flat:
    names = names_lib.table('official') | names_lib.table('hybrid')

  def full(name: str, array: np.ndarray) -> np.ndarray:
    """Adds the dimensions of 1 that arrays in official files have."""
    if array.ndim == 1 and '/gn' in f'/{name}':
      return array.reshape(1, 1, 1, -1)
    return array[None, None] if name == _BIT_HEAD else array

  exported = NameMap(names, torch=False).export(flat)
  arrays = {name: full(name, array) for name, array in exported}
  _write(path, arrays, description)


def save_big_vision(
  path: str, params: PyTree, description: Description
) -> None:
  """Writes parameters with big_vision's names, and notes next to the file.

  Names have the prefix `params/`, and layers are not stacked.

  Args:
    path: path of the .npz file, local or gs://.
    params: parameters of the objective that is described.
    description: what the weights are.

  Raises:
    UserError: big_vision has no name for a parameter.
    OSError: a file cannot be written.
  """
  flat = foreign.native_params(params, description)
  model = description.built_model
  has_both = {'cls', 'position/embedding'} <= flat.keys()
  if has_both and model.prefix_positions and model.position_at == 'stem':
    # big_vision's class token has no position: ours is added to the token.
    flat = foreign.without_class_position(flat, 'cls', 'position/embedding')
  names = NameMap(names_lib.table('big_vision'), torch=False)
  exported = names.export(flat)
  _write(path, {f'params/{name}': x for name, x in exported}, description)


def _write(
  path: str, arrays: dict[str, np.ndarray], description: Description | None
) -> None:
  """Writes an .npz file, and notes next to it if there is a description.

  Raises:
    OSError: a file cannot be written.
  """
  notes = {}
  if description is not None:
    notes = foreign.noted(
      path, description, lambda notes: _parsed(path, arrays, notes)
    )
  place = paths.locate(path)
  with contextlib.ExitStack() as stack:
    if not paths.is_remote(place):
      place = epath.Path(stack.enter_context(paths.replacing(place)))
    with place.open('wb') as file:
      np.savez(file, allow_pickle=False, **arrays)
  if description is None:
    return
  with (
    paths.locate(path).open('rb') as file,
    zipfile.ZipFile(file) as archive,
  ):
    notes[_DIGEST] = _digest(archive)
  # `foreign.native_params` has converted the weights to pixels in [-1, 1].
  del notes['mean'], notes['std']
  paths.write(paths.locate(f'{path}.json'), json.dumps(notes, indent=2))


def _read_notes(path: str, digest: str) -> dict[str, Any]:
  """Returns the notes that are stored next to an .npz file.

  They contain a digest of the arrays, so that notes that belong to other
  weights are ignored.

  Args:
    path: path of the .npz file.
    digest: digest of the file.

  Returns:
    Result of `metadata.read_notes`; {} if there are no notes for these arrays.

  Raises:
    UserError: the notes are damaged.
  """
  file = f'{path}.json'
  notes = metadata.read(file)
  if _DIGEST not in notes:
    return {}
  if notes.pop(_DIGEST) != digest:
    log.warning('%s belongs to other weights than %s: not used', file, path)
    return {}
  return metadata.read_notes(file, notes) | {'known_from': file}


def _digest(archive: Any) -> str:
  """Returns a SHA-256 of the names and checksums in an open zip file."""
  members = sorted((each.filename, each.CRC) for each in archive.infolist())
  return hashlib.sha256(json.dumps(members).encode()).hexdigest()


def read(path: str) -> tuple[dict[str, np.ndarray], str]:
  """Reads all arrays of an .npz file, without unpickling.

  Args:
    path: path of the file, local or gs://.

  Returns:
    Arrays by name, and a digest of them. Elements of two raw bytes, as which
    NumPy stores bfloat16, are interpreted as bfloat16.

  Raises:
    UserError: the file does not exist, or is not an intact .npz file of plain
      arrays.
  """
  with (
    damage.reported(path, 'an .npz file of plain arrays') as place,
    place.open('rb') as file,
    npyio.NpzFile(file) as archive,
  ):
    damage.check_unique(archive.files)
    arrays = {
      name: array.view(jnp.bfloat16) if array.dtype == 'V2' else array
      for name, array in archive.items()
    }
    return arrays, _digest(archive.zip)
