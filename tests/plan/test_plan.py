"""Tests of the command plan with small TPU programs."""

import importlib.util
import json
import subprocess
import sys

import pytest

from tests import cli

needs_libtpu = pytest.mark.skipif(
  importlib.util.find_spec('libtpu') is None,
  reason='libtpu, which compiles for TPUs, is not installed',
)
# l16_i21k.py with small sizes.
SMALL = {
  'model.width': 128,
  'model.depth': 2,
  'model.mlp_dim': 512,
  'model.num_heads': 2,
  'model.dropout': 0.0,
  'num_classes': 100,
  'batch_size': 512,
}
# Keys on which scripts rely.
KEYS = set(
  'topology devices parameters fits peak_bytes_per_device hbm_bytes_per_device '
  'model_flops_per_image predicted_step_seconds predicted_mfu '
  'predicted_images_per_second total_steps predicted_core_days collectives '
  'estimated_cycles uncounted_cycles collective_seconds batch_size '
  'predicted_step_seconds_range'.split()
)


def arguments(*more, topology='v3:2x2', **overrides):
  """Returns the command line; keys of overrides have '__' for '.'."""
  changes = SMALL | {k.replace('__', '.'): v for k, v in overrides.items()}
  given = [f'--config.{key}={value}' for key, value in changes.items()]
  return cli.command(
    'plan',
    '--config=configs/l16_i21k.py',
    f'--topology={topology}',
    *given,
    *more,
  )


def planned(*more, **overrides):
  """Returns the object that --json prints."""
  out, _ = cli.run(arguments('--json', *more, **overrides), devices=8)
  return json.loads(out)


@needs_libtpu
@pytest.mark.slow
def test_keys_of_a_plan():
  """Two slices with sharded parameters; the values are consistent."""
  result = planned(
    '--slices=2',
    '--breakdown',
    '--price=1.5',
    mesh__data=2,
    mesh__fsdp=-1,
    mesh__zero1=False,
    micro_batches=2,
    model__attention='xla',
  )
  assert set(result) >= KEYS
  assert result['topology'] == '2 slices of v3:2x2' and result['fits']
  assert result['devices'] == 16
  assert result['collectives']['all-gather'] > 0  # of parameters, over fsdp
  assert result['hbm_bytes_per_device'] == int(15.48 * 2**30)
  sizes = result['bytes']
  assert 0 < sizes['parameters'] < result['parameters']  # 4 bytes, in 8 parts
  assert sizes['optimizer'] == pytest.approx(2 * sizes['parameters'], rel=0.01)
  assert (
    sizes['arguments'] + sizes['temporaries']
    <= (result['peak_bytes_per_device'])
  )
  seconds = result['predicted_step_seconds']
  assert seconds > result['estimated_cycles'] / 0.94e9 > 0
  low, high = result['predicted_step_seconds_range']
  assert low <= seconds < high
  assert result['predicted_images_per_second'] == pytest.approx(512 / seconds)
  days = seconds * result['total_steps'] / 86400
  assert result['predicted_core_days'] == pytest.approx(days * 16)
  assert result['price'] == pytest.approx(days * 16 * 24 * 1.5)
  assert 0 < result['predicted_mfu'] < 1
  assert any('attention' in each['group'] for each in result['breakdown'])


@needs_libtpu
@pytest.mark.long
def test_a_batch_that_does_not_fit():
  """The result states the memory that it needs, and the flag that helps."""
  scanned = dict(model__attention='xla', model__unroll=1, mesh__zero1=False)
  scanned['schedule__warmup'] = '10 steps'  # of 1,214
  result = planned('--price=2', batch_size=2**20, image_size=64, **scanned)
  assert set(result) >= KEYS and result['fits'] is False
  assert result['peak_bytes_per_device'] > result['hbm_bytes_per_device']
  assert result['predicted_step_seconds'] is None
  assert 'DOES NOT FIT (--search' in result['summary']


@needs_libtpu
@pytest.mark.long
@pytest.mark.timeout(600)
def test_cost_of_l16():
  """L/16 at batch size 4096 fits, in no more cycles than documented."""
  words = ['--config=configs/l16_i21k.py', '--topology=v3:4x4', '--json']
  plan = json.loads(cli.run(cli.command('plan', *words))[0])
  assert plan['fits'] and plan['batch_size'] == 4096
  assert plan['peak_bytes_per_device'] < 11.5 * 2**30
  cycles = plan['estimated_cycles'] + plan['uncounted_cycles']
  assert cycles < 1.02 * 1035.3e6  # benchmarks/RESULTS.md
  assert plan['uncounted_cycles'] > 0  # of kernels for attention
  assert plan['collectives'] == {'all-gather': 20, 'all-reduce': 176}
  # Two bytes per gradient and exchange; those of fc1 are exchanged once a step.
  assert plan['collective_bytes']['all-reduce'] < 3.5 * plan['parameters']
  assert plan['predicted_core_days'] < 0.6 * plan['paper_core_days']


@pytest.mark.slow
def test_without_libtpu_the_message_names_the_package():
  """The exit code is 2."""
  start = (
    "import runpy, sys; sys.modules['libtpu'] = None; "
    "runpy.run_module('vit_jax.plan', run_name='__main__', alter_sys=True)"
  )
  command = arguments()
  code = [sys.executable, '-c', start, *command[3:]]
  done = subprocess.run(code, cwd=cli.ROOT, capture_output=True, text=True)
  assert done.returncode == 2
  assert 'TPU compiler' in done.stderr
  assert 'vit_jax[plan]' in done.stderr and 'Traceback' not in done.stderr


@pytest.mark.slow
def test_a_plan_for_this_machine():
  """A CPU has no predicted times, but memory."""
  result = planned(
    topology='local',
    model__width=32,
    model__mlp_dim=32,
    model__dtype='float32',
    image_size=32,
    batch_size=16,
  )
  assert set(result) >= KEYS and result['fits']
  assert result['predicted_step_seconds'] is None
  assert result['peak_bytes_per_device'] > 0
