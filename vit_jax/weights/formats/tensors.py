"""Reads and writes PyTorch's tensors, without running pickled code.

Weights are one file (`.safetensors`, or a pickle of PyTorch), or a directory
that contains `model.safetensors` or `pytorch_model.bin`, or shards and an index
(`model.safetensors.index.json`) of the shard of each array.
"""

import argparse
import hashlib
import json
import logging
import os
import pickle
import re
import struct
import warnings
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from etils import epath

from vit_jax.errors import UserError, required
from vit_jax.files import paths
from vit_jax.weights import metadata
from vit_jax.weights.formats import damage

log = logging.getLogger('vit_jax')
Arrays = dict[str, np.ndarray]
_FILES = ('model.safetensors', 'pytorch_model.bin')
_INDEX = '.index.json'  # after the name of a file
# {file in a directory: description of its weights, and how to convert them}
_UNREADABLE = {
  '.metadata': 'a distributed checkpoint: convert it by `python -m '
  'torch.distributed.checkpoint.format_utils dcp_to_torch {0} OUT`',
  'zero_to_fp32.py': 'a checkpoint of DeepSpeed: convert it by `python '
  '{0}/zero_to_fp32.py {0} OUT`',
}
# Types of safetensors that do not exist in NumPy, or have another name.
_TYPES = {
  'BOOL': bool,
  'BF16': jnp.bfloat16,
  'F8_E4M3': jnp.float8_e4m3fn,
  'F8_E5M2': jnp.float8_e5m2,
}
# Objects that training checkpoints contain next to the weights: paths, NumPy's
# scalars and arrays. `_Ignored` replaces them, so none of their code is run.
_IGNORED = (
  *(
    f'{module}.{name}'
    for module in ('pathlib', 'pathlib._local')
    for name in ('PosixPath', 'WindowsPath', 'PurePosixPath', 'PureWindowsPath')
  ),
  *(
    f'{module}.multiarray.{name}'
    for module in ('numpy.core', 'numpy._core')
    for name in ('scalar', '_reconstruct')
  ),
  'numpy.dtype',
  'numpy.ndarray',
)
# Tensors of up to so many bytes are accepted, however small their file is.
_UNSUSPICIOUS_BYTES = 2**26
_CHECKSUM = 'vit_jax_sha256'  # metadata key, in files that `write` has written


class _Ignored:
  """Object in a checkpoint that is not used; its state is dropped."""

  def __init__(self, *state: Any):
    del state

  def __setstate__(self, state: Any) -> None:
    del state


def is_file(path: str) -> bool:
  """Returns whether a path is that of a weight file, which need not exist."""
  has_ending = path.endswith('.safetensors') or damage.is_pickle(path)
  return has_ending and not paths.locate(path).is_dir()


def folder_of(path: str) -> epath.Path:
  """Returns a directory of weights, or the one that contains a weight file.

  The output folder of a transformers Trainer has no config.json; the newest
  `checkpoint-N` in it is returned.
  """
  place = paths.locate(path)
  if is_file(path):
    return place.parent
  if not place.is_dir():
    return place
  if (place / 'config.json').exists():
    return place
  steps = [
    re.fullmatch(r'checkpoint-(\d+)', each.name) for each in place.iterdir()
  ]
  newest = max((int(step[1]) for step in steps if step), default=None)
  return place if newest is None else place / f'checkpoint-{newest}'


def read_config(path: str) -> dict[str, Any] | None:
  """Returns the config.json in a directory of weights, or next to a file.

  Args:
    path: path of a file or a directory, local or gs://.

  Returns:
    The content; {} if there is none; None if the path is neither a file of
    tensors nor a directory with the config of another project.

  Raises:
    UserError: the config cannot be read, or the directory contains weights that
      other programs have to convert.
  """
  folder, file = folder_of(path), paths.locate(path)
  config = metadata.read(folder / 'config.json')
  is_folder = not is_file(path)
  if not config and is_folder:
    for name, advice in _UNREADABLE.items():
      if (folder / name).exists():
        raise UserError(f'{path} contains {advice.format(folder)}; open OUT.')
    for name in _FILES:
      if (folder / name).exists() or (folder / f'{name}{_INDEX}').exists():
        raise UserError(
          f'{folder} contains {name}, but no config.json, which describes the '
          "model: fetch it, or, if the weights are timm's, give the path of "
          'the file.'
        )
  if is_folder and folder != file:
    log.info('%s: the newest checkpoint is %s', path, folder.name)
  if is_folder:
    # Configs of transformers and of timm have these keys.
    return config if {'model_type', 'architecture'} & config.keys() else None
  # Other files in a directory of transformers have another format, to which its
  # config does not apply.
  is_described = re.fullmatch(
    r'(?!open_clip).*\.safetensors|pytorch_model.*\.bin', file.name
  )
  return config if is_described or 'model_type' not in config else {}


