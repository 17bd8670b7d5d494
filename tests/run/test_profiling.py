"""Tests of the start and the end of a trace."""

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
    (range(4, 9), True),  # resumed within the span
    (range(5, 9), False),  # resumed after the span
    (range(4), True),  # ended within the span
    ([1, 2, 3, 4, 2, 3, 4, 5, 6], True),  # rolled back within the span
    ([3, 4, 5, 6, 2, 3, 4, 5, 6], True),  # rolled back after the span
  ],
)
def test_a_span_is_traced_once(calls, steps, traced):
  """The part of the span that is trained is traced."""
  profile = Profile((3, 5), epath.Path('nowhere'))
  for step in steps:
    profile.update(step)
  profile.close()
  profile.close()
  assert calls == (['start', 'stop'] if traced else [])


def test_start_is_traced_and_stop_is_not(calls):
  """START is the first traced step, STOP the first that is not."""
  profile = Profile((3, 5), epath.Path('nowhere'))
  seen = []
  for step in range(7):
    profile.update(step)
    seen.append(len(calls))
  assert seen == [0, 0, 0, 1, 1, 2, 2]


def test_without_the_flag_nothing_is_traced(calls):
  profile = Profile(None, epath.Path('nowhere'))
  profile.update(3)
  profile.close()
  assert not calls
