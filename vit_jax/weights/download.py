"""Downloads weights from the web and from the Hugging Face Hub.

Addresses are `hf:ORG/NAME`, optionally with a revision and a file
(`hf:ORG/NAME@REVISION/FILE`), and `https://…/FILE`. Files are downloaded once:
those of the hub into the cache of `huggingface_hub` ($HF_HOME), the others into
$XDG_CACHE_HOME/vit_jax/weights (~/.cache/vit_jax/weights).
"""

import functools
import hashlib
import logging
import os
import pathlib
import pickle
import re
import sys
import time
import urllib.parse
import zipfile
from collections.abc import Callable
from typing import TypeVar

import fsspec
import safetensors
from fsspec.callbacks import TqdmCallback

from vit_jax.errors import DownloadError, UserError, required
from vit_jax.files import paths
from vit_jax.weights.formats import damage

log = logging.getLogger('vit_jax')
T = TypeVar('T')
Sleep = Callable[[float], None]
PAUSES_S = (1.0, 2.0, 4.0)  # between attempts
TIMEOUT_S = 30.0  # longest time for a connection, and without any data
# HTTP: time-out, too early, too many requests. All from 500 are temporary, too.
_TEMPORARY_STATUS = {408, 425, 429}
# Errors of aiohttp and huggingface_hub for addresses that cannot exist.
_WRONG_ADDRESS = {'InvalidUrlClientError', 'InvalidURL', 'HFValidationError'}
# What to do if an address does not exist or is not public.
_REMEDIES = {
  'hf': 'check the name, or set HF_TOKEN to a token that may read it',
  'gs': 'check the address and your permissions (`gcloud auth '
  'application-default login`)',
}
_HUB = re.compile(r'hf:([\w.-]+/[\w.-]+)(?:@([\w.-]+))?(?:/([^/].*))?')
_NAME = re.compile(r'[\w-][\w.-]*/[\w-][\w.-]*')  # ORG/NAME
# Weights of an address without FILE; the first pattern with files is used.
_WEIGHTS = ('model*.safetensors', 'pytorch_model*.bin')
# PyTorch's names are NAME-HASH.pth, with the first digits of the SHA-256.
_HASH = re.compile(r'-([0-9a-f]{8,64})\.\w+(\.tar)?$')


def local_copy(path: str, sleep: Sleep = time.sleep) -> str:
  """Downloads weights if necessary, and returns the path of the local copy.

  Args:
    path: address of weights; any other path is returned unchanged.
    sleep: function that waits for some seconds.

  Returns:
    Path of a file, or of a directory for a whole repository of the hub.

  Raises:
    UserError: the address does not exist, or is not one of weights.
    DownloadError: the download failed.
  """
  if path.startswith('hf:'):
    return _from_hub(path, sleep)
  is_pickle = path.startswith('gs://') and damage.is_pickle(path)
  if is_pickle or re.match('https?://', path):
    return _from_url(path, sleep)
  parent = os.path.dirname(path)
  if _NAME.fullmatch(path) and not os.path.exists(parent):
    raise UserError(
      f'{path} does not exist: give a workdir, a checkpoint step directory or '
      f'a weight file; for a model on the Hugging Face Hub, write hf:{path}.'
    )
  return path


def _from_hub(path: str, sleep: Sleep) -> str:
  """Returns the local copy of a repository of the hub, or of one of its files.

  `huggingface_hub` verifies sizes, resumes downloads that were interrupted, and
  uses its cache if the hub cannot be reached.

  Raises:
    UserError: the address is wrong, or the repository has no such weights.
    DownloadError: the download failed.
  """
  address = _HUB.fullmatch(path)
  if address is None:
    raise UserError(
      f'{path} is not an address of the Hugging Face Hub: write '
      'hf:ORG/NAME, hf:ORG/NAME@REVISION or hf:ORG/NAME/FILE.'
    )
  hub = required('huggingface_hub', path)
  from huggingface_hub import constants, errors, utils

  if not sys.stderr.isatty():
    utils.disable_progress_bars()
  name, revision, file = address.groups()

  def fetch(pattern: str) -> str:
    try:
      return hub.snapshot_download(
        name,
        revision=revision,
        allow_patterns=['*.json', pattern],
        endpoint=os.environ.get('HF_ENDPOINT'),
      )
    except errors.LocalEntryNotFoundError as error:  # not in the cache either
      if constants.HF_HUB_OFFLINE:
        raise UserError(
          f'{path} is not in the cache of huggingface_hub, and HF_HUB_OFFLINE '
          'is set: unset it, or download the weights on another machine.'
        ) from error
      # The cause may contain an HTTP status, by which `_failure` decides.
      raise error.__cause__ or ConnectionError(str(error)) from error

  patterns = [file] if file else _WEIGHTS
  for pattern in patterns:
    folder = _with_retries(path, functools.partial(fetch, pattern), sleep)
    if any(pathlib.Path(folder).glob(pattern)):
      return os.path.join(folder, file) if file else folder
  expected = repr(file) if file else ' or '.join(_WEIGHTS)
  raise UserError(
    f'{path}: the repository {name} has no file {expected}; give one of its '
    f'weight files, as in hf:{name}/model.npz.'
  )


