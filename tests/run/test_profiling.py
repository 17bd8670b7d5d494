"""Tests of slow hosts, and of the start and the end of a trace."""

from unittest import mock

import jax
import numpy as np
import pytest
from etils import epath

from vit_jax.run import profiling
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


@pytest.mark.parametrize(
  'own, expected',
  [
    ([0.1, 0.9, 0.1, 0.5], [1, 3]),
    ([0.01, 0.03, 0.01, 0.01], []),  # slower, but by a small fraction of a step
    ([0.5, 0.6, 0.5, 0.5], []),
    ([0.0, 0.4], [1]),
  ],
)
def test_slow_hosts_exceed_the_median(own, expected):
  """The difference must also be at least a tenth of a step."""
  assert profiling.slow_hosts(own, 1.0) == expected


def test_a_slow_host_is_logged(monkeypatch, caplog):
  """The log and the event name the process that others wait for."""
  ledger = mock.Mock(steps_s=lambda: 0.0)
  gathered = np.array([[0.1, 1.0], [0.9, 1.0]], np.float32)
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  monkeypatch.setattr(
    profiling.multihost_utils, 'process_allgather', lambda local: gathered
  )
  times = profiling.HostTimes(ledger, every_steps=6)
  for step in range(1, 13):
    times.step(step)
  assert 'slow host(s) up to step 12: process 1;' in caplog.text
  processes = [call.kwargs['processes'] for call in ledger.event.mock_calls]
  assert processes == [[1], [1]]
