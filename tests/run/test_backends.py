"""A libtpu for `plan` on a machine without a TPU says nothing."""

import importlib.util
import os
import subprocess
import sys

import pytest

from tests import runs
from vit_jax.run import backends

DEVICES = 'import jax; print(jax.devices()[0].platform)'


@pytest.mark.skipif(
  importlib.util.find_spec('libtpu') is None or backends._has_devices('tpu'),
  reason='libtpu is not installed, or there is a TPU',
)
@pytest.mark.parametrize('quiet', [True, False])
def test_libtpu_has_nothing_to_complain_of(quiet):
  start = 'from vit_jax.run import backends; backends.quiet_without_tpu(); '
  environment = os.environ | {'PYTHONPATH': str(runs.ROOT)}
  for name in ('JAX_PLATFORMS', 'TPU_ACCELERATOR_TYPE', 'TPU_WORKER_HOSTNAMES'):
    environment.pop(name, None)
  done = subprocess.run(
    [sys.executable, '-c', start * quiet + DEVICES],
    env=environment,
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert done.stdout == 'cpu\n'
  assert ('TPU' not in done.stderr) == quiet, done.stderr


def test_where_there_is_a_tpu_nothing_is_set(monkeypatch):
  monkeypatch.setattr(backends, '_DEVICES', {'tpu': ('null',)})
  monkeypatch.delenv('TPU_ACCELERATOR_TYPE', raising=False)
  backends.quiet_without_tpu()
  assert 'TPU_ACCELERATOR_TYPE' not in os.environ
