"""Tests of the environment that backends get before JAX is imported."""

import importlib.util
import os
import subprocess
import sys

import pytest

from tests import cli
from tests.faults.counts import further
from vit_jax.processes import machine

LOADED = """
import sys
import jax
if sys.argv[1] == 'hidden':
  from vit_jax.processes import machine
  machine.hide_unused_libtpu()
jax.devices()
print('libtpu.so' in open('/proc/self/maps').read())
"""
without_tpu = pytest.mark.skipif(
  importlib.util.find_spec('libtpu') is None
  or machine._has_devices('tpu')
  or machine._has_google_device(),
  reason='libtpu is not installed, or there is a TPU',
)


@pytest.mark.slow
@without_tpu
@pytest.mark.parametrize('hidden', [True, *further(False)])
def test_a_hidden_libtpu_is_not_loaded(hidden):
  """Importing JAX without a TPU then prints nothing."""
  environment = os.environ | {'PYTHONPATH': str(cli.ROOT)}
  environment.pop('JAX_PLATFORMS', None)
  done = subprocess.run(
    [sys.executable, '-c', LOADED, 'hidden' if hidden else 'seen'],
    env=environment,
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert (done.stdout == 'False\n') == hidden
  assert not (hidden and done.stderr)


@pytest.mark.parametrize('there', ['platforms', 'device', 'bus', None])
def test_libtpu_is_hidden_only_without_a_tpu(there, monkeypatch):
  """A TPU is detected by its device, on the bus, or by JAX_PLATFORMS."""
  monkeypatch.setattr(machine, '_has_google_device', lambda: there == 'bus')
  devices = ('null',) if there == 'device' else ('no_such_device*',)
  monkeypatch.setattr(machine, '_DEVICES', {'tpu': devices})
  monkeypatch.setenv('JAX_PLATFORMS', 'tpu,cpu' if there == 'platforms' else '')
  monkeypatch.setitem(sys.modules, 'libtpu', before := object())
  monkeypatch.setenv('TPU_LIBRARY_PATH', 'x')
  machine.hide_unused_libtpu()
  assert (sys.modules['libtpu'] is before) == (there is not None)
  assert ('TPU_LIBRARY_PATH' in os.environ) == (there is not None)


@pytest.mark.parametrize(
  'variable, value, device, expected',
  [
    ('XLA_CLIENT_MEM_FRACTION', '', True, '0.9'),
    ('XLA_CLIENT_MEM_FRACTION', '0.5', True, '0.5'),
    ('XLA_PYTHON_CLIENT_MEM_FRACTION', '0.5', True, None),
    ('XLA_CLIENT_MEM_FRACTION', '', False, ''),
  ],
)
def test_gpu_memory_fraction(monkeypatch, variable, value, device, expected):
  """The fraction is set only with a GPU; the user's value is kept."""
  made = {variable: value}
  monkeypatch.setattr(machine.os, 'environ', made)
  devices = ('null',) if device else ('no_such_device*',)
  monkeypatch.setattr(machine, '_DEVICES', {'cuda': devices})
  machine.use_gpu_memory()
  assert made.get('XLA_CLIENT_MEM_FRACTION') == expected
  assert made[variable] == expected or expected is None
