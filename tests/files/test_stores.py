"""Tests of object stores that deny access or cannot be reached."""

import asyncio
import http.server
import json
import threading

import gcsfs
import pytest
import requests

from tests import cli
from vit_jax.errors import StorageError
from vit_jax.files import paths


class _Refusal(http.server.BaseHTTPRequestHandler):
  """Answers every request as Google Cloud Storage does without permission."""

  def _refuse(self):
    error = {'code': 403, 'message': 'ada has no storage.objects.get access'}
    body = json.dumps({'error': error}).encode()
    self.send_response(403)
    self.send_header('Content-Length', str(len(body)))
    self.end_headers()
    self.wfile.write(body)

  do_GET = do_POST = do_PUT = do_DELETE = _refuse

  def log_message(self, *_):
    pass


def redirect(monkeypatch, port):
  """Makes gcsfs use a local server in processes that are started."""
  monkeypatch.setenv('STORAGE_EMULATOR_HOST', f'http://127.0.0.1:{port}')
  monkeypatch.setenv('GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT', 'false')


@pytest.fixture
def refusing(monkeypatch):
  with http.server.ThreadingHTTPServer(('127.0.0.1', 0), _Refusal) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    redirect(monkeypatch, server.server_port)
    monkeypatch.setenv('NO_GCE_CHECK', 'true')
    yield
    server.shutdown()


@pytest.mark.slow
@pytest.mark.usefixtures('refusing')
def test_missing_permission_is_one_message():
  """It contains the store's answer and a command that helps."""
  out, err = cli.run(cli.command('evaluate', '--checkpoint=gs://b/run'), code=1)
  assert not out and len(err.splitlines()) == 1, err
  assert err.startswith('storage failed: ')
  assert 'Forbidden' in err and 'ada has no storage.objects.get' in err
  assert 'gcloud auth application-default login' in err


def test_an_unreachable_store_is_a_storage_error(monkeypatch):
  """The module that raised the error identifies it."""

  async def at_once(_):
    pass

  store = gcsfs.GCSFileSystem(
    endpoint_url=f'http://127.0.0.1:{cli.free_port()}',
    token='anon',
    skip_instance_cache=True,
  )
  monkeypatch.setattr(asyncio, 'sleep', at_once)
  with pytest.raises(Exception, match='Cannot connect to host') as raised:
    store.exists('b/run')
  converted = paths.object_store_error(raised.value)
  assert isinstance(converted, StorageError)
  assert 'Cannot connect to host 127.0.0.1' in str(converted)


@pytest.mark.long  # the client repeats its requests for about a minute
def test_data_in_an_unreachable_store_is_one_message(monkeypatch, tmp_path):
  """A launcher restarts the run (code 1); nothing is written to the workdir."""
  redirect(monkeypatch, cli.free_port())
  workdir = tmp_path / 'run'
  overrides = {'source.data_dir': 'gs://b/data'}
  config = cli.flags('configs/cifar10.py', workdir, overrides)
  out, err = cli.run(cli.command('train', *config), code=1)
  (message,) = (line for line in err.splitlines() if 'workdir' not in line)
  assert not out and message.startswith('storage failed: ')
  assert 'Cannot connect to host 127.0.0.1' in message
  assert not list(workdir.glob('checkpoints/*'))


def test_errors_of_other_modules_are_not_storage_errors():
  """Errors of the same class from other modules are not recognized."""
  with pytest.raises(requests.exceptions.ConnectionError) as raised:
    requests.get(f'http://127.0.0.1:{cli.free_port()}', timeout=9)
  assert paths.object_store_error(raised.value) is None
  for error in (OSError('Forbidden'), KeyError('gcsfs')):
    assert paths.object_store_error(error) is None
    try:
      raise error
    except type(error) as caught:
      assert paths.object_store_error(caught) is None
