"""Reads and writes PyTorch's tensors, without running pickled code."""

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

from vit_jax.errors import UserError
from vit_jax.files import paths
from vit_jax.weights.formats import archives, kinds

log = logging.getLogger('vit_jax')
PICKLES = kinds.PICKLES
# Keys under which training checkpoints store weights; the first existing one is
# used. DINO's checkpoints contain 'student' and 'teacher'; its authors evaluate
# the teacher.
_KEYS = ('model', 'state_dict', 'teacher', 'student')
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
_MAX_HEADER = 100_000_000  # bytes, the limit of the format
_CHECKSUM = 'vit_jax_sha256'  # metadata key, in files that `write` has written


class _Ignored:
  """Object in a checkpoint that is not used; its state is dropped."""

  def __init__(self, *state: Any):
    del state

  def __setstate__(self, state: Any) -> None:
    del state


def read(path: str) -> dict[str, np.ndarray]:
  """Reads all tensors of a file.

  Args:
    path: path of a .safetensors file, local or gs://, or of a local pickle
      (`PICKLES`), which is read by `torch.load(weights_only=True)`.

  Returns:
    Arrays by name, including those of bfloat16.

  Raises:
    UserError: the file does not exist, is damaged, is another kind of file, or
      contains pickled code.
  """
  file = paths.locate(path)
  if not file.exists():
    raise UserError(
      f'the weights file {path} does not exist: give one that does.'
      f'{paths.nearest(path)}'
    )
  if path.endswith(PICKLES):
    return _read_pickle(path)
  try:
    data = file.read_bytes()
    arrays = {
      name: np.frombuffer(tensor['data'], _dtype(tensor['dtype'])).reshape(
        tensor['shape']
      )
      for name, tensor in safetensors.deserialize(data)
    }
    notes = _metadata_of(data)
    # Files of other projects have no checksum.
    if _CHECKSUM in notes and notes.pop(_CHECKSUM) != _checksum(arrays, notes):
      raise UserError(
        f'{path} is damaged: its contents differ from the checksum in its '
        'metadata. Fetch it again.'
      )
    return arrays
  except UserError:
    raise
  except OSError as error:
    raise UserError(f'{path} cannot be read: {error}.') from error
  except Exception as error:  # noqa: BLE001 (damage raises anything)
    raise UserError(
      f'{path} cannot be read as a .safetensors file ({paths.reason(error)}). '
      f'{kinds.of_file(path)} {kinds.SUPPORTED}.'
    ) from error


def _dtype(name: str) -> np.dtype:
  """Returns the dtype of a name in safetensors, such as 'F32' or 'I64'."""
  if name in _TYPES:
    return np.dtype(_TYPES[name])
  if not re.fullmatch(r'F(16|32|64)|[IU](8|16|32|64)', name):
    raise ValueError(f'tensors of the type {name} are not supported')
  return np.dtype(f'{name[0].lower()}{int(name[1:]) // 8}')


def metadata(path: str) -> dict[str, str]:
  """Returns the metadata of a .safetensors file; {} if there is none.

  Args:
    path: path of the file; pickles have no metadata.
  """
  if path.endswith(PICKLES):
    return {}
  try:
    with paths.locate(path).open('rb') as file:
      length = file.read(8)
      (size,) = struct.unpack('<Q', length)
      return _metadata_of(length + file.read(min(size, _MAX_HEADER)))
  except (OSError, ValueError, struct.error):
    return {}  # `read` reports the damage


def _metadata_of(data: bytes) -> dict[str, str]:
  """Returns the metadata in a header.

  Args:
    data: first bytes of the file, including the whole header.

  Raises:
    ValueError: the header is not JSON, or its metadata are not strings.
  """
  (size,) = struct.unpack('<Q', data[:8])
  header = json.loads(data[8 : 8 + size])
  entry = header.get('__metadata__') if isinstance(header, dict) else None
  notes = {} if entry is None else entry
  if not isinstance(notes, dict) or not all(
    isinstance(each, str) for each in notes.values()
  ):
    raise ValueError('its metadata are not an object of texts')
  return dict(notes)


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


