"""Tests of data whose opening does not end."""

import signal
from unittest import mock

import numpy as np
import pytest

from tests import cli
from tests.faults.counts import injected
from vit_jax.data import progress
from vit_jax.data.storage import index
from vit_jax.errors import EXIT_PREEMPTED, EXIT_STUCK


def _command(tmp_path, **changes):
  settings = {
    key: value
    for key, value in cli.SMALL_L16.items()
    if not key.startswith('source.')
  }
  settings |= {
    'source.name': 'tests.faults.endless_opening',
    'source.mark': str(tmp_path / 'mark'),
  }
  flags = cli.flags('configs/l16_i21k.py', tmp_path / 'run', settings | changes)
  injected('data that never open')
  return cli.command('train', *flags)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_opening_ends_after_the_time_limit(tmp_path):
  """The message states what was done and where the stack traces are."""
  limit = {'recovery.watchdog_pause_s': 10}
  _, err = cli.run(_command(tmp_path, **limit), code=EXIT_STUCK)
  assert 'within 10.0 s while opening the data' in err
  assert 'endless_opening.py' in (tmp_path / 'run/stacks.txt').read_text()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_signal_during_the_opening_ends_the_process(tmp_path):
  process = cli.start(_command(tmp_path))
  cli.wait_until((tmp_path / 'mark').exists, process)
  process.send_signal(signal.SIGINT)
  _, err = cli.finish(process, code=EXIT_PREEMPTED)
  assert 'interrupted by SIGINT; nothing had to be saved' in err


def test_indexing_reports_progress_per_file(tmp_path):
  """Opening large data may take longer than the limit in total."""

  def scan(path):
    progress.made()
    return index.Scan({'offset': np.zeros(1, np.int64)}, index.WHOLE)

  paths, made = [str(tmp_path / name) for name in 'abc'], mock.Mock()
  with progress.reported_to(made):
    index._build(paths, 'test', scan)
  progress.made()  # without a listener nothing happens
  assert made.call_count == 2 * len(paths)  # during each scan, and after it
