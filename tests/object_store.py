"""A local object store with the HTTP interface of Google Cloud Storage.

`python -m tests.object_store PORT` serves one empty bucket in memory. It is
gcp_storage_emulator with additions that clients need: generations as conditions
(TensorStore) and `moveTo` (gcsfs).
"""

import contextlib
import http
import json
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator

from gcp_storage_emulator import exceptions, server
from gcp_storage_emulator.handlers import objects

from tests import cli

BUCKET = 'bucket'


class Store:
  """A running server; `environment` points commands to it."""

  def __init__(self, port: int, process: subprocess.Popen):
    self._process = process
    self._address = f'http://127.0.0.1:{port}'
    self.environment = {
      'STORAGE_EMULATOR_HOST': self._address,  # gcsfs, google-cloud-storage
      'TENSORSTORE_GCS_HTTP_URL': self._address,
      'GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT': 'false',  # it would contact Google
      'NO_GCE_CHECK': 'true',
    }

  def stop(self) -> None:
    """Ends the server at once, as an outage does."""
    self._process.kill()
    self._process.wait()

  def is_up(self) -> bool:
    try:
      with urllib.request.urlopen(self._address, timeout=10):
        return True
    except OSError:
      return False

  def read(self, name: str) -> bytes | None:
    """Returns an object of the bucket, or None if it does not exist."""
    quoted = urllib.parse.quote(f'/{BUCKET}/{name}')
    try:
      with urllib.request.urlopen(self._address + quoted, timeout=60) as reply:
        return reply.read()
    except urllib.error.HTTPError as error:
      assert error.code == 404, error
      return None

  def names(self, prefix: str) -> list[str]:
    """Returns the names of the objects below a prefix."""
    query = urllib.parse.urlencode({'prefix': prefix, 'fields': 'items(name)'})
    url = f'{self._address}/storage/v1/b/{BUCKET}/o?{query}'
    with urllib.request.urlopen(url, timeout=60) as reply:
      found = json.load(reply)
    return [item['name'] for item in found.get('items', [])]


@contextlib.contextmanager
def serve() -> Iterator[Store]:
  """Starts a server with one empty bucket, and stops it at the end."""
  port = cli.free_port()
  process = subprocess.Popen(
    [sys.executable, '-m', 'tests.object_store', str(port)],
    cwd=cli.ROOT,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
  )
  try:
    store, deadline = Store(port, process), time.monotonic() + 60
    while not store.is_up():
      assert process.poll() is None and time.monotonic() < deadline
      time.sleep(0.05)
    yield store
  finally:
    process.kill()
    process.wait()


def _with_generations(handler: Callable[..., None]) -> Callable[..., None]:
  """Wraps a handler to check a request's conditions on generations."""

  def generation(request, storage) -> int:
    name = request.params.get('object_id') or request.query['name'][0]
    try:
      found = storage.get_file_obj(request.params['bucket_name'], name)
    except exceptions.NotFound:
      return 0
    return int(found['generation'])

  def handle(request, response, storage) -> None:
    named = 'object_id' in request.params or 'name' in request.query
    now = generation(request, storage) if named else 0
    expected = request.query.get('ifGenerationMatch')
    known = request.query.get('ifGenerationNotMatch')
    if expected and int(expected[0]) != now:
      response.status = http.HTTPStatus.PRECONDITION_FAILED
    elif known and now and int(known[0]) == now:
      response.status = http.HTTPStatus.NOT_MODIFIED
    else:
      handler(request, response, storage)
      response['x-goog-generation'] = str(now)

  return handle


def _move(request, response, storage) -> None:
  request.params['dest_bucket_name'] = request.params['bucket_name']
  objects.copy(request, response, storage)
  if response.status == http.HTTPStatus.OK:
    objects.delete(request, response, storage)


def main(port: int) -> None:
  """Serves until it is killed."""
  server.server.HTTPServer.request_queue_size = 128
  checked = [
    (pattern, {verb: _with_generations(do) for verb, do in verbs.items()})
    if '/o' in pattern
    else (pattern, verbs)
    for pattern, verbs in server.HANDLERS
  ]
  part = r'b/(?P<bucket_name>[-.\w]+)/o/(?P<object_id>.*[^/]+)'
  move = rf'^/storage/v1/{part}/moveTo/o/(?P<dest_object_id>.*[^/]+)$'

  server.HANDLERS = ((move, {'POST': _move}), *checked)
  server.create_server('127.0.0.1', port, True, BUCKET).run()


if __name__ == '__main__':
  main(int(sys.argv[1]))
