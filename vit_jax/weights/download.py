"""Downloads weights from the web and from the Hugging Face Hub.

Addresses are `hf:ORG/NAME`, optionally with a revision and a file
(`hf:ORG/NAME@REVISION/FILE`), `https://…/FILE`, and gs:// for files of PyTorch.
Files are downloaded once: those of the hub into the cache of `huggingface_hub`
($HF_HOME), the others into $XDG_CACHE_HOME/vit_jax/weights
(~/.cache/vit_jax/weights). Proxies
($HTTPS_PROXY, $NO_PROXY) and certificates ($SSL_CERT_FILE, $REQUESTS_CA_BUNDLE)
are those of the environment.
"""

import hashlib
import logging
import os
import pathlib
import pickle
import re
import ssl
import time
import urllib.parse
import zipfile
from collections.abc import Callable
from typing import Any

import fsspec
import safetensors
from etils import epath
from fsspec.callbacks import TqdmCallback

from vit_jax.errors import DownloadError, UserError, required
from vit_jax.files import paths
from vit_jax.weights.formats import damage

log = logging.getLogger('vit_jax')
PAUSES_S = (1.0, 2.0, 4.0)  # between attempts
TIMEOUT_S = 30.0  # longest time for a connection, and without any data
# HTTP: time-out, too early, too many requests. All from 500 are temporary, too.
_TEMPORARY_STATUS = {408, 425, 429}
# Errors of aiohttp and huggingface_hub that a repetition does not change.
_PERMANENT = {
  'HFValidationError',
  'InvalidUrlClientError',
  'InvalidURL',
  'OfflineModeIsEnabled',
}
_UNTRUSTED = 'CERTIFICATE_VERIFY_FAILED'
# Error to raise, and what the user must do first.
_REACTIONS = {
  paths.Cause.USER: (
    UserError,
    'It may not exist or not be public: check the address and your permissions '
    '(HF_TOKEN for the hub, `gcloud auth application-default login` for gs://)',
  ),
  paths.Cause.FULL: (DownloadError, 'Free some space and start again'),
  paths.Cause.OUTAGE: (
    DownloadError,
    'Check the address and the network, and start again',
  ),
}
_HUB = re.compile(r'hf:([\w.-]+/[\w.-]+)(?:@([\w.-]+))?(?:/([^/].*))?')
_NAME = re.compile(r'[\w-][\w.-]*/[\w-][\w.-]*')  # ORG/NAME
# Weights of an address without FILE; the first pattern with files is used.
_WEIGHTS = ('model*.safetensors', 'pytorch_model*.bin')
# PyTorch's names are NAME-HASH.pth, with the first digits of the SHA-256.
# Digits without a letter are a date or a step; a UUID has four others before.
_HASH = re.compile(
  r'(?<!-[0-9a-f]{4})-(?=[0-9]*[a-f])([0-9a-f]{8,64})\.\w+(\.tar)?$'
)


def local_copy(path: str, sleep: Callable[[float], None] = time.sleep) -> str:
  """Downloads weights if necessary, and returns the path of the local copy.

  Args:
    path: address of weights; any other path is returned unchanged.
    sleep: function that waits for some seconds, before another attempt.

  Returns:
    Path of a file, or of a directory for a whole repository of the hub.

  Raises:
    UserError: the address does not exist, or is not one of weights.
    DownloadError: the download failed, or the file is damaged.
  """
  # PyTorch reads local files only; other files are read from gs:// directly.
  in_bucket = path.startswith('gs://') and damage.is_pickle(path)
  if path.startswith('hf:'):
    fetch = _from_hub
  elif in_bucket or re.match('https?://', path):
    fetch = _from_url
  elif _NAME.fullmatch(path) and not os.path.exists(os.path.dirname(path)):
    raise UserError(
      f'{path} does not exist: give a workdir, a checkpoint step directory or '
      f'a weight file; for a model on the Hugging Face Hub, write hf:{path}.'
    )
  else:
    return path
  if bundle := os.environ.get('REQUESTS_CA_BUNDLE'):
    key = 'SSL_CERT_DIR' if os.path.isdir(bundle) else 'SSL_CERT_FILE'
    os.environ.setdefault(key, bundle)  # which all libraries use
  for pause_s in (*PAUSES_S, None):
    try:
      return fetch(path)
    except (UserError, DownloadError):
      raise
    except Exception as error:  # network errors, which many libraries raise
      reason, cause = _diagnosis(error)
      if cause is not paths.Cause.OUTAGE or pause_s is None:
        kind, advice = _REACTIONS[cause]
        if _UNTRUSTED in reason:
          advice = 'Set SSL_CERT_FILE to the certificates of your network'
        message = f'{path} cannot be downloaded: {reason}. {advice}.'
        raise kind(message) from error
      log.warning('%s: %s. Trying again in %g s.', path, reason, pause_s)
    sleep(pause_s)
  raise AssertionError('unreachable')


