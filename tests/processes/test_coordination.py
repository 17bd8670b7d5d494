"""Tests of the access to JAX's coordination service."""

import pathlib
import re

import pytest

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
