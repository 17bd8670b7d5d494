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


SPAN = (3, 5)


@pytest.mark.parametrize(
  ('span', 'steps', 'seen'),
  [
    (SPAN, range(7), [0, 0, 0, 1, 1, 2, 2]),
    (SPAN, range(4, 9), [1, 2, 2, 2, 2]),  # resumed within the span
    (SPAN, range(5, 9), [0] * 4),  # resumed after the span
    (SPAN, range(4), [0, 0, 0, 1]),  # ended within the span
    (SPAN, [2, 3, 4, 2, 3, 4, 5], [0, 1, 1, 1, 1, 1, 2]),  # rolled back in it
    (SPAN, [3, 4, 5, 6, 2, 3], [1, 1, 2, 2, 2, 2]),  # rolled back after it
    (None, range(7), [0] * 7),
  ],
)
def test_a_span_is_traced_once(calls, span, steps, seen):
  """START is the first traced step, STOP the first that is not."""
  profile, counts = Profile(span, epath.Path('nowhere')), []
  for step in steps:
    profile.update(step)
    counts.append(len(calls))
  assert counts == seen
  profile.close()
  profile.close()
  assert len(calls) % 2 == 0
