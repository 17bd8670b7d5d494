"""Checks quickly that the servers of a data set can be reached.

TFDS tries each file ten times with growing pauses, which takes three and a half
minutes without a network.
"""

import pathlib
import urllib.parse
from typing import Any

import requests
from tensorflow_datasets.core.download import resource

from vit_jax.errors import UserError
from vit_jax.prepare import catalog

_TIMEOUT_S = 10  # for the connection and the first bytes of the answer


def require(builder: Any, data_dir: pathlib.Path) -> None:
  """Checks that one of the servers of a data set answers, if it has any.

  Nothing is checked if a file of the data set is on the disk already (perhaps
  all files are), or if the files have to be downloaded by hand.

  Args:
    builder: builder of TFDS.
    data_dir: TFDS directory.

  Raises:
    UserError: no server can be reached.
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
      with requests.get(url, stream=True, timeout=_TIMEOUT_S):
        return  # TFDS handles errors in the answer
    except requests.RequestException as error:
      errors[server] = type(error).__name__
  if errors:
    failed = ', '.join(f'{name} ({why})' for name, why in errors.items())
    raise UserError(
      f'{builder.name} cannot be downloaded: {failed} cannot be reached. Check '
      'the network and, if there is one, the proxy (HTTPS_PROXY), then run the '
      'same command again. Or prepare the data set on another machine and copy '
      f'DATA_DIR/{builder.name} to {data_dir}.'
    )


def _is_there(
  url: str, info: Any, builder: Any, data_dir: pathlib.Path
) -> bool:
  """Returns whether TFDS would find the file on the disk."""
  name = resource.get_dl_fname(url, info.checksum)
  downloads = data_dir / 'downloads'
  places = [downloads / name, downloads / builder.name / name]
  if info.filename:
    places.append(data_dir / catalog.MANUAL / info.filename)
  return any(path.exists() for path in places)
