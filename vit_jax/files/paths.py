"""Where files lie: local paths and objects, 'gs://bucket/…'.

Objects are read and written through gcsfs (`etils.epath` would take TensorFlow
where it is installed, which cannot be tested against a server of one's own and
takes seconds to load). An object cannot be appended to: what grows is kept in
memory and written whole at each flush.
"""

import contextlib
import difflib
import os
import re
import traceback
import uuid

import fsspec.config
from etils import epath

from vit_jax.errors import StorageError, UserError

os.environ.setdefault('EPATH_USE_TF', '0')
# Else gcsfs would believe listings that another process has changed since.
fsspec.config.conf.setdefault('gcs', {}).setdefault('use_listings_cache', False)
_SCHEME = re.compile(r'([A-Za-z][A-Za-z0-9+.-]*):/')
# Files of what speaks to an object store, and of what it speaks through.
_STORE = re.compile(r'[\\/](gcsfs|google[\\/](auth|cloud|api_core))[\\/]')
_THROUGH = re.compile(r'[\\/](fsspec|aiohttp|requests)[\\/]')


def is_remote(path: str | epath.PathLike) -> bool:
  """Whether a path is an object's address, 'gs://bucket/…'."""
  return '://' in os.fspath(path)


def locate(path: str | epath.PathLike) -> epath.Path:
  """The absolute path: local with ~ expanded, or an object's as it is.

  Raises:
    UserError: an address that is neither local nor gs://BUCKET.
  """
  text = os.fspath(path)
  scheme = _SCHEME.match(text)
  if scheme is None:
    return epath.Path(text).expanduser().absolute()
  if not re.match(r'gs://[^/]', text):
    raise UserError(
      f'{text} is no path that can be used; allowed: a local path, or '
      'gs://BUCKET/PATH. Mount other stores as a directory (a local directory '
      f'of that name is ./{text}).'
    )
  return epath.Path(text)


def entries(folder: epath.Path) -> list[epath.Path]:
  """What is in a folder; nothing if there is none (object stores know none)."""
  try:
    return list(folder.iterdir())
  except FileNotFoundError:
    return []


def nearest(path: str | epath.PathLike) -> str:
  """' Did you mean X?' for a path that is not there, or nothing.

  Only a local folder is looked into: a bucket's may be long.
  """
  parent, name = os.path.split(os.fspath(path).rstrip('/'))
  if is_remote(path):
    return ''
  there = {entry.name for entry in entries(locate(parent))} - {name}
  near = difflib.get_close_matches(name, sorted(there), n=1)
  return f' Did you mean {os.path.join(parent, near[0])}?' if near else ''


def try_out(folder: epath.Path) -> None:
  """Writes a small file in a folder, reads it back and deletes it.

  Raises:
    UserError: one of the three fails.
  """
  content = uuid.uuid4().hex
  file, doing = folder / f'.vit_jax_try_{content}', 'written'
  try:
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(content)
    doing = 'read back'
    if file.read_text() != content:
      raise OSError('what is read is not what was written')
    doing = 'deleted'
    file.unlink()
  except Exception as error:  # noqa: BLE001 (each store has errors of its own)
    with contextlib.suppress(Exception):
      file.unlink(missing_ok=True)
    raise UserError(
      f'the workdir {folder} cannot be used: a file in it cannot be {doing}: '
      f'{reason(error)}. Check its name and your permissions (for gs://, '
      '`gcloud auth application-default login`), or give another --workdir.'
    ) from error


def reason(error: BaseException) -> str:
  """An error in one line, with its kind where the text alone says little."""
  text = ' '.join(str(error).split())[:300]
  if isinstance(error, OSError) and text:
    return text
  return f'{type(error).__name__}: {text}'


def of_a_store(error: BaseException) -> StorageError | None:
  """What to say of an object store's error that nobody caught; else None.

  Its client raises errors of many kinds, OSError and ValueError among them:
  they are known by where they come from.
  """
  files = [each.filename for each in traceback.extract_tb(error.__traceback__)]
  if not any(_STORE.search(file) for file in files):
    return None  # another's connection
  if not (_STORE.search(files[-1]) or _THROUGH.search(files[-1])):
    return None
  return StorageError(
    f'the object store was asked in vain: {reason(error)}. Check the address '
    '(gs://BUCKET/PATH), the network, and your permissions (`gcloud auth '
    'application-default login`). What is saved there stays, and the same '
    'command goes on from it.'
  )
