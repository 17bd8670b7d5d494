"""Tests of the access to JAX's coordination service."""

import logging
import pathlib
import re

import jax
import pytest

from vit_jax.processes import consensus, peers

PACKAGE = pathlib.Path(consensus.__file__).parents[1]


def test_this_jax_has_the_internals():
  """A new JAX that moves them fails here, and not on a pod."""
  assert consensus._internals() is not None
  assert consensus.client() is None and consensus.index() == 0


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
  internals = consensus._internals()
  assert internals is not None
  bindings = internals[1]
  made = []

  def new_client(address, **options):
    made.append((address, options))

  monkeypatch.setattr(bindings, 'get_distributed_runtime_client', new_client)
  with pytest.raises(ValueError), peers.handle_lost_peers():
    bindings.get_distributed_runtime_client('host:1', node_id=3)
    raise ValueError
  bindings.get_distributed_runtime_client('host:2')
  callback = dict(missed_heartbeat_callback=peers.end_on_loss)
  assert made == [('host:1', {'node_id': 3} | callback), ('host:2', {})]


def test_other_internals_are_one_warning(monkeypatch, caplog):
  """A run goes on as a single process does, and the warning has the loss."""
  monkeypatch.setattr(consensus, '_INTERNALS', None)
  with caplog.at_level(logging.WARNING, 'vit_jax'), peers.handle_lost_peers():
    pass
  [record] = caplog.records
  assert jax.__version__ in record.message and 'abort' in record.message
  assert consensus.client() is None
  assert consensus.num_processes() == 1 and consensus.index() == 0
  peers.announce(ValueError('broken'))
  peers.LISTENER.start()
  consensus.shut_down()
