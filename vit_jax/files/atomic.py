"""Files that are there whole or not at all, whatever ends the process."""

import contextlib
import os
import tempfile
from collections.abc import Iterator

from etils import epath

from vit_jax.files import paths


def write(path: epath.Path, content: str | bytes) -> None:
  """Writes a file aside, makes sure of it on disk, and puts it in place.

  An object store does so by itself: an object appears when it is complete.

  Raises:
    OSError: it cannot be written; what was there before is as it was.
  """
  data = content.encode() if isinstance(content, str) else content
  if paths.is_remote(path):
    path.write_bytes(data)
    return
  with replacing(path) as aside, open(aside, 'wb') as file:
    file.write(data)


@contextlib.contextmanager
def replacing(
  path: epath.Path, folder: epath.Path | None = None
) -> Iterator[str]:
  """The path of an empty file that takes the place of a local one at the end.

  Args:
    path: of the local one.
    folder: where it is written until then; by default beside it.

  Raises:
    OSError: as in `write`.
  """
  own, name = os.path.split(os.fspath(path))
  handle, aside = tempfile.mkstemp(dir=folder or own, prefix=f'.{name}.')
  try:
    os.fchmod(handle, 0o644)  # as others may read it
    yield aside
    os.fsync(handle)
    os.replace(aside, path)
  except BaseException:
    with contextlib.suppress(OSError):
      os.unlink(aside)
    raise
  finally:
    os.close(handle)
  _sync_folder(own)


def _sync_folder(folder: str) -> None:
  """Makes sure that the new name is on disk too."""
  with contextlib.suppress(OSError):  # some network file systems cannot
    handle = os.open(folder, os.O_RDONLY)
    try:
      os.fsync(handle)
    finally:
      os.close(handle)
