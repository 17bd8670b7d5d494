"""Reports weight files that are missing, damaged or of another kind."""

import collections
import contextlib
import zipfile
from collections.abc import Iterable, Iterator
from typing import IO

from etils import epath

from vit_jax.errors import UserError
from vit_jax.files import paths

PICKLES = ('.pth', '.pt', '.bin', '.pth.tar', '.ckpt')  # endings of PyTorch
SUPPORTED = (
  'Supported: .npz, .safetensors and PyTorch '
  f'({", ".join(PICKLES)}) files, Hugging Face directories, workdirs and '
  'checkpoint step directories'
)
# (first bytes, description)
_SIGNATURES = (
  (b'PK\x03\x04', 'a zip archive, such as a .npz or PyTorch file'),
  (b'version https://git-lfs', 'a Git LFS pointer: run `git lfs pull`'),
  (b'<', 'a web page or XML'),
)


def is_pickle(path: str) -> bool:
  """Returns whether a path has an ending of PyTorch, in any case."""
  return path.lower().endswith(PICKLES)


@contextlib.contextmanager
def reported(path: str, kind: str) -> Iterator[epath.Path]:
  """Yields a file to be read; turns errors of reading into a `UserError`.

  Args:
    path: path of the file, local or gs://.
    kind: description of the format, for messages.

  Raises:
    UserError: the file does not exist, or reading it raises an error.
  """
  file = paths.locate(path)
  if not file.exists():
    raise UserError(
      f'the weights file {path} does not exist: give one that does.'
      f'{paths.nearest(path)}'
    )
  try:
    yield file
  except UserError:
    raise
  except OSError as error:
    raise UserError(f'{path} cannot be read: {error}.') from error
  except Exception as error:  # damage raises anything
    # torch advises to load a file unsafely.
    reason = paths.reason(error).partition(' In PyTorch 2.6')[0]
    raise UserError(
      f'{path} cannot be read as {kind} ({reason}). {describe(path)} '
      f'{SUPPORTED}.'
    ) from error


def describe(path: str) -> str:
  """Returns a sentence about the kind of a file, judging by its first bytes.

  Args:
    path: path of the file, local or gs://.
  """
  with paths.locate(path).open('rb') as file:
    start = file.read(24)
  if not start:
    return 'It is empty.'
  for signature, kind in _SIGNATURES:
    if start.startswith(signature):
      return f'It seems to be {kind}.'
  return 'Its first bytes are not those of a known kind of file.'


def check_unique(names: Iterable[str]) -> None:
  """Checks that a file does not contain two entries of the same name.

  Programs differ in which of them they use.

  Raises:
    ValueError: it does.
  """
  counts = collections.Counter(names)
  if repeated := [name for name, count in counts.items() if count > 1]:
    raise ValueError(f'it contains {repeated[0]} more than once')


def check_contents(file: IO[bytes]) -> None:
  """Checks names and checksums of an archive, without reading it into memory.

  Args:
    file: open file; a file that is not a zip archive is accepted.

  Raises:
    ValueError: a checksum differs, or a name is repeated.
    zipfile.BadZipFile: the archive is damaged in another way.
  """
  if not zipfile.is_zipfile(file):
    return  # PyTorch before 1.6 wrote plain pickles
  file.seek(0)
  with zipfile.ZipFile(file) as archive:
    check_unique(archive.namelist())
    damaged = archive.testzip()
  file.seek(0)
  if damaged is not None:
    raise ValueError(f'the checksum (CRC) of its member {damaged} differs')
