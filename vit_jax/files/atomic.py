"""Writes files atomically: they are complete or absent after any crash."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator

from etils import epath

from vit_jax.files import outages, paths


def write(path: epath.Path, content: str | bytes) -> None:
  """Writes a temporary file, syncs it to disk, and renames it.

  In an object store this is not necessary: an object appears when it is
  complete.

  Args:
    path: path of the file.
    content: new content of the file.

  Raises:
    OSError: the file cannot be written; its old content is unchanged.
  """
  data = content.encode() if isinstance(content, str) else content
  if paths.is_remote(path):
    path.write_bytes(data)
    return
  with replacing(path) as temporary, open(temporary, 'wb') as file:
    file.write(data)


def save(path: epath.Path, content: str | bytes) -> None:
  """Writes a file with `write`, and creates its directory if necessary.

  Args:
    path: path of the file.
    content: new content of the file.

  Raises:
    UserError: the path or a permission is wrong.
    StorageError: the storage is full or fails.
  """
  with outages.access(path, 'written'):
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, content)


@contextlib.contextmanager
def replacing(
  path: epath.Path, folder: epath.Path | None = None
) -> Iterator[str]:
  """Yields the path of an empty temporary file, which then replaces a file.

  Args:
    path: path of the local file to replace.
    folder: directory of the temporary file; by default that of `path`. It must
      be on the same file system.

  Raises:
    OSError: see `write`.
  """
  parent, name = os.path.split(os.fspath(path))
  handle, temporary = tempfile.mkstemp(dir=folder or parent, prefix=f'.{name}.')
  try:
    os.fchmod(handle, 0o644)  # mkstemp allows only the owner to read the file
    yield temporary
    # The content must be on disk before the new name is; otherwise the file
    # could be empty after a power failure.
    os.fsync(handle)
    os.replace(temporary, path)
  except BaseException:
    with contextlib.suppress(OSError):
      os.unlink(temporary)
    raise
  finally:
    os.close(handle)
  _sync(parent)


@contextlib.contextmanager
def new_folder(path: epath.Path) -> Iterator[epath.Path]:
  """Yields a temporary directory, which then gets the name of a new one.

  In an object store, which has no directories to rename, it yields the path.

  Args:
    path: path of the directory, which must not exist.

  Raises:
    OSError: a directory cannot be created or renamed.
  """
  if paths.is_remote(path):
    yield path
    return
  path.parent.mkdir(parents=True, exist_ok=True)
  parent, name = os.path.split(os.fspath(path))
  temporary = tempfile.mkdtemp(dir=parent, prefix=f'.{name}.')
  try:
    os.chmod(temporary, 0o755)  # mkdtemp allows only the owner to read it
    yield epath.Path(temporary)
    for folder, _, files in os.walk(temporary):
      for file in files:
        _sync(os.path.join(folder, file))
      _sync(folder)
    os.rename(temporary, path)
  except BaseException:
    shutil.rmtree(temporary, ignore_errors=True)
    raise
  _sync(parent)


def _sync(path: str) -> None:
  """Makes sure that a file, or the names in a folder, are on disk."""
  with contextlib.suppress(OSError):  # some network file systems refuse it
    handle = os.open(path, os.O_RDONLY)
    try:
      os.fsync(handle)
    finally:
      os.close(handle)
