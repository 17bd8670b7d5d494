"""Tests that damage, storage errors and user errors are distinguished."""

import errno
import json

import pytest

from vit_jax.checkpoint.failures import Verdict, judge
from vit_jax.checkpoint.items import CorruptError
from vit_jax.errors import UserError

OPENING = 'Error reading "a/0": Failed to open: "/f"'
# Messages of TensorStore 0.1.86.
TENSORSTORE = {
  f"UNKNOWN: {OPENING}: Input/output error [os_error_code='5']": (
    Verdict.UNREADABLE
  ),
  f"RESOURCE_EXHAUSTED: {OPENING}: Too many open files [os_error_code='24']": (
    Verdict.UNREADABLE
  ),
  f"PERMISSION_DENIED: {OPENING}: Permission denied [os_error_code='13']": (
    Verdict.DENIED
  ),
  'UNAVAILABLE: Error reading "gs://b/f": HTTP 503': Verdict.UNREADABLE,
  'UNAUTHENTICATED: Error reading "gs://b/f": HTTP 401': Verdict.DENIED,
  'DATA_LOSS: Error decoding: CRC-32C checksum verification failed': (
    Verdict.DAMAGED
  ),
  'OUT_OF_RANGE: Requested byte range [0, 9) is not valid': Verdict.DAMAGED,
  'FAILED_PRECONDITION: Truncated Zstd-compressed stream': Verdict.DAMAGED,
}


@pytest.mark.parametrize('text', TENSORSTORE)
def test_errors_of_tensorstore(text):
  """They are classified by the system's error number, or by their status."""
  try:
    raise Exception('Encountered error while reading') from ValueError(text)
  except Exception as error:
    assert judge(error) is TENSORSTORE[text]


@pytest.mark.parametrize(
  'number', [errno.EIO, errno.ESTALE, errno.EMFILE, errno.ETIMEDOUT, None]
)
def test_os_errors_that_may_pass(number):
  """They are temporary storage errors."""
  assert judge(OSError(number, 'text')) is Verdict.UNREADABLE


def test_other_errors():
  """Unreadable content is damage; memory and unknown errors are not."""

  class HttpError(Exception):  # as raised by clients of object stores
    pass

  for error, verdict in (
    (CorruptError('sum'), Verdict.DAMAGED),
    (FileNotFoundError('no number'), Verdict.DAMAGED),
    (IsADirectoryError(errno.EISDIR, 'text'), Verdict.DAMAGED),
    (json.JSONDecodeError('text', '{', 1), Verdict.DAMAGED),
    (KeyError('params'), Verdict.DAMAGED),
    (PermissionError(errno.EACCES, 'text'), Verdict.DENIED),
    (UserError('another model'), Verdict.REFUSED),
    (MemoryError(), Verdict.UNREADABLE),
    (HttpError('503'), Verdict.UNREADABLE),
  ):
    assert judge(error) is verdict, error