def _from_url(url: str, sleep: Sleep) -> str:
  """Returns the local copy of a file on the web or in a bucket.

  Raises:
    UserError: the file does not exist.
    DownloadError: the download failed, or the file is damaged.
  """
  home = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
  digest = hashlib.sha256(url.encode()).hexdigest()[:16]
  name = os.path.basename(urllib.parse.urlparse(url).path) or 'weights'
  target = pathlib.Path(home, 'vit_jax', 'weights', digest, name)
  if target.exists():
    return str(target)
  part = target.with_name(f'.{name}.{os.getpid()}')

  def fetch() -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    options = {}  # gcsfs has time-outs and retries of its own
    if not url.startswith('gs://'):
      import aiohttp  # fsspec needs it for http:// and https://

      timeout = aiohttp.ClientTimeout(
        total=None, connect=TIMEOUT_S, sock_read=TIMEOUT_S
      )
      options = {'client_kwargs': {'timeout': timeout}}
    system, source = fsspec.core.url_to_fs(url, **options)
    # The bar is shown on a terminal only.
    bar = dict(unit='B', unit_scale=True, desc=name, disable=None)
    with TqdmCallback(tqdm_kwargs=bar) as callback:
      system.get_file(source, str(part), callback=callback)

  log.info('downloading %s to %s', url, target)
  try:
    _with_retries(url, fetch, sleep)
    _check(part, name)
    part.replace(target)
  except (UserError, DownloadError):
    raise
  except Exception as error:  # damage raises anything
    raise DownloadError(
      f'{url} was downloaded, but not kept: {paths.reason(error)}. Check the '
      'address, and start again.'
    ) from error
  finally:
    part.unlink(missing_ok=True)
  return str(target)


def _check(part: pathlib.Path, name: str) -> None:
  """Checks that a download is complete, as far as its format permits.

  The clients compare its size, if the server sent one.

  Raises:
    Exception: the download is incomplete or damaged.
  """
  expected = _HASH.search(name)
  is_pickle = damage.is_pickle(name)
  with part.open('rb') as file:
    if expected:
      digest = hashlib.file_digest(file, 'sha256').hexdigest()
      if not digest.startswith(expected[1]):
        raise OSError(f'its checksum is {digest[:8]}, not the one in its name')
    elif name.endswith('.safetensors'):
      # Compares the positions in the header with the size of the file.
      with safetensors.safe_open(part, 'numpy'):
        pass
    elif is_pickle or name.endswith('.npz'):
      start = file.read(1)
      if zipfile.is_zipfile(file):
        damage.check_contents(file)
      # Pickles of PyTorch before 1.6 are not archives, and have no checksums.
      # Only their first byte is checked.
      elif not is_pickle or start != pickle.PROTO:
        raise ValueError('it is not a complete file of weights')


def _with_retries(path: str, fetch: Callable[[], T], sleep: Sleep) -> T:
  """Downloads a file; tries again after pauses if the failure may pass.

  Args:
    path: address, for messages.
    fetch: function that downloads it; may be called several times.
    sleep: function that waits for some seconds.

  Returns:
    The result of the function.

  Raises:
    UserError: the address is wrong or may not be read.
    DownloadError: the download keeps failing.
  """
  for pause_s in (*PAUSES_S, None):
    try:
      return fetch()
    except UserError:
      raise
    except Exception as error:  # network errors, which many libraries raise
      failure, temporary = _failure(path, error)
      if not temporary or pause_s is None:
        raise failure from error
      reason = paths.reason(error)
      log.warning('%s: %s. Trying again in %g s.', path, reason, pause_s)
    sleep(pause_s)
  raise AssertionError('unreachable')


def _failure(
  path: str, error: Exception
) -> tuple[UserError | DownloadError, bool]:
  """Returns the error to report, and whether the failure may pass."""
  status = _status(error)
  if status is not None:
    reason, cause = f'HTTP {status}', paths.Cause.OUTAGE
    if status < 500 and status not in _TEMPORARY_STATUS:
      cause = paths.Cause.USER
  else:
    reason, cause = paths.reason(error), paths.cause(error)
    if isinstance(error, TimeoutError):
      reason = f'the server sent no data for {TIMEOUT_S:g} s'
    if type(error).__name__ in _WRONG_ADDRESS:
      cause = paths.Cause.USER
  message = f'{path} cannot be downloaded: {reason}.'
  if cause is paths.Cause.USER:
    scheme = path.partition(':')[0]
    remedy = _REMEDIES.get(scheme, 'check the address and permissions')
    text = f'{message} It may not exist or not be public: {remedy}.'
    return UserError(text), False
  if cause is paths.Cause.FULL:
    return DownloadError(f'{message} Free some space and start again.'), False
  text = f'{message} Check the address and the network, and start again.'
  return DownloadError(text), True


def _status(error: Exception) -> int | None:
  """Returns the HTTP status of an error; None if it has none."""
  if isinstance(error, FileNotFoundError) and error.errno is None:
    return 404  # fsspec raises it without a number, and the system with one
  for holder, name in (
    (getattr(error, 'response', None), 'status_code'),  # huggingface_hub
    (error, 'status'),  # aiohttp, whose `code` is deprecated
    (error, 'code'),  # gcsfs
  ):
    status = getattr(holder, name, None)
    if isinstance(status, int):
      return status
  return None
