"""Downloads weights from the web and from the Hugging Face Hub.

Addresses are `hf:ORG/NAME`, optionally with a revision and a file
(`hf:ORG/NAME@REVISION/FILE`), and `https://…/FILE`. Files are downloaded once:
those of the hub into the cache of `huggingface_hub` ($HF_HOME), the others into
$XDG_CACHE_HOME/vit_jax/weights (~/.cache/vit_jax/weights).
"""

import hashlib
import logging
import os
import pathlib
import re
import sys
import urllib.parse

import fsspec
from fsspec.callbacks import TqdmCallback

from vit_jax.errors import StorageError, UserError
from vit_jax.files import paths
from vit_jax.weights.formats import tensors

log = logging.getLogger('vit_jax')
_HUB = re.compile(r'hf:([\w.-]+/[\w.-]+)(?:@([\w.-]+))?(?:/(.+))?')
_NAME = re.compile(r'[\w-][\w.-]*/[\w-][\w.-]*')  # ORG/NAME
_DIRECTORY = ('*.json', 'model*.safetensors')  # if the address has no FILE
_HASH = re.compile(r'-([0-9a-f]{8,64})\.\w+$')  # PyTorch's name-HASH.pth


def local_copy(path: str) -> str:
  """Downloads weights if necessary, and returns the path of the local copy.

  Args:
    path: address of weights; any other path is returned unchanged.

  Returns:
    Path of a file, or of a directory for a whole repository of the hub.

  Raises:
    UserError: the address does not exist, or is not one of weights.
    StorageError: the download failed.
  """
  if path.startswith('hf:'):
    return _from_hub(path)
  is_pickle = path.startswith('gs://') and path.endswith(tensors.PICKLES)
  if is_pickle or re.match('https?://', path):
    return _from_url(path)
  parent = os.path.dirname(path)
  if _NAME.fullmatch(path) and not os.path.exists(parent):
    raise UserError(
      f'{path} does not exist: give a workdir, a checkpoint step directory or '
      f'a weight file; for a model on the Hugging Face Hub, write hf:{path}.'
    )
  return path


def _from_hub(path: str) -> str:
  """Returns the local copy of a repository of the hub, or of one of its files.

  `huggingface_hub` verifies sizes, resumes downloads that were interrupted, and
  uses its cache if the hub cannot be reached.

  Raises:
    UserError: the address is wrong, or the repository has no such weights.
    StorageError: the download failed.
  """
  address = _HUB.fullmatch(path)
  if address is None:
    raise UserError(
      f'{path} is not an address of the Hugging Face Hub: write '
      'hf:ORG/NAME, hf:ORG/NAME@REVISION or hf:ORG/NAME/FILE.'
    )
  try:
    import huggingface_hub as hub
    from huggingface_hub import errors, utils
  except ModuleNotFoundError as error:
    raise UserError(
      f'{path} needs huggingface_hub: pip install huggingface_hub.'
    ) from error
  if not sys.stderr.isatty():
    utils.disable_progress_bars()
  name, revision, file = address.groups()
  patterns = ['*.json', file] if file else [*_DIRECTORY]
  try:
    folder = hub.snapshot_download(
      name,
      revision=revision,
      allow_patterns=patterns,
      endpoint=os.environ.get('HF_ENDPOINT'),
    )
  except errors.LocalEntryNotFoundError as error:  # not in the cache either
    raise _failed(path, error) from error
  except (
    errors.RepositoryNotFoundError,
    errors.RevisionNotFoundError,
    errors.HFValidationError,
  ) as error:
    raise UserError(
      f'{path} does not exist on the Hugging Face Hub, or it is not public: '
      'check the name, or set HF_TOKEN to a token that may read it.'
    ) from error
  except Exception as error:  # network errors, which many libraries raise
    raise _failed(path, error) from error
  if file:
    if not os.path.exists(os.path.join(folder, file)):
      raise UserError(f'{path}: the repository {name} has no file {file!r}.')
    return os.path.join(folder, file)
  if not any(pathlib.Path(folder).glob(_DIRECTORY[1])):
    raise UserError(
      f'{path}: the repository {name} has no file {_DIRECTORY[1]}; give one of '
      f'its weight files, as in hf:{name}/pytorch_model.bin.'
    )
  return folder


def _from_url(url: str) -> str:
  """Returns the local copy of a file on the web or in a bucket.

  Raises:
    UserError: the file does not exist.
    StorageError: the download failed, or the file's checksum differs from the
      one in its name.
  """
  home = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
  digest = hashlib.sha256(url.encode()).hexdigest()[:16]
  name = os.path.basename(urllib.parse.urlparse(url).path) or 'weights'
  target = pathlib.Path(home, 'vit_jax', 'weights', digest, name)
  if target.exists():
    return str(target)
  part = target.with_name(f'.{name}.{os.getpid()}')
  try:
    target.parent.mkdir(parents=True, exist_ok=True)
    system, source = fsspec.core.url_to_fs(url)
    size = system.info(source)['size']
    log.info('downloading %s to %s', url, target)
    # The bar is shown on a terminal only.
    bar = dict(unit='B', unit_scale=True, desc=name, disable=None)
    with TqdmCallback(tqdm_kwargs=bar) as callback:
      system.get_file(source, str(part), callback=callback)
    _check(part, name, size)
    part.replace(target)
  except FileNotFoundError as error:
    raise UserError(f'{url} does not exist: check the address.') from error
  except Exception as error:  # network errors, which many libraries raise
    raise _failed(url, error) from error
  finally:
    part.unlink(missing_ok=True)
  return str(target)


def _check(part: pathlib.Path, name: str, size: int | None) -> None:
  """Compares a download with its expected size, and with the hash in its name.

  Raises:
    OSError: the size or the hash differs.
  """
  actual = part.stat().st_size
  if size is not None and actual != size:
    raise OSError(f'{actual:,} bytes were received instead of {size:,}')
  expected = _HASH.search(name)
  if expected is None:
    return
  with part.open('rb') as opened:
    digest = hashlib.file_digest(opened, 'sha256').hexdigest()
  if not digest.startswith(expected[1]):
    raise OSError(f'its checksum is {digest[:8]}, not the one in its name')


def _failed(path: str, error: Exception) -> StorageError:
  return StorageError(
    f'{path} cannot be downloaded: {paths.reason(error)}. Check the network '
    'and start again.'
  )
