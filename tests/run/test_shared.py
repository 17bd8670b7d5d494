"""Tests that a workdir is accepted once all processes see the same file."""

import types

import jax
import pytest
from etils import epath

from vit_jax.errors import UserError
from vit_jax.run import lock


@pytest.fixture
def appears(tmp_path, monkeypatch):
  """Returns a function that sets when the main process's file is visible."""

  def set_pauses(number):
    hidden, written, pauses = tmp_path / 'hidden', [], []

    def from_main(write):
      written.append(tmp_path / write())
      written[0].rename(hidden)
      return written[0].name

    def sleep(seconds):
      pauses.append(seconds)
      if len(pauses) == number:
        hidden.rename(written[0])

    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    monkeypatch.setattr(lock, 'time', types.SimpleNamespace(sleep=sleep))
    communication = types.SimpleNamespace(
      from_main=from_main, gather_integer=lambda seen: [True, seen]
    )
    monkeypatch.setattr(lock, 'consensus', communication)
    return pauses

  return set_pauses


def test_a_file_that_appears_late_is_seen(tmp_path, appears):
  """Clients of a network file system may keep old listings for a minute."""
  pauses = appears(number=6)
  lock.check_shared(epath.Path(tmp_path))
  assert len(pauses) == 6 and sum(pauses) >= 60
  assert not list(tmp_path.iterdir())


def test_a_file_that_does_not_appear_is_refused(tmp_path, appears):
  """The message names the process and the workdir."""
  appears(number=None)
  with pytest.raises(UserError, match='process 1 does not') as error:
    lock.check_shared(epath.Path(tmp_path))
  assert str(tmp_path) in str(error.value)