def read(path: str) -> tuple[Arrays, dict[str, str]]:
  """Reads all tensors of a file or a directory.

  Args:
    path: path of a directory, of a .safetensors file, local or gs://, or of a
      local pickle (`damage.PICKLES`), which is read by
      `torch.load(weights_only=True)`. A shard stands for all shards.

  Returns:
    Arrays by name, including those of bfloat16, and the metadata of a
    .safetensors file.

  Raises:
    UserError: the file does not exist, is damaged, is another kind of file, or
      contains pickled code; or an index contradicts its shards.
  """
  file = paths.locate(path)
  is_folder = file.is_dir()
  folder = folder_of(path) if is_folder else file.parent
  for name in _FILES:
    index = folder / f'{name}{_INDEX}'
    content = metadata.validated(index, metadata.read(index))
    shards = content.get('weight_map', {})
    if content and (is_folder or file.name in shards.values()):
      return _read_shards(index, content), {}
    if is_folder and (folder / name).exists():
      return _read_file(os.fspath(folder / name))
  return _read_file(os.fspath(folder / _FILES[0]) if is_folder else path)


def _read_shards(index: Any, content: Mapping[str, Any]) -> Arrays:
  """Reads all arrays of the shards in an index.

  Raises:
    UserError: a file cannot be read, or the index contradicts the shards.
  """
  listed = set(content.get('weight_map', {}).items())
  arrays: Arrays = {}
  actual = set()
  for shard in sorted({shard for _, shard in listed}):
    part, _ = _read_file(os.fspath(index.parent / shard))
    actual |= {(name, shard) for name in part}
    arrays |= part
  wrong = sorted({name for name, _ in listed ^ actual})
  if wrong:
    raise UserError(
      f'{index} does not list the right file of {", ".join(wrong[:3])}, …: '
      'fetch all files of one version again.'
    )
  return arrays


def _read_file(path: str) -> tuple[Arrays, dict[str, str]]:
  """Reads the tensors of one file; see `read`."""
  if damage.is_pickle(path):
    return _read_pickle(path), {}
  with damage.reported(path, 'a .safetensors file') as file:
    data = file.read_bytes()
    arrays = {
      name: np.frombuffer(tensor['data'], _dtype(tensor['dtype'])).reshape(
        tensor['shape']
      )
      for name, tensor in safetensors.deserialize(data)
    }
    (size,) = struct.unpack('<Q', data[:8])  # of the header
    header = json.loads(data[8 : 8 + size], object_pairs_hook=_unique)
    notes = header.get('__metadata__') or {}
    # Files of other projects have no checksum.
    if _CHECKSUM in notes and notes.pop(_CHECKSUM) != _checksum(arrays, notes):
      raise UserError(
        f'{path} is damaged: its contents differ from the checksum in its '
        'metadata. Fetch it again.'
      )
    return arrays, notes


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  """Returns a JSON object whose keys differ."""
  damage.check_unique(key for key, _ in pairs)
  return dict(pairs)


def _dtype(name: str) -> np.dtype:
  """Returns the dtype of a name in safetensors, such as 'F32' or 'I64'."""
  if name in _TYPES:
    return np.dtype(_TYPES[name])
  if not re.fullmatch(r'F(16|32|64)|[IU](8|16|32|64)', name):
    raise ValueError(f'tensors of the type {name} are not supported')
  return np.dtype(f'{name[0].lower()}{int(name[1:]) // 8}')


