"""Small files that are there whole or not at all, whatever ends the process."""

import contextlib
import os
import tempfile

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
  folder, name = os.path.split(os.fspath(path))
  handle, aside = tempfile.mkstemp(dir=folder, prefix=f'.{name}.')
  try:
    with os.fdopen(handle, 'wb') as file:
      os.fchmod(handle, 0o644)  # as others may read it
      file.write(data)
      file.flush()
      os.fsync(handle)
    os.replace(aside, path)
  except BaseException:
    with contextlib.suppress(OSError):
      os.unlink(aside)
    raise
  _sync_folder(folder)


def _sync_folder(folder: str) -> None:
  """Makes sure that the new name is on disk too."""
  with contextlib.suppress(OSError):  # some network file systems cannot
    handle = os.open(folder, os.O_RDONLY)
    try:
      os.fsync(handle)
    finally:
      os.close(handle)