def _read_pickle(path: str) -> dict[str, np.ndarray]:
  """Reads the weights in a file of PyTorch; see `read`."""
  try:
    import torch
  except ImportError as error:
    raise UserError(
      f'{path} is a PyTorch file, which only torch can read: pip install '
      'torch, or use the .safetensors file of the same weights.'
    ) from error
  file = paths.locate(path)
  try:
    size = file.stat().length
    # torch.load does not compare the checksums of zip archives, so a flipped
    # bit would change a weight without an error.
    with file.open('rb') as opened:
      archives.check_contents(opened, size)
    # A Namespace of command-line arguments has only plain attributes.
    replaced = [(_Ignored, name) for name in _IGNORED]
    with (
      torch.serialization.safe_globals([argparse.Namespace, *replaced]),
      warnings.catch_warnings(),
    ):
      warnings.simplefilter('ignore')  # torch's, about types and protocols
      content = torch.load(file, map_location='cpu', weights_only=True)
    tensors = _weights(path, content)
    _check_expanded(tensors, size)
    return {k: _array(torch, path, k, v) for k, v in tensors.items()}
  except UserError:
    raise
  except pickle.UnpicklingError as error:
    # torch's text is about loading the file unsafely.
    found = re.search(r'GLOBAL (\S+)|but got (.+)', str(error.__context__))
    advice = f'{kinds.of_file(path)} {kinds.SUPPORTED}.'
    if found:
      advice = (
        f'It contains {found[1] or found[2]}. Where you trust the file, save '
        'only its state_dict, as .safetensors.'
      )
    raise UserError(
      f'{path} cannot be read as PyTorch weights; pickled code is never run. '
      f'{advice}'
    ) from error
  except Exception as error:  # noqa: BLE001 (damage raises anything)
    reason = paths.reason(error).partition(' In PyTorch 2.6')[0]
    raise UserError(
      f'{path} cannot be read as PyTorch weights ({reason}). '
      f'{kinds.of_file(path)} {kinds.SUPPORTED}.'
    ) from error


def _weights(path: str, content: Any) -> dict[str, Any]:
  """Returns the tensors of a training checkpoint or of a plain state_dict.

  Raises:
    UserError: the file contains no named tensors.
  """
  while isinstance(content, Mapping):
    key = next(
      (key for key in _KEYS if isinstance(content.get(key), Mapping)), None
    )
    if key is None:
      break
    log.info('%s: weights are taken from its %r', path, key)
    content = content[key]
  entries = content if isinstance(content, Mapping) else {}
  tensors = {str(k): v for k, v in entries.items() if hasattr(v, 'numpy')}
  if not tensors:
    raise UserError(
      f'{path} contains no weights by name: there are no tensors at its top '
      f'level or under {", ".join(_KEYS)}.'
    )
  return tensors


def _check_expanded(tensors: Mapping[str, Any], file_bytes: int) -> None:
  """Checks that tensors are not much larger than their file.

  With strides of 0, a small file can describe tensors of any size.

  Raises:
    ValueError: the tensors are much larger.
  """
  total = sum(each.numel() * each.element_size() for each in tensors.values())
  if total > max(2**26, 100 * file_bytes):
    raise ValueError(
      f'its {file_bytes:,} bytes describe tensors of {total:,} bytes'
    )


def _array(torch: Any, path: str, name: str, tensor: Any) -> np.ndarray:
  """Converts a tensor to an array.

  Raises:
    UserError: the tensor has no plain values.
  """
  tensor = tensor.detach()
  layout = str(tensor.layout).removeprefix('torch.')
  kind = str(tensor.dtype).removeprefix('torch.')
  if tensor.is_meta:
    problem = 'on the device meta, without values'
  elif tensor.is_quantized:
    problem = f'quantized ({kind})'
  elif tensor.layout != torch.strided:
    problem = f'not dense, but {layout}'
  else:
    try:
      # torch cannot convert types that NumPy itself does not have.
      if kind == 'bfloat16' or kind.startswith('float8'):
        bits = torch.uint8 if tensor.element_size() == 1 else torch.int16
        return tensor.view(bits).numpy().view(getattr(jnp, kind))
      return tensor.numpy()
    except Exception as error:  # noqa: BLE001 (torch raises anything)
      problem = f'of a type that cannot be read ({paths.reason(error)})'
  raise UserError(
    f'{path} contains a tensor that is {problem}: {name}. Use the original '
    'weights, or save the tensors as dense float32.'
  )


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
    UserError: the file cannot be written.
  """
  notes = {'format': 'pt', **notes}
  notes[_CHECKSUM] = _checksum(arrays, notes)
  data = safetensors.numpy.save(dict(arrays), notes)
  try:
    paths.write(paths.locate(path), data)
  except OSError as error:
    raise UserError(f'{path} cannot be written: {error}.') from error
