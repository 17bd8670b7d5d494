"""Tests of the access to JAX's coordination service."""

import pathlib
import queue
import re
import subprocess
import sys
import types

import pytest

from vit_jax.errors import EXIT_CRASH, EXIT_STUCK, StorageError
from vit_jax.processes import consensus, peers

PACKAGE = pathlib.Path(consensus.__file__).parents[1]


def test_no_other_module_uses_internals_of_jax():
  internal = re.compile(r'\bjax\._src|\bjaxlib\b(?!.)')
  found = [
    path.relative_to(PACKAGE).as_posix()
    for path in PACKAGE.rglob('*.py')
    if internal.search(path.read_text())
  ]
  assert found == ['processes/consensus.py']


def test_the_callback_is_passed_to_a_new_client(monkeypatch):
  """Only inside of the context, also after an error."""
  bindings, made = consensus._bindings, []

  def new_client(address, **options):
    made.append((address, options))

  monkeypatch.setattr(bindings, 'get_distributed_runtime_client', new_client)
  with pytest.raises(ValueError), peers.handle_lost_peers():
    bindings.get_distributed_runtime_client('host:1', node_id=3)
    raise ValueError
  bindings.get_distributed_runtime_client('host:2')
  callback = dict(missed_heartbeat_callback=peers.end_on_loss)
  assert made == [('host:1', {'node_id': 3} | callback), ('host:2', {})]


@pytest.mark.parametrize(
  'error, end',
  [
    (StorageError('gs://b is gone'), 'storage failed: gs://b is gone'),
    (KeyError('a bug'), "KeyError: 'a bug'\n"),
  ],
)
def test_a_process_that_cannot_close_prints_its_error(monkeypatch, error, end):
  """Closing may wait for a storage that is gone, or for other processes."""
  ended = queue.Queue()
  service = types.SimpleNamespace(key_value_set=lambda *_: None)
  monkeypatch.setattr(peers, 'client', lambda: service)
  monkeypatch.setattr(peers, 'message_of_peer', lambda: None)
  monkeypatch.setattr(peers, 'exit_now', lambda *given: ended.put(given))
  monkeypatch.setattr(peers, '_EXIT_S', 0.0)
  peers.announce(error)
  actual, message = ended.get(timeout=30)
  assert actual == EXIT_CRASH and message.endswith(end)


ENDING = """
import os, threading, time, types
from vit_jax.processes import consensus, peers

peers._EXIT_S = 60.0
silent = types.SimpleNamespace(
  key_value_set=lambda *_, **__: None, key_value_dir_get=lambda _: []
)
peers.client, peers.index = lambda: silent, lambda: 0
consensus.num_processes = lambda: 2
peers.handle_lost_peers()
threading.Thread(target=peers.exit_now, args=(44,), daemon=True).start()
while not peers._EXITING.locked():
  time.sleep(0.01)
time.sleep(0.5)
os.abort()
"""


def test_a_process_that_is_ending_keeps_its_code_when_jax_aborts():
  """As when the stuck peer, for which it waits, is regarded as lost."""
  done = subprocess.run([sys.executable, '-c', ENDING], timeout=60)
  assert done.returncode == EXIT_STUCK
