"""Tests that damage, storage errors and user errors are distinguished."""

import errno
import json

import fsspec.exceptions

from vit_jax.checkpoint.agreement import CorruptError, Outcome, classify
from vit_jax.errors import UserError

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
