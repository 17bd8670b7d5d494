"""Reading PyTorch's tensors: `.safetensors`, and pickles that run nothing."""

import argparse
import json
import logging
import os
import struct
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from vit_jax.errors import UserError
from vit_jax.files import paths

log = logging.getLogger('vit_jax')
PICKLES = ('.pth', '.pt', '.bin')
# Where a training's checkpoint keeps its weights; the first that is there.
_PLACES = ('model', 'state_dict', 'teacher', 'student')
# Types that NumPy has not, or by another name.
_TYPES = {
  'BOOL': bool,
  'BF16': jnp.bfloat16,
  'F8_E4M3': jnp.float8_e4m3fn,
  'F8_E5M2': jnp.float8_e5m2,
}
_MAX_HEADER = 100_000_000  # bytes, the format's own limit


def read(path: str) -> dict[str, np.ndarray]:
  """Reads all tensors of a file.

  Args:
    path: of a .safetensors, local or gs://, or a pickle (.pth, .pt, .bin),
      local, which only `torch.load(weights_only=True)` sees.

  Returns:
    {name: array}, bfloat16 included.

  Raises:
    UserError: no such file, damaged, another kind, or code in a pickle.
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
    found = safetensors.deserialize(file.read_bytes())
    return {
      name: np.frombuffer(tensor['data'], _dtype(tensor['dtype'])).reshape(
        tensor['shape']
      )
      for name, tensor in found
    }
  except OSError as error:
    raise UserError(f'{path} cannot be read: {error}.') from error
  except Exception as error:  # noqa: BLE001 (damage raises anything)
    raise UserError(
      f'{path} is no .safetensors file ({paths.reason(error)}); it may be '
      'damaged: fetch it again.'
    ) from error


def _dtype(name: str) -> np.dtype:
  """Of safetensors' name of it, 'F32' or 'I64'."""
  if name in _TYPES:
    return np.dtype(_TYPES[name])
  kinds = {'F': 'f', 'I': 'i', 'U': 'u'}
  return np.dtype(f'{kinds[name[0]]}{int(name[1:]) // 8}')


def metadata(path: str) -> dict[str, str]:
  """The notes in a .safetensors file; {} if there are none."""
  if path.endswith(PICKLES):
    return {}
  try:
    with paths.locate(path).open('rb') as file:
      (length,) = struct.unpack('<Q', file.read(8))
      header = json.loads(file.read(min(length, _MAX_HEADER)))
    return dict(header.get('__metadata__', {}))
  except (OSError, ValueError, struct.error, AttributeError):
    return {}  # `read` says what is wrong


def _read_pickle(path: str) -> dict[str, np.ndarray]:
  try:
    import torch
  except ImportError as error:
    raise UserError(
      f'{path} is a PyTorch file, which needs torch to be read: pip install '
      'torch, or take the .safetensors file of the same weights.'
    ) from error
  try:
    # Trainings keep their arguments beside the weights: plain attributes.
    with torch.serialization.safe_globals([argparse.Namespace]):
      content = torch.load(
        paths.locate(path), map_location='cpu', weights_only=True
      )
  except Exception as error:  # noqa: BLE001 (damage raises anything)
    raise UserError(
      f'{path} cannot be read as PyTorch weights ({paths.reason(error)}). '
      'Pickled code is never run: if it is not damaged, save its state_dict '
      'as .safetensors where you trust it.'
    ) from error
  tensors = _weights(path, content)
  return {name: _array(torch, tensor) for name, tensor in tensors.items()}


def _weights(path: str, content: Any) -> dict[str, Any]:
  """The tensors of a training's checkpoint, or of weights alone."""
  while isinstance(content, Mapping):
    place = next(
      (key for key in _PLACES if isinstance(content.get(key), Mapping)), None
    )
    if place is None:
      break
    log.info('%s: weights are taken from its %r', path, place)
    content = content[place]
  found = content if isinstance(content, Mapping) else {}
  tensors = {str(k): v for k, v in found.items() if hasattr(v, 'numpy')}
  if not tensors:
    raise UserError(
      f'{path} holds no weights by name; looked for tensors at its top and '
      f'under {", ".join(_PLACES)}.'
    )
  return tensors


def _array(torch: Any, tensor: Any) -> np.ndarray:
  tensor = tensor.detach()
  if tensor.dtype == torch.bfloat16:
    return tensor.view(torch.int16).numpy().view(jnp.bfloat16)
  return tensor.numpy()


def write(
  path: str, arrays: Mapping[str, np.ndarray], notes: Mapping[str, str]
) -> None:
  """Writes a .safetensors file with notes in its head.

  Raises:
    UserError: it cannot be written.
  """
  data = safetensors.numpy.save(dict(arrays), {'format': 'pt', **notes})
  try:
    paths.locate(path).write_bytes(data)
  except OSError as error:
    raise UserError(f'{path} cannot be written: {error}.') from error


def read_json(path: str | os.PathLike) -> dict[str, Any]:
  """A JSON object; {} if there is no such file.

  Raises:
    UserError: it is something else.
  """
  file = paths.locate(path)
  if not file.exists():
    return {}
  try:
    found = json.loads(file.read_text())
  except (OSError, ValueError) as error:
    raise UserError(f'{path} is no JSON that can be read: {error}.') from error
  if not isinstance(found, dict):
    raise UserError(f'{path} holds no JSON object.')
  return found
