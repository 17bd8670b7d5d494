"""Paths of local files and of objects, 'gs://bucket/…'.

Objects are read and written through gcsfs. (`etils.epath` would use TensorFlow
if it is installed. TensorFlow cannot be tested against a local server and takes
seconds to load.) An object cannot be appended to: files that grow are kept in
memory and written as a whole at each flush.
"""

import difflib
import os
import re
import traceback

import fsspec.config
from etils import epath

from vit_jax.errors import StorageError, UserError

os.environ.setdefault('EPATH_USE_TF', '0')
# Otherwise gcsfs would return listings that another process has changed since.
fsspec.config.conf.setdefault('gcs', {}).setdefault('use_listings_cache', False)
_SCHEME = re.compile(r'([A-Za-z][A-Za-z0-9+.-]*):/')
# Source files of clients of object stores, and of the libraries below them.
_STORE = re.compile(r'[\\/](gcsfs|google[\\/](auth|cloud|api_core))[\\/]')
_THROUGH = re.compile(r'[\\/](fsspec|aiohttp|requests)[\\/]')


def is_remote(path: str | epath.PathLike) -> bool:
  """Returns whether a path is the address of an object, 'gs://bucket/…'."""
  return '://' in os.fspath(path)


def locate(path: str | epath.PathLike) -> epath.Path:
  """Returns the absolute path of a local file, or an object's address as it is.

  Args:
    path: local path, in which ~ is expanded, or 'gs://BUCKET/…'.

  Raises:
    UserError: it is an address of another kind.
  """
  text = os.fspath(path)
  scheme = _SCHEME.match(text)
  if scheme is None:
    return epath.Path(text).expanduser().absolute()
  if not re.match(r'gs://[^/]', text):
    raise UserError(
      f'{text} cannot be used as a path; allowed are local paths and '
      'gs://BUCKET/PATH. Mount other stores as a directory (a local directory '
      f'of that name is ./{text}).'
    )
  return epath.Path(text)


def entries(folder: epath.Path) -> list[epath.Path]:
  """Lists a folder; a missing folder is empty, as in object stores."""
  try:
    return list(folder.iterdir())
  except FileNotFoundError:
    return []


def nearest(path: str | epath.PathLike) -> str:
  """Returns ' Did you mean X?' for a path that does not exist, or ''.

  Only local folders are searched, because listing a bucket may take long.
  """
  parent, name = os.path.split(os.fspath(path).rstrip('/'))
  if is_remote(path):
    return ''
  names = {entry.name for entry in entries(locate(parent))} - {name}
  near = difflib.get_close_matches(name, sorted(names), n=1)
  return f' Did you mean {os.path.join(parent, near[0])}?' if near else ''


def reason(error: BaseException) -> str:
  """Returns an error in one line, with its type if the text says too little."""
  text = ' '.join(str(error).split())[:300]
  if isinstance(error, OSError) and text:
    return text
  return f'{type(error).__name__}: {text}'


def of_a_store(error: BaseException) -> StorageError | None:
  """Returns the message for an object store's error that nothing caught.

  Clients of object stores raise errors of many types, OSError and ValueError
  among them. They are recognized by the source file that raised them.

  Args:
    error: any error that ends a command.

  Returns:
    The error to report; None if it does not come from an object store.
  """
  files = [each.filename for each in traceback.extract_tb(error.__traceback__)]
  if not any(_STORE.search(file) for file in files):
    return None  # a connection to something else
  if not (_STORE.search(files[-1]) or _THROUGH.search(files[-1])):
    return None
  return StorageError(
    f'the object store does not answer as expected: {reason(error)}. Check the '
    'address (gs://BUCKET/PATH), the network, and your permissions (`gcloud '
    'auth application-default login`). What is saved there stays, and the same '
    'command resumes from it.'
  )
