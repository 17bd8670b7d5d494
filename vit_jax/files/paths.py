"""Handles paths of local files and addresses of objects, 'gs://bucket/…'.

Objects are read and written through gcsfs. By default `etils.epath` uses
TensorFlow if it is installed; but TensorFlow cannot be tested with a local
server, and takes seconds to load. Objects cannot be appended to, so files that
grow are kept in memory, and each flush writes the complete file.
"""

import difflib
import os
import re
import traceback

import fsspec.config
from etils import epath

from vit_jax.errors import StorageError, UserError

os.environ.setdefault('EPATH_USE_TF', '0')
# With its cache, gcsfs would return outdated listings when another process has
# written files.
fsspec.config.conf.setdefault('gcs', {}).setdefault('use_listings_cache', False)
_SCHEME = re.compile(r'([A-Za-z][A-Za-z0-9+.-]*):/')
# Source files of the clients of object stores, and of the libraries they use.
_CLIENT = re.compile(r'[\\/](gcsfs|google[\\/](auth|cloud|api_core))[\\/]')
_TRANSPORT = re.compile(r'[\\/](fsspec|aiohttp|requests)[\\/]')


def is_remote(path: str | epath.PathLike) -> bool:
  """Returns whether a path is the address of an object, 'gs://bucket/…'."""
  return '://' in os.fspath(path)


def locate(path: str | epath.PathLike) -> epath.Path:
  """Returns the absolute path of a local file, or an unchanged gs:// address.

  Args:
    path: local path, in which ~ is expanded, or 'gs://BUCKET/…'.

  Raises:
    UserError: the path is an address with another scheme, such as s3://.
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
  """Lists a folder; returns [] if it is missing, as object stores do."""
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
  """Returns an error in one line, with its type unless it is an OSError."""
  text = ' '.join(str(error).split())[:300]
  if isinstance(error, OSError) and text:
    return text
  return f'{type(error).__name__}: {text}'


def name_error(error: BaseException) -> UserError | None:
  """Returns the error to report if `error` concerns the name of a file.

  Args:
    error: any error that ends a command.

  Returns:
    The error to report; None if `error` does not concern a name.
  """
  if isinstance(error, UnicodeError) and 'surrogate' in str(error):
    name = ''
    if isinstance(error, UnicodeEncodeError):
      name = f' ({ascii(error.object[max(error.start - 100, 0) : error.end])})'
    return UserError(
      f'a file name is not valid UTF-8{name}: rename the file or its folder.'
    )
  if isinstance(error, ValueError) and 'embedded null' in str(error):
    return UserError(
      'a path contains a null character: correct the flag, key or list of '
      'files that contains it.'
    )
  return None


def object_store_error(error: BaseException) -> StorageError | None:
  """Returns the error to report if a client of an object store raised `error`.

  Clients of object stores raise errors of many types, including OSError and
  ValueError. They are recognized by the source file that raised them.

  Args:
    error: any error that ends a command.

  Returns:
    The error to report; None if `error` was not raised by such a client.
  """
  files = [
    frame.filename for frame in traceback.extract_tb(error.__traceback__)
  ]
  if not any(_CLIENT.search(file) for file in files):
    return None  # for example another user of aiohttp or requests
  if not (_CLIENT.search(files[-1]) or _TRANSPORT.search(files[-1])):
    return None
  return StorageError(
    f'the object store did not respond as expected: {reason(error)}. Check the '
    'address (gs://BUCKET/PATH), the network, and your permissions (`gcloud '
    'auth application-default login`). Saved files are not affected, and the '
    'same command resumes from them.'
  )
