"""An object store on this machine that speaks Google Cloud Storage's HTTP."""

import contextlib
import json
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator

from tests import runs

BUCKET = 'bucket'


class Store:
  """A running server; `environment` points commands to it."""

  def __init__(self, port: int):
    self._address = f'http://127.0.0.1:{port}'
    self.environment = {
      'STORAGE_EMULATOR_HOST': self._address,  # gcsfs, google-cloud-storage
      'TENSORSTORE_GCS_HTTP_URL': self._address,
      'GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT': 'false',  # asks Google, not this
      'NO_GCE_CHECK': 'true',
    }

  def is_up(self) -> bool:
    try:
      with urllib.request.urlopen(self._address, timeout=10):
        return True
    except OSError:
      return False

  def read(self, name: str) -> bytes | None:
    """An object of the bucket; None if there is none."""
    quoted = urllib.parse.quote(f'/{BUCKET}/{name}')
    try:
      with urllib.request.urlopen(self._address + quoted, timeout=60) as reply:
        return reply.read()
    except urllib.error.HTTPError as error:
      assert error.code == 404, error
      return None

  def names(self, prefix: str) -> list[str]:
    """The objects below a prefix."""
    query = urllib.parse.urlencode({'prefix': prefix, 'fields': 'items(name)'})
    url = f'{self._address}/storage/v1/b/{BUCKET}/o?{query}'
    with urllib.request.urlopen(url, timeout=60) as reply:
      found = json.load(reply)
    return [item['name'] for item in found.get('items', [])]


@contextlib.contextmanager
def serve() -> Iterator[Store]:
  """Starts a server with one empty bucket, and stops it."""
  port = runs.free_port()
  options = ['--in-memory', '--quiet', f'--default-bucket={BUCKET}']
  process = subprocess.Popen(
    [sys.executable, '-m', 'gcp_storage_emulator', 'start', f'--port={port}']
    + ['--host=127.0.0.1', *options],
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
  )
  try:
    store, deadline = Store(port), time.monotonic() + 60
    while not store.is_up():
      assert process.poll() is None and time.monotonic() < deadline
      time.sleep(0.05)
    yield store
  finally:
    process.kill()
    process.wait()
