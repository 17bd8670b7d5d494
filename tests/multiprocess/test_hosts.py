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
  batches, filled = {}, {}
  for host in range(hosts):
    with np.load(folder / f'{host}.npz') as held:
      for name, rows in held.items():
        step, key, first, stop = name.split()
        batch = batches.setdefault(int(step), {})
        whole = batch.setdefault(key, np.zeros((BATCH, *rows.shape[1:])))
        whole[int(first) : int(stop)] = rows
        filled.setdefault((int(step), key, host), set()).add((first, stop))
  held_by = [sum(k[2] == host for k in filled) for host in range(hosts)]
  assert len(set(held_by)) == 1 and held_by[0]  # every host held its rows
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
  ways = {'two, from the middle': dict(hosts=2, start=2, workers=2)}
  if ALL:
    ways['four'] = dict(hosts=4)
  for name, settings in ways.items():
    several = _batches(tmp_path / name, **settings)
    start = settings.get('start', 0)
    assert list(several) == list(range(start, STEPS)), name
    for step, batch in several.items():
      for key in ('image', 'label', 'replaced'):
        np.testing.assert_array_equal(
          batch[key], one[step][key], err_msg=f'{name}: {step} {key}'
        )
