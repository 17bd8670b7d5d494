"""Tests that batches do not depend on the number of hosts."""

import sys

import numpy as np
import pytest

from tests import cli
from tests.faults.counts import ALL
from tests.multiprocess.host_batches import BATCH, STEPS


def _batches(folder, hosts, start=0, workers=0):
  """Returns {step: {key: rows}}, assembled from what each host held."""
  folder.mkdir()
  port, module = cli.free_port(), 'tests.multiprocess.host_batches'
  processes = [
    cli.start(
      [sys.executable, '-m', module]
      + [str(x) for x in (port, hosts, host, start, workers)]
      + [str(folder / f'{host}.npz')],
      devices=8 // hosts,
    )
    for host in range(hosts)
  ]
  for process in processes:
    cli.finish(process)
  batches, parts = {}, set()
  for host in range(hosts):
    with np.load(folder / f'{host}.npz') as held:
      parts.add(len(held))
      for name, rows in held.items():
        step, key, first, stop = name.split()
        batch = batches.setdefault(int(step), {})
        whole = batch.setdefault(key, np.zeros((BATCH, *rows.shape[1:])))
        whole[int(first) : int(stop)] = rows
  assert len(parts) == 1 and parts != {0}  # every host held its rows
  return batches


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_any_number_of_hosts_gives_the_same_batches(tmp_path):
  """A mixture with bad records and skipped batches.

  Also from the middle of the training, and read by worker processes. Four hosts
  are tested with --all.
  """
  one = _batches(tmp_path / 'one', hosts=1)
  assert list(one) == list(range(STEPS))
  assert sum(batch['replaced'].sum() for batch in one.values()) > 0
  for hosts, start in ((2, 2), (4, 0)) if ALL else ((2, 2),):
    several = _batches(tmp_path / f'{hosts}', hosts, start, workers=2)
    assert list(several) == list(range(start, STEPS))
    for step, batch in several.items():
      for key in ('image', 'label', 'replaced'):
        np.testing.assert_array_equal(
          batch[key], one[step][key], err_msg=f'{hosts} hosts: {step} {key}'
        )
