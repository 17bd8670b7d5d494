"""Tests that damage, storage errors and user errors are distinguished."""

import errno
import json

import pytest

from vit_jax.checkpoint.items import CorruptError, Outcome, classify
from vit_jax.errors import UserError

OPENING = 'Error reading "a/0": Failed to open: "/f"'
# Messages of TensorStore 0.1.86.
TENSORSTORE = {
  f"UNKNOWN: {OPENING}: Input/output error [os_error_code='5']": (
    Outcome.UNREADABLE
  ),
  f"RESOURCE_EXHAUSTED: {OPENING}: Too many open files [os_error_code='24']": (
    Outcome.UNREADABLE
  ),
  f"PERMISSION_DENIED: {OPENING}: Permission denied [os_error_code='13']": (
    Outcome.DENIED
  ),
  'UNAVAILABLE: Error reading "gs://b/f": HTTP 503': Outcome.UNREADABLE,
  'UNAUTHENTICATED: Error reading "gs://b/f": HTTP 401': Outcome.DENIED,
  'DATA_LOSS: Error decoding: CRC-32C checksum verification failed': (
    Outcome.DAMAGED
  ),
  'OUT_OF_RANGE: Requested byte range [0, 9) is not valid': Outcome.DAMAGED,
  'FAILED_PRECONDITION: Truncated Zstd-compressed stream': Outcome.DAMAGED,
}


@pytest.mark.parametrize('text', TENSORSTORE)
def test_errors_of_tensorstore(text):
  """They are classified by the system's error number, or by their status."""
  try:
    raise Exception('Encountered error while reading') from ValueError(text)
  except Exception as error:
    assert classify(error) is TENSORSTORE[text]


@pytest.mark.parametrize(
  'number', [errno.EIO, errno.ESTALE, errno.EMFILE, errno.ETIMEDOUT, None]
)
def test_os_errors_that_may_pass(number):
  """They are temporary storage errors."""
  assert classify(OSError(number, 'text')) is Outcome.UNREADABLE


def test_other_errors():
  """Unreadable content is damage; memory and unknown errors are not."""

  class HttpError(Exception):  # as raised by clients of object stores
    pass

  for error, outcome in (
    (CorruptError('sum'), Outcome.DAMAGED),
    (FileNotFoundError('no number'), Outcome.DAMAGED),
    (IsADirectoryError(errno.EISDIR, 'text'), Outcome.DAMAGED),
    (json.JSONDecodeError('text', '{', 1), Outcome.DAMAGED),
    (KeyError('params'), Outcome.DAMAGED),
    (PermissionError(errno.EACCES, 'text'), Outcome.DENIED),
    (UserError('another model'), Outcome.REFUSED),
    (MemoryError(), Outcome.UNREADABLE),
    (HttpError('503'), Outcome.UNREADABLE),
  ):
    assert classify(error) is outcome, error
