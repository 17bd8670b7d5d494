"""Reads and writes the arrays of `.npz` files, which may be malicious.

NumPy's reader allocates the memory that the header of an array specifies, even
if the file is much smaller, and returns bfloat16 as raw bytes.
"""

import contextlib
import math
import zipfile
from typing import IO, Any

import jax.numpy as jnp
import numpy as np
from etils import epath
from numpy.lib import format as npy

from vit_jax.errors import UserError
from vit_jax.files import paths
from vit_jax.weights.formats import archives, kinds

_HEADERS = {
  (1, 0): npy.read_array_header_1_0,
  (2, 0): npy.read_array_header_2_0,
}
# Largest number of bytes that one byte of a deflated member can expand to.
_DEFLATED_BYTES = 1032
_BFLOAT16 = np.dtype('V2')  # two raw bytes, as which NumPy stores bfloat16


def read(path: str) -> dict[str, np.ndarray]:
  """Reads all arrays of an .npz file, without unpickling.

  Args:
    path: path of the file, local or gs://.

  Returns:
    Arrays by name; elements of two raw bytes are interpreted as bfloat16.

  Raises:
    UserError: the file does not exist, or is not an intact .npz file of plain
      arrays.
  """
  file = epath.Path(path).expanduser()
  try:
    if not file.exists():
      raise UserError(
        f'the weights file {path} does not exist: give one that does.'
        f'{paths.nearest(path)}'
      )
    if file.is_dir():
      raise UserError(f'{path} is a directory, not an .npz file.')
    with file.open('rb') as opened, zipfile.ZipFile(opened) as archive:
      archives.check_sizes(archive, file.stat().length)
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
      f'{path} is not an .npz file of plain arrays ({paths.reason(error)}). '
      f'{kinds.of_file(path)} {kinds.SUPPORTED}.'
    ) from error


def write(path: str, arrays: dict[str, np.ndarray]) -> None:
  """Writes an .npz file.

  Args:
    path: path of the file, local or gs://.
    arrays: arrays by name.

  Raises:
    UserError: the file cannot be written.
  """
  place = paths.locate(path)
  try:
    with contextlib.ExitStack() as stack:
      if not paths.is_remote(place):
        place = epath.Path(stack.enter_context(paths.replacing(place)))
      with place.open('wb') as file:
        np.savez(file, allow_pickle=False, **arrays)
  except OSError as error:
    raise UserError(f'{path} cannot be written: {error}.') from error


def _read_member(archive: Any, member: zipfile.ZipInfo) -> np.ndarray:
  """Reads one array.

  Raises:
    ValueError: the member is damaged. NumPy and zipfile may raise other errors.
  """
  with archive.open(member) as file:
    shape, fortran, dtype = _header(file, member.filename)
    most = member.compress_size
    if member.compress_type != zipfile.ZIP_STORED:
      most *= _DEFLATED_BYTES
    size = math.prod(shape) * dtype.itemsize
    if size > most:
      raise ValueError(
        f'{member.filename} specifies the shape {shape}, {size:,} bytes, but '
        'the file is too small for them'
      )
    # Reading beyond the end makes zipfile compare the checksum.
    data = file.read(size + 1)
  if len(data) != size:
    raise ValueError(f'{member.filename} does not contain {size:,} bytes')
  flat = np.frombuffer(bytearray(data), dtype)
  array = flat.reshape(shape, order='F' if fortran else 'C')
  return array.view(jnp.bfloat16) if dtype == _BFLOAT16 else array


def _header(file: IO[bytes], name: str) -> tuple[tuple[int, ...], bool, Any]:
  """Reads (shape, whether in Fortran order, dtype) of an array."""
  version = npy.read_magic(file)
  if version not in _HEADERS:
    raise ValueError(f'{name} has the version {version} of records with fields')
  shape, fortran, dtype = _HEADERS[version](file)
  if dtype.hasobject:
    raise ValueError(f'{name} contains Python objects, which could run code')
  if any(side < 0 for side in shape):
    raise ValueError(f'{name} has the shape {shape}')
  return shape, fortran, dtype