def _from_hub(path: str) -> str:
  """Returns the local copy of a repository of the hub, or of one of its files.

  `huggingface_hub` verifies sizes, resumes downloads that were interrupted, and
  uses its cache if the hub cannot be reached.

  Raises:
    UserError: the address is wrong, or the repository has no such weights.
    Exception: the download failed.
  """
  address = _HUB.fullmatch(path)
  if address is None:
    raise UserError(
      f'{path} is not an address of the Hugging Face Hub: write '
      'hf:ORG/NAME, hf:ORG/NAME@REVISION or hf:ORG/NAME/FILE.'
    )
  hub = required('huggingface_hub', path)
  name, revision, file = address.groups()
  for pattern in [file] if file else _WEIGHTS:
    try:
      folder = hub.snapshot_download(
        name,
        revision=revision,
        allow_patterns=['*.json', pattern],
        endpoint=os.environ.get('HF_ENDPOINT'),
      )
    except hub.errors.LocalEntryNotFoundError as error:
      raise error.__cause__ or error  # noqa: B904 (the cause has the status)
    if any(pathlib.Path(folder).glob(pattern)):
      return os.path.join(folder, file) if file else folder
  expected = repr(file) if file else ' or '.join(_WEIGHTS)
  raise UserError(
    f'{path}: the repository {name} has no file {expected}; give one of its '
    f'weight files, as in hf:{name}/model.npz.'
  )


def _from_url(url: str) -> str:
  """Returns the local copy of a file on the web or in a bucket.

  Raises:
    UserError: the file is not one of weights.
    DownloadError: the file is damaged.
    Exception: the download failed.
  """
  home = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
  digest = hashlib.sha256(url.encode()).hexdigest()[:16]
  # Only the end of a name matters, and file systems limit its length.
  name = os.path.basename(urllib.parse.urlparse(url).path)[-50:] or 'weights'
  target = epath.Path(home) / 'vit_jax' / 'weights' / digest / name
  if target.exists():
    return str(target)
  options: dict[str, Any] = {}  # gcsfs has time-outs and retries of its own
  if not url.startswith('gs://'):
    import aiohttp  # fsspec needs it for http:// and https://

    timeout = aiohttp.ClientTimeout(
      total=None, connect=TIMEOUT_S, sock_read=TIMEOUT_S
    )
    options['client_kwargs'] = {'timeout': timeout, 'trust_env': True}
    # Otherwise, aiohttp uses the certificates that were set when it was
    # imported, for example by another library.
    options['ssl'] = ssl.create_default_context()
  system, source = fsspec.core.url_to_fs(url, **options)
  log.info('downloading %s to %s', url, target)
  target.parent.mkdir(parents=True, exist_ok=True)
  # The bar is shown on a terminal only.
  bar = dict(unit='B', unit_scale=True, desc=name, disable=None)
  with paths.replacing(target) as part:
    with TqdmCallback(tqdm_kwargs=bar) as callback:
      system.get_file(source, part, callback=callback)
    _check(url, pathlib.Path(part), name)
  return str(target)


def _check(url: str, part: pathlib.Path, name: str) -> None:
  """Checks that a download is complete, as far as its format permits.

  The clients compare its size, if the server sent one.

  Raises:
    UserError: the download is a web page.
    DownloadError: the download is incomplete or damaged.
  """
  expected = _HASH.search(urllib.parse.urlparse(url).path)
  is_pickle = damage.is_pickle(name)
  try:
    with part.open('rb') as file:
      start = file.read(512).lstrip()
      file.seek(0)
      if re.match(rb'<(!doctype|html|\?xml)', start, re.IGNORECASE):
        raise UserError(
          f'{url} is a web page, not weights: give the address of the file '
          'itself. If it is, a proxy or the server may expect you to log in.'
        )
      if expected:
        digest = hashlib.file_digest(file, 'sha256').hexdigest()
        if not digest.startswith(expected[1]):
          raise ValueError(
            f'its checksum is {digest[:8]}, not that of its name'
          )
      elif name.endswith('.safetensors'):
        # Compares the positions in the header with the size of the file.
        with safetensors.safe_open(part, 'numpy'):
          pass
      elif zipfile.is_zipfile(file):
        damage.check_contents(file)
      # Pickles of PyTorch before 1.6 are not archives, and have no checksums.
      elif name.endswith('.npz') or is_pickle and start[:1] != pickle.PROTO:
        raise ValueError('it is not a complete file of weights')
  except UserError:
    raise
  except Exception as error:  # damage raises anything
    raise DownloadError(
      f'{url} was downloaded, but not kept: {paths.reason(error)}. Check the '
      'address, and start again.'
    ) from error


def _diagnosis(error: Exception) -> tuple[str, paths.Cause]:
  """Returns the reason of a failed download, and its cause."""
  # Of huggingface_hub and of aiohttp; fsspec raises FileNotFoundError for 404.
  status = getattr(getattr(error, 'response', None), 'status_code', None)
  status = status or getattr(error, 'status', None)
  if isinstance(error, FileNotFoundError) and error.errno is None:
    status = 404
  if status is not None:
    outage = status >= 500 or status in _TEMPORARY_STATUS
    cause = paths.Cause.OUTAGE if outage else paths.Cause.USER
    return f'HTTP {status}', cause
  if isinstance(error, TimeoutError):
    return f'the server sent no data for {TIMEOUT_S:g} s', paths.Cause.OUTAGE
  reason = paths.reason(error)
  if type(error).__name__ in _PERMANENT or _UNTRUSTED in reason:
    return reason, paths.Cause.USER
  return reason, paths.cause(error)