def _checksum(
  arrays: Mapping[str, np.ndarray], notes: Mapping[str, str]
) -> str:
  """Returns a SHA-256 of arrays, their names, dtypes and shapes, and notes."""
  digest = hashlib.sha256(json.dumps(dict(notes), sort_keys=True).encode())
  for name in sorted(arrays):
    array = np.ascontiguousarray(arrays[name])
    digest.update(f'{name} {array.dtype} {arrays[name].shape}'.encode())
    digest.update(array.reshape(-1).view(np.uint8).data)
  return digest.hexdigest()


def _read_pickle(path: str) -> Arrays:
  """Reads the weights in a file of PyTorch; see `read`."""
  torch = required('torch', f'{path}, a file of PyTorch,')
  # A Namespace of command-line arguments has only plain attributes.
  replaced = [(_Ignored, name) for name in _IGNORED]
  with damage.reported(path, 'PyTorch weights') as file:
    # torch.load does not compare the checksums of zip archives, so a flipped
    # bit would change a weight without an error.
    with file.open('rb') as opened:
      damage.check_contents(opened)
    with (
      torch.serialization.safe_globals([argparse.Namespace, *replaced]),
      warnings.catch_warnings(),
    ):
      warnings.simplefilter('ignore')  # torch's, about types and protocols
      try:
        content = torch.load(file, map_location='cpu', weights_only=True)
      except pickle.UnpicklingError as error:
        cause = str(error.__context__)  # without torch's advice
        # Name of the class or function that is not allowed
        named = re.search(r'GLOBAL (\S+)|but got (.+)', cause)
        found = f'It contains {named[1] or named[2]}.' if named else ''
        raise UserError(
          f'{path} cannot be read as PyTorch weights; pickled code is never '
          f'run. {found or damage.describe(path)} {damage.SUPPORTED}. If you '
          'trust the file, save only its state_dict, as .safetensors.'
        ) from error
    tensors = _flat(content)
    if not tensors:
      raise UserError(f'{path} contains no tensors in named dictionaries.')
    # With strides of 0, a small file can describe tensors of any size.
    size = file.stat().length
    total = sum(each.numel() * each.element_size() for each in tensors.values())
    if total > max(_UNSUSPICIOUS_BYTES, 100 * size):
      raise ValueError(f'{size:,} bytes describe tensors of {total:,} bytes')
    return {k: _array(torch, path, k, v) for k, v in tensors.items()}


def _flat(content: Any, prefix: str = '') -> dict[str, Any]:
  """Returns all tensors in nested dictionaries, with names joined by dots."""
  if hasattr(content, 'numpy'):  # a tensor
    return {prefix.removesuffix('.'): content}
  entries = content.items() if isinstance(content, Mapping) else ()
  return {
    name: tensor
    for key, value in entries
    for name, tensor in _flat(value, f'{prefix}{key}.').items()
  }


def _array(torch: Any, path: str, name: str, tensor: Any) -> np.ndarray:
  """Converts a tensor to an array.

  Raises:
    UserError: the tensor has no plain values.
  """
  tensor = tensor.detach()
  kind = str(tensor.dtype).removeprefix('torch.')
  try:
    if kind == 'bfloat16' or kind.startswith('float8'):
      # torch cannot convert types that NumPy itself does not have.
      bits = torch.uint8 if tensor.element_size() == 1 else torch.int16
      return tensor.view(bits).numpy().view(getattr(jnp, kind))
    return tensor.numpy()
  except Exception as error:  # torch raises anything
    raise UserError(
      f'{path} contains {name} ({kind}, {tensor.layout}, on {tensor.device}: '
      f'{paths.reason(error)}): save dense float32 tensors.'
    ) from error


def write(
  path: str | os.PathLike,
  arrays: Mapping[str, np.ndarray],
  notes: Mapping[str, str],
) -> None:
  """Writes a .safetensors file.

  Its metadata contain a checksum, which `read` compares.

  Args:
    path: path of the file, local or gs://.
    arrays: arrays by name.
    notes: strings for the metadata in the file's header.

  Raises:
    OSError: the file cannot be written.
  """
  notes = {'format': 'pt', **notes}
  notes[_CHECKSUM] = _checksum(arrays, notes)
  data = safetensors.numpy.save(dict(arrays), notes)
  paths.write(paths.locate(path), data)
