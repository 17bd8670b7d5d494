"""Tests of the classification of storage errors, and of retries."""

import errno

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


class Failing:
  """A function that raises an error some times, then returns 'done'."""

  def __init__(self, error, times=99):
    self.error, self.left = error, times

  def __call__(self):
    self.left -= 1
    if self.left >= 0:
      raise self.error
    return 'done'


@pytest.fixture
def slept(monkeypatch):
  """Records pauses instead of making them."""
  pauses = []
  monkeypatch.setattr(paths.time, 'sleep', pauses.append)
  return pauses


def retry(function, name='x'):
  return paths.with_retries(function, epath.Path(name), 'written')


@pytest.mark.parametrize(
  'error, cause',
  [
    (OSError(errno.EDQUOT, 'full'), 'FULL'),
    (PermissionError(errno.EACCES, 'denied'), 'USER'),
    (FileNotFoundError(errno.ENOENT, 'gone'), 'USER'),
    (HttpError(404), 'USER'),
    (HttpError(403), 'USER'),
    (OSError('Forbidden: https://…'), 'USER'),
    (HttpError(503), 'OUTAGE'),
    (HttpError(429), 'OUTAGE'),
    (OSError(errno.ESTALE, 'stale'), 'OUTAGE'),
    (ConnectionRefusedError(errno.ECONNREFUSED, 'refused'), 'OUTAGE'),
    (TimeoutError(), 'OUTAGE'),
    (ValueError("RESOURCE_EXHAUSTED: … [os_error_code='28']"), 'FULL'),
  ],
)
def test_cause_of_storage_errors(error, cause):
  assert paths.cause(error).name == cause


@pytest.mark.parametrize('times', [0, 1, 5])
def test_a_temporary_error_is_retried(slept, times):
  """The call succeeds after growing pauses."""
  assert retry(Failing(OSError(errno.EIO, 'broken'), times)) == 'done'
  assert slept == PAUSES[:times]


@pytest.mark.parametrize(
  'error, kind, pauses',
  [
    (OSError(errno.EIO, 'text'), StorageError, PAUSES),
    (OSError(errno.ENOSPC, 'text'), StorageError, []),
    (OSError(errno.EROFS, 'text'), UserError, []),
    (ZeroDivisionError('text'), ZeroDivisionError, []),
  ],
)
def test_lasting_errors(slept, error, kind, pauses):
  """Only outages are tried again; the message has the system's error."""
  with pytest.raises(kind, match='text'):
    retry(Failing(error))
  assert slept == pauses


def test_slow_attempts_are_repeated_once(monkeypatch, slept):
  """A client that retries for 43 s gets a second attempt, but no third."""
  now = [0.0]
  monkeypatch.setattr(paths.time, 'monotonic', lambda: now[0])

  def fail():
    now[0] += 43
    raise HttpError(503)

  with pytest.raises(StorageError, match='status 503'):
    retry(fail, 'gs://bucket/x')
  assert now == [86] and slept == PAUSES[:1]


def test_append_is_retried(tmp_path, monkeypatch, slept):
  """The line is written once, after earlier attempts failed.

  It starts on its own line, also after a partial one.
  """
  real, path = open, epath.Path(tmp_path) / 'x.jsonl'
  path.write_text('{"step": 1}\n{"st')
  fails = [OSError(errno.ESTALE, 'stale'), OSError(errno.EIO, 'broken')]

  def unreliable(*args, **kwargs):
    if fails:
      raise fails.pop()
    return real(*args, **kwargs)

  monkeypatch.setattr('builtins.open', unreliable)
  jsonl.Appender(path).append({'step': 2})
  monkeypatch.undo()
  objects = [record for _, record in jsonl.read(path)]
  assert objects == [{'step': 1}, None, {'step': 2}]
  assert slept == PAUSES[:2]
