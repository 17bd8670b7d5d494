"""Tests of the barrier that a process which cannot write also reaches."""

import concurrent.futures
import threading

import pytest

from tests import cli
from vit_jax.checkpoint.manager import Barrier
from vit_jax.processes import consensus

COUNT = 3


@pytest.fixture
def processes(monkeypatch):
  """Returns threads that are processes of a real coordination service."""
  bindings, local = consensus._bindings, threading.local()
  address = f'127.0.0.1:{cli.free_port()}'
  service = bindings.get_distributed_runtime_service(address, COUNT)
  clients = [
    bindings.get_distributed_runtime_client(address, index)
    for index in range(COUNT)
  ]
  monkeypatch.setattr(consensus, 'client', lambda: clients[local.index])
  monkeypatch.setattr(consensus, 'index', lambda: local.index)
  indices = iter(range(COUNT))

  def begin():
    local.index = next(indices)
    clients[local.index].connect()

  with concurrent.futures.ThreadPoolExecutor(COUNT, '', begin) as threads:
    yield threads
    list(threads.map(lambda client: client.shutdown(), clients))
  service.shutdown()


def _save(threads, failing, stage):
  """Returns the error of each process; one fails at a stage of its save."""
  together = threading.Barrier(COUNT)

  def save(barrier):
    together.wait()  # so that each thread saves once
    index = consensus.index()
    try:
      with barrier.reporting():
        for i in range(2):
          if (index, i) == (failing, stage):
            raise OSError('no space')
          barrier(key='', timeout_ms=20_000)
    except OSError as error:
      return index, str(error)
    return index, ''

  barriers = [Barrier(f'saving_{failing}_{stage}') for _ in range(COUNT)]
  return dict(threads.map(save, barriers))


def test_a_failure_of_one_process_is_an_error_of_all(processes):
  """The others do not wait for it; each names the process and the cause."""
  assert _save(processes, None, None) == {0: '', 1: '', 2: ''}
  for failing, stage in ((1, 0), (0, 1)):
    errors = _save(processes, failing, stage)
    assert errors.pop(failing) == 'no space'
    assert set(errors.values()) == {f'process {failing}: no space'}
