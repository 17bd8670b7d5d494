"""Begin and end of a trace."""

import jax
import pytest
from etils import epath

from vit_jax.run.profiling import Profile


@pytest.fixture
def calls(monkeypatch):
  """Records the calls of JAX's profiler, which refuses a second start."""
  found = []

  def start(folder):
    assert found.count('start') == found.count('stop')
    found.append('start')

  def stop():
    assert found.count('start') == found.count('stop') + 1
    found.append('stop')

  monkeypatch.setattr(jax.profiler, 'start_trace', start)
  monkeypatch.setattr(jax.profiler, 'stop_trace', stop)
  return found


@pytest.mark.parametrize(
  ('steps', 'traced'),
  [
    (range(9), True),
    (range(4, 9), True),  # resumed within
    (range(5, 9), False),  # resumed behind
    (range(4), True),  # ended within
    ([1, 2, 3, 4, 2, 3, 4, 5, 6], True),  # rolled back within
    ([3, 4, 5, 6, 2, 3, 4, 5, 6], True),  # and behind
  ],
)
def test_one_trace(calls, steps, traced):
  """The part of the span that is trained is traced once."""
  profile = Profile((3, 5), epath.Path('nowhere'))
  for step in steps:
    profile.update(step)
  profile.close()
  profile.close()
  assert calls == (['start', 'stop'] if traced else [])


def test_it_is_traced_before_and_not_after(calls):
  """START is the first traced step, STOP the first that is not."""
  profile = Profile((3, 5), epath.Path('nowhere'))
  seen = []
  for step in range(7):
    profile.update(step)
    seen.append(len(calls))
  assert seen == [0, 0, 0, 1, 1, 2, 2]


def test_none_is_wanted(calls):
  """Without the flag, nothing is traced."""
  profile = Profile(None, epath.Path('nowhere'))
  profile.update(3)
  profile.close()
  assert not calls
