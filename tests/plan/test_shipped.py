"""The main configs on the slices they are meant for: what they cost, proven."""

import json

import pytest

from tests import runs
from tests.plan.test_plan import needs_libtpu

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), needs_libtpu]


def planned(config: str, topology='v3:4x4', **overrides):
  """The object that --json prints; `cycles` are all of them."""
  given = [f'--config.{k.replace("__", ".")}={v}' for k, v in overrides.items()]
  arguments = [f'--config={config}', f'--topology={topology}', '--json', *given]
  result = json.loads(runs.run(runs.command('plan', *arguments))[0])
  cycles = result['estimated_cycles'] + result['uncounted_cycles']
  return result | {'cycles': cycles}


def test_l16():
  """L/16 at 4096 fits, in no more cycles than it took."""
  plan = planned('configs/l16_i21k.py', model__dropout=0.0)
  assert plan['fits'] and plan['batch_size'] == 4096
  assert plan['peak_bytes_per_device'] < 11.5 * 2**30
  assert plan['cycles'] < 1.02 * 989.8e6  # benchmarks/RESULTS.md
  kernels = plan['uncounted']['custom-call tpu_custom_call']
  assert kernels['times'] == 2 * 24 * 2  # directions, layers, micro-batches
  assert plan['collectives'] == {'all-gather': 20, 'all-reduce': 14}
  assert plan['predicted_core_days'] < 0.6 * plan['paper_core_days']


def test_dropout_is_cheap():
  """A few layers of L/16 with the recipe's dropout cost 8 % more at most."""
  few = dict(model__depth=2, model__unroll=1, batch_size=512, micro_batches=1)
  plain, dropping = (
    planned('configs/l16_i21k.py', 'v3:2x2', model__dropout=rate, **few)
    for rate in (0.0, 0.1)
  )
  assert plain['cycles'] < dropping['cycles'] < 1.08 * plain['cycles']


def test_h14():
  """H/14 at 4096 fits 32 cores by fsdp, at half the peak and more."""
  plan = planned('configs/vit.py:variant=H/14,data=jft')
  assert plan['fits'] and plan['batch_size'] == 4096
  assert plan['predicted_mfu'] > 0.5
  assert plan['bytes']['parameters'] < plan['parameters'] * 4 / 31  # sharded
