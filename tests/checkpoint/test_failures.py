"""Tests of failures: their classification, and the agreement of processes."""

import concurrent.futures
import errno
import json
import threading

import fsspec.exceptions
import pytest

from tests import cli
from vit_jax.checkpoint.agreement import CorruptError, Outcome, classify
from vit_jax.checkpoint.manager import Barrier
from vit_jax.errors import UserError
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


# Messages of TensorStore 0.1.86.
FAILED = 'Error reading "a/0": Failed to open: "/f": text'
CASES = {
  Outcome.UNREADABLE: (
    ValueError(f"UNKNOWN: {FAILED} [os_error_code='5']"),
    ValueError(f"RESOURCE_EXHAUSTED: {FAILED} [os_error_code='24']"),
    ValueError('UNAVAILABLE: Error reading "gs://b/f": HTTP 503'),
    *(OSError(n, 'text') for n in (errno.EIO, errno.ESTALE, errno.EMFILE)),
    OSError('no number'),
    MemoryError(),
    fsspec.exceptions.FSTimeoutError(),  # raised by clients of object stores
  ),
  Outcome.DENIED: (
    ValueError(f"PERMISSION_DENIED: {FAILED} [os_error_code='13']"),
    ValueError('UNAUTHENTICATED: Error reading "gs://b/f": HTTP 401'),
    PermissionError(errno.EACCES, 'text'),
  ),
  Outcome.DAMAGED: (
    ValueError('DATA_LOSS: Error decoding: CRC-32C verification failed'),
    ValueError('OUT_OF_RANGE: Requested byte range [0, 9) is not valid'),
    ValueError('FAILED_PRECONDITION: Truncated Zstd-compressed stream'),
    CorruptError('sum'),
    FileNotFoundError('no number'),
    IsADirectoryError(errno.EISDIR, 'text'),
    json.JSONDecodeError('text', '{', 1),
    KeyError('params'),
  ),
  Outcome.REFUSED: (UserError('another model'),),
}


def test_errors_are_classified():
  """Unreadable content is damage; errors of the storage and memory are not."""
  for outcome, errors in CASES.items():
    for error in errors:
      assert classify(error) is outcome, error
      if outcome is not Outcome.REFUSED:  # Orbax wraps the error
        try:
          raise Exception('Encountered error while reading') from error
        except Exception as outer:
          assert classify(outer) is outcome, error
