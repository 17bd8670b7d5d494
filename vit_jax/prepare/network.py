"""Whether what a data set is downloaded from can be reached, asked quickly.

TFDS tries each file ten times with growing pauses: without a network it takes
three and a half minutes to give up.
"""

import pathlib
import urllib.parse
from typing import Any

import requests
from tensorflow_datasets.core.download import resource

from vit_jax.errors import UserError
from vit_jax.prepare import catalog

_PATIENCE_S = 10  # for a connection and for the answer's first bytes


def require(builder: Any, data_dir: pathlib.Path) -> None:
  """Checks that one of a data set's servers answers, if it has any.

  Nothing is asked where a file is on the disk already (perhaps all are), nor of
  a data set whose files people fetch by hand.

  Args:
    builder: builder of TFDS.
    data_dir: the TFDS directory.

  Raises:
    UserError: none can be reached.
  """
  if builder.MANUAL_DOWNLOAD_INSTRUCTIONS:
    return
  urls = builder.url_infos or {}
  if any(_is_there(url, info, builder, data_dir) for url, info in urls.items()):
    return
  servers = {
    urllib.parse.urlsplit(url).netloc: url
    for url in urls
    if url.startswith('http')
  }
  errors = {}
  for server, url in servers.items():
    try:
      with requests.get(url, stream=True, timeout=_PATIENCE_S):
        return  # TFDS handles the answer
    except requests.RequestException as error:
      errors[server] = type(error).__name__
  if errors:
    failed = ', '.join(f'{name} ({why})' for name, why in errors.items())
    raise UserError(
      f'{builder.name} cannot be downloaded: no way to {failed}. Check '
      'the network and, if there is one, the proxy (HTTPS_PROXY); or prepare '
      'it on another machine and copy DATA_DIR/'
      f'{builder.name} to {data_dir}. The same command goes on.'
    )


def _is_there(
  url: str, info: Any, builder: Any, data_dir: pathlib.Path
) -> bool:
  """Tells whether TFDS finds the file in the places where it looks first."""
  name = resource.get_dl_fname(url, info.checksum)
  downloads = data_dir / 'downloads'
  places = [downloads / name, downloads / builder.name / name]
  if info.filename:
    places.append(data_dir / catalog.MANUAL / info.filename)
  return any(path.exists() for path in places)
