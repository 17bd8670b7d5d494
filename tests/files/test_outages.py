"""Tests of the classification of storage errors, and of retries."""

import errno
import json
import os

import pytest
from etils import epath

from vit_jax.errors import StorageError, UserError
from vit_jax.files import jsonl, paths

PAUSES = [1.0, 2.0, 4.0, 8.0, 16.0]


class HttpError(Exception):
  """Stands for an error of gcsfs, whose `code` is an HTTP status."""

  def __init__(self, code):
    super().__init__(f'status {code}')
    self.code = code


def failing(error, times):
  """Returns a function that fails some times, then returns 'done'."""
  left = [times]

  def function():
    left[0] -= 1
    if left[0] >= 0:
      raise error
    return 'done'

  return function


@pytest.mark.parametrize(
  'error, cause',
  [
    (OSError(errno.ENOSPC, 'full'), 'FULL'),
    (OSError(errno.EDQUOT, 'full'), 'FULL'),
    (OSError(errno.EROFS, 'read-only'), 'USER'),
    (PermissionError(errno.EACCES, 'denied'), 'USER'),
    (FileNotFoundError(errno.ENOENT, 'gone'), 'USER'),
    (HttpError(404), 'USER'),
    (HttpError(403), 'USER'),
    (OSError('Forbidden: https://…'), 'USER'),
    (HttpError(503), 'OUTAGE'),
    (HttpError(429), 'OUTAGE'),
    (OSError(errno.EIO, 'broken'), 'OUTAGE'),
    (OSError(errno.ESTALE, 'stale'), 'OUTAGE'),
    (ConnectionRefusedError(errno.ECONNREFUSED, 'refused'), 'OUTAGE'),
    (TimeoutError(), 'OUTAGE'),
    (ValueError("RESOURCE_EXHAUSTED: … [os_error_code='28']"), 'FULL'),
  ],
)
def test_cause_of_storage_errors(error, cause):
  assert paths.cause(error).name == cause


@pytest.mark.parametrize('times', [0, 1, 5])
def test_a_temporary_error_is_retried(times):
  """The call succeeds after growing pauses."""
  slept = []
  function = failing(OSError(errno.EIO, 'broken'), times)
  found = paths.with_retries(function, epath.Path('x'), 'written', slept.append)
  assert found == 'done' and slept == PAUSES[:times]


def test_a_permanent_outage_raises_a_storage_error():
  """The message contains the path and the system's error, after all retries."""
  slept = []
  function = failing(OSError(errno.EIO, 'broken'), 99)
  with pytest.raises(StorageError, match='x.jsonl.*Input/output error'):
    paths.with_retries(function, epath.Path('x.jsonl'), 'written', slept.append)
  assert slept == PAUSES


@pytest.mark.parametrize(
  'number, kind',
  [(errno.ENOSPC, StorageError), (errno.EROFS, UserError)],
)
def test_errors_that_retries_cannot_fix_are_raised_at_once(number, kind):
  """No pause is made before them."""
  function = failing(OSError(number, 'text'), 1)
  with pytest.raises(kind, match=os.strerror(number)):
    paths.with_retries(function, epath.Path('x'), 'written', pytest.fail)


def test_slow_attempts_are_repeated_once(monkeypatch):
  """A client that retries for 43 s gets a second attempt, but no third."""
  now = [0.0]
  monkeypatch.setattr(paths.time, 'monotonic', lambda: now[0])
  attempts = []

  def fail():
    attempts.append(now[0])
    now[0] += 43
    raise HttpError(503)

  path = epath.Path('gs://bucket/x')
  with pytest.raises(StorageError, match='status 503'):
    paths.with_retries(fail, path, 'written', lambda pause_s: None)
  assert attempts == [0, 43]


def test_other_exceptions_are_not_retried():
  with pytest.raises(ZeroDivisionError):
    paths.with_retries(lambda: 1 // 0, epath.Path('x'), 'read', pytest.fail)


def test_append_after_a_partial_line(tmp_path):
  """The next line starts on its own line."""
  path = epath.Path(tmp_path) / 'x.jsonl'
  jsonl.append(path, '{"step": 1}\n')
  with path.open('a') as file:
    file.write('{"st')
  jsonl.append(path, '{"step": 2}\n')
  objects = [record for _, record in jsonl.read(path)]
  assert objects == [{'step': 1}, None, {'step': 2}]


def test_append_is_retried(tmp_path, monkeypatch):
  """The line is written once, after earlier attempts failed."""
  real, path, slept = open, epath.Path(tmp_path) / 'x.jsonl', []
  fails = [OSError(errno.ESTALE, 'stale'), OSError(errno.EIO, 'broken')]

  def unreliable(*args, **kwargs):
    if fails:
      raise fails.pop()
    return real(*args, **kwargs)

  monkeypatch.setattr('builtins.open', unreliable)
  monkeypatch.setattr(paths.time, 'sleep', slept.append)
  jsonl.append(path, '{"step": 1}\n')
  monkeypatch.undo()
  assert json.loads(path.read_text()) == {'step': 1}
  assert slept == PAUSES[:2]
