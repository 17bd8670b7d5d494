"""Tests that a workdir is accepted once all processes see the same file."""

import jax
import pytest
from etils import epath

from vit_jax.errors import UserError
from vit_jax.run import lock


@pytest.fixture
def visible_after(tmp_path, monkeypatch):
  """Returns a function that sets when the main process's file is visible.

  Its argument is a number of pauses, or None for never. It returns the list of
  the pauses.
  """

  def set_number(number):
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
    monkeypatch.setattr(lock.time, 'sleep', sleep)
    monkeypatch.setattr(lock.consensus, 'from_main', from_main)
    monkeypatch.setattr(
      lock.consensus, 'gather_integer', lambda seen: [True, seen]
    )
    return pauses

  return set_number


def test_a_file_that_appears_late_is_seen(tmp_path, visible_after):
  """Clients of a network file system may keep old listings for a minute."""
  pauses = visible_after(6)
  lock.check_shared(epath.Path(tmp_path))
  assert len(pauses) == 6 and sum(pauses) >= 60
  assert not list(tmp_path.iterdir())


def test_a_file_that_does_not_appear_is_refused(tmp_path, visible_after):
  """The message names the process and the workdir."""
  visible_after(None)
  with pytest.raises(UserError, match=f'process 1 does not.*{tmp_path}'):
    lock.check_shared(epath.Path(tmp_path))
