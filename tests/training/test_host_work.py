"""Tests that the host does not delay the devices."""

import json
import sys

import pytest

from tests import cli

CHANGES = {
  'total': '"12 steps"',
  'schedule__warmup': '"5 steps"',
  'batch_size': 64,
  'evals__test__every': '"12 steps"',
  'checkpoint__every': '"12 steps"',
  'log__every': '"5 steps"',
}


@pytest.mark.slow
def test_one_compilation_and_one_transfer_per_batch():
  """Steps 2 to 12 compile nothing; a batch is sent once, as uint8.

  A batch that is still on the host is refused.
  """
  script = str(cli.ROOT / 'tests' / 'count_host_work.py')
  given = [f'{key}={value}' for key, value in CHANGES.items()]
  out, _ = cli.run([sys.executable, script, 'configs/quickstart.py', *given])
  seen = json.loads(out.splitlines()[-1])
  assert len(seen['compiles']) == 12
  assert seen['compiles'][0] > 0
  assert len(set(seen['compiles'][1:])) == 1
  assert 'Disallowed host-to-device transfer' in seen['refused']
  images = [a for a in seen['arrays'] if len(a) == 5]
  training = [dtype for dtype, *shape in images if shape[0] == 64]
  assert len(training) >= 12
  assert all(dtype == 'uint8' for dtype, *_ in images)
  others = [a for a in seen['arrays'] if len(a) != 5]
  assert all(len(shape) == 1 for _, *shape in others)  # one number per example
