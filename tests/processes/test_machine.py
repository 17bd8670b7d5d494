"""Tests of the devices and limits of a machine."""

import importlib.util
import os
import pathlib
import shlex
import subprocess
import sys
import threading

import pytest

from tests import cli
from vit_jax.errors import UserError
from vit_jax.processes import machine


def meminfo() -> int:
  """Returns the total memory according to /proc/meminfo."""
  return int(pathlib.Path('/proc/meminfo').read_text().split()[1]) * 1024


@pytest.mark.parametrize(
  ('groups', 'files', 'expected'),
  [
    (None, {}, None),  # a machine without control groups
    ('', {}, None),
    ('0::/\n', {'memory.max': 'max'}, None),
    ('0::/\n', {'memory.max': '1000000'}, 10**6),  # as in a container
    # A batch system: a step within a job whose limit is lower.
    (
      '0::/slurm/job/step\n',
      {'slurm/job/memory.max': '3000', 'slurm/job/step/memory.max': '4000'},
      3000,
    ),
    # Version 1, without a limit, and with one.
    (
      '9:name=systemd:/\n4:memory:/a\n',
      {'memory/a/memory.limit_in_bytes': str(2**63 - 4096)},
      None,
    ),
    (
      '5:cpu:/b\n4:hugetlb,memory:/a\n0::/\n',
      {
        'memory/a/memory.limit_in_bytes': '6000',
        'memory/b/memory.limit_in_bytes': '1',
      },
      6000,
    ),
  ],
)
def test_memory_is_the_smallest_limit(
  groups, files, expected, tmp_path, monkeypatch
):
  """Limits of control groups and their parents count."""
  own = tmp_path / 'own'
  if groups is not None:
    own.write_text(groups)
  for name, text in files.items():
    path = tmp_path / 'groups' / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + '\n')
  monkeypatch.setattr(machine, '_CGROUPS_OF_PROCESS', own)
  monkeypatch.setattr(machine, '_CGROUPS', tmp_path / 'groups')
  assert machine.memory_bytes() == (expected or meminfo())


def test_too_few_threads_are_one_message(monkeypatch):
  """The threads that were started end."""
  start, started = threading.Thread.start, []

  def refused(self):
    if len(started) == 5:
      raise RuntimeError("can't start new thread")
    started.append(self)
    start(self)

  monkeypatch.setattr(threading.Thread, 'start', refused)
  with pytest.raises(UserError, match='only 5 of 64 threads.*ulimit -u'):
    machine.check_limits()
  for thread in started:
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.slow
def test_too_little_address_space_is_one_message():
  """The command ends with 2, and does not hang."""
  command = (
    f'ulimit -v 2600000; exec {shlex.quote(sys.executable)} -m vit_jax.train '
    '--config=configs/quickstart.py --workdir=unused'
  )
  ended = subprocess.run(
    ['bash', '-c', command], capture_output=True, text=True, timeout=120
  )
  assert ended.returncode == 2, ended.stderr
  assert 'ulimit -v' in ended.stderr and 'Traceback' not in ended.stderr


# Prints whether libtpu is loaded after JAX has looked for devices.
LOADED = """
import jax
from vit_jax.processes import machine
machine.hide_unused_libtpu()
jax.devices()
print('libtpu.so' in open('/proc/self/maps').read())
"""


@pytest.mark.slow
@pytest.mark.skipif(
  importlib.util.find_spec('libtpu') is None
  or machine._has_devices('tpu')
  or machine._has_google_device(),
  reason='libtpu is not installed, or there is a TPU',
)
def test_a_hidden_libtpu_is_not_loaded():
  """Importing JAX without a TPU then prints nothing."""
  environment = os.environ | {'PYTHONPATH': str(cli.ROOT)}
  environment.pop('JAX_PLATFORMS', None)
  command = [sys.executable, '-c', LOADED]
  done = subprocess.run(
    command, env=environment, capture_output=True, text=True, timeout=120
  )
  assert (done.stdout, done.stderr) == ('False\n', '')


def set_device(monkeypatch, platform, exists):
  """Makes a platform have devices, or none."""
  pattern = 'null' if exists else 'no_such_device*'
  monkeypatch.setattr(machine, '_DEVICES', {platform: (pattern,)})


@pytest.mark.parametrize('there', ['platforms', 'device', 'bus', None])
def test_libtpu_is_hidden_only_without_a_tpu(there, monkeypatch):
  """A TPU is detected by its device, on the bus, or by JAX_PLATFORMS."""
  monkeypatch.setattr(machine, '_has_google_device', lambda: there == 'bus')
  set_device(monkeypatch, 'tpu', there == 'device')
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
  environment = {variable: value}
  monkeypatch.setattr(machine.os, 'environ', environment)
  set_device(monkeypatch, 'cuda', device)
  machine.use_gpu_memory()
  assert environment.get('XLA_CLIENT_MEM_FRACTION') == expected
