"""Reading the arrays of an `.npz` file without trusting it.

NumPy's own reader allocates what an array's header asks for, whatever the file
holds, and leaves formats that it does not know (bfloat16) as raw bytes.
"""

import math
import zipfile
from collections.abc import Iterable
from typing import IO, Any

import jax.numpy as jnp
import numpy as np
from etils import epath
from numpy.lib import format as npy

from vit_jax.errors import UserError
from vit_jax.files import paths

_HEADERS = {
  (1, 0): npy.read_array_header_1_0,
  (2, 0): npy.read_array_header_2_0,
}
# A byte of a deflated member stands for so many at most.
_DEFLATED_BYTES = 1032
_BFLOAT16 = np.dtype('V2')  # what NumPy writes for it


def read(path: str) -> dict[str, np.ndarray]:
  """Reads all arrays of an .npz file; never unpickles.

  Args:
    path: local or gs://.

  Returns:
    {name: array}; two raw bytes an element are read as bfloat16.

  Raises:
    UserError: no such file, no .npz, damaged, or not of plain arrays.
  """
  file = epath.Path(path).expanduser()
  try:
    if not file.exists():
      raise UserError(
        f'the weights file {path} does not exist: give one that does.'
        f'{paths.nearest(path)}'
      )
    if file.is_dir():
      raise UserError(f'{path} is a directory, no .npz file.')
    with file.open('rb') as opened, zipfile.ZipFile(opened) as archive:
      return {
        member.filename.removesuffix('.npy'): _read_member(archive, member)
        for member in archive.infolist()
      }
  except UserError:
    raise
  except OSError as error:
    raise UserError(f'{path} cannot be read: {error}.') from error
  except Exception as error:  # noqa: BLE001 (damage raises anything)
    raise UserError(
      f'{path} is no .npz file of plain arrays ({type(error).__name__}: '
      f'{error}); it may be damaged: fetch it again.'
    ) from error


def write(path: str, arrays: dict[str, np.ndarray]) -> None:
  """Writes an .npz file.

  Raises:
    UserError: it cannot be written.
  """
  try:
    with epath.Path(path).expanduser().open('wb') as file:
      np.savez(file, allow_pickle=False, **arrays)
  except OSError as error:
    raise UserError(f'{path} cannot be written: {error}.') from error


def _read_member(archive: Any, member: zipfile.ZipInfo) -> np.ndarray:
  """One array; raises anything if it is none or is damaged."""
  with archive.open(member) as file:
    shape, fortran, dtype = _header(file, member.filename)
    room = member.compress_size
    if member.compress_type != zipfile.ZIP_STORED:
      room *= _DEFLATED_BYTES
    size = math.prod(shape) * dtype.itemsize
    if size > room:
      raise ValueError(
        f'{member.filename} says that it has the shape {shape}, {size:,} '
        'bytes, and the file has no room for them'
      )
    data = file.read(size + 1)  # beyond its end: compares its checksum too
  if len(data) != size:
    raise ValueError(f'{member.filename} does not hold {size:,} bytes')
  flat = np.frombuffer(bytearray(data), dtype)
  array = flat.reshape(shape, order='F' if fortran else 'C')
  return array.view(jnp.bfloat16) if dtype == _BFLOAT16 else array


def _header(file: IO[bytes], name: str) -> tuple[tuple[int, ...], bool, Any]:
  """(shape, whether in Fortran's order, dtype) of an array."""
  version = npy.read_magic(file)
  if version not in _HEADERS:
    raise ValueError(f'{name} has the version {version} of records with fields')
  shape, fortran, dtype = _HEADERS[version](file)
  if dtype.hasobject:
    raise ValueError(f'{name} holds Python objects, which could run code')
  if any(side < 0 for side in shape):
    raise ValueError(f'{name} has the shape {shape}')
  return shape, fortran, dtype


def floats(path: str, name: str, array: np.ndarray, rank: int) -> np.ndarray:
  """An array as float32, if it can be weights.

  Args:
    path: of the file, for messages.
    name: in the file.
    array: of any type.
    rank: how many dimensions it must have.

  Raises:
    UserError: no floating-point numbers, or another rank.
  """
  if not jnp.issubdtype(array.dtype, jnp.floating):
    raise UserError(
      f'{path}: {name} is of type {array.dtype}; weights are floating-point '
      'numbers.'
    )
  if array.ndim != rank or 0 in array.shape:
    raise UserError(
      f'{path}: {name} has the shape {array.shape}; it must have {rank} '
      'dimension(s), none of them 0.'
    )
  with np.errstate(over='ignore'):  # to infinity, which is refused later
    return np.asarray(array, np.float32)


def no_place(path: str, names: Iterable[str], model: str) -> str:
  """What is said of arrays that a model has no place for."""
  return (
    f'{path} holds arrays that {model} has no place for: '
    f'{", ".join(sorted(names)[:5])}.'
  )
