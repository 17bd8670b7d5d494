"""Writes files that are complete or absent, whatever ends the process."""

import contextlib
import os
import tempfile
from collections.abc import Iterator

from etils import epath

from vit_jax.files import paths


def write(path: epath.Path, content: str | bytes) -> None:
  """Writes a temporary file, syncs it to disk, and renames it.

  In an object store this is not necessary: an object appears when it is
  complete.

  Args:
    path: path of the file.
    content: its new content.

  Raises:
    OSError: it cannot be written; the old content is unchanged.
  """
  data = content.encode() if isinstance(content, str) else content
  if paths.is_remote(path):
    path.write_bytes(data)
    return
  with replacing(path) as temporary, open(temporary, 'wb') as file:
    file.write(data)


@contextlib.contextmanager
def replacing(
  path: epath.Path, folder: epath.Path | None = None
) -> Iterator[str]:
  """Yields the path of an empty file that replaces a local one at the end.

  Args:
    path: path of the local file.
    folder: directory of the file until then; by default that of `path`. It must
      be on the same file system.

  Raises:
    OSError: see `write`.
  """
  own, name = os.path.split(os.fspath(path))
  handle, temporary = tempfile.mkstemp(dir=folder or own, prefix=f'.{name}.')
  try:
    os.fchmod(handle, 0o644)  # mkstemp lets nobody else read it
    yield temporary
    # The content must be on disk before the name is: after a power failure the
    # file would be empty otherwise.
    os.fsync(handle)
    os.replace(temporary, path)
  except BaseException:
    with contextlib.suppress(OSError):
      os.unlink(temporary)
    raise
  finally:
    os.close(handle)
  _sync_folder(own)


def _sync_folder(folder: str) -> None:
  """Makes sure that the new name is on disk, too."""
  with contextlib.suppress(OSError):  # not possible on some network systems
    handle = os.open(folder, os.O_RDONLY)
    try:
      os.fsync(handle)
    finally:
      os.close(handle)
