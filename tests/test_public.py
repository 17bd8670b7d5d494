"""Tests of the public names of the package, and of importing it."""

import subprocess
import sys

import pytest

import vit_jax

IMPORTED = """
import signal, sys, threading
before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
sys.argv[:1] = ['-m']  # as in `python -m a_lab.train`, which imports vit_jax
import vit_jax
assert before == {n: signal.getsignal(n) for n in before}
assert threading.active_count() == 1
assert 'jax' not in sys.modules
assert [m for m in sys.modules if m.startswith('vit_jax.')] == []
"""


def test_importing_has_no_side_effects():
  """No signal handler, thread, JAX or other module is loaded."""
  subprocess.run([sys.executable, '-c', IMPORTED], check=True, timeout=60)


def test_an_import_on_windows_names_wsl():
  """Windows has neither of two modules, which would be named otherwise."""
  blocked = 'import sys; sys.modules |= {"fcntl": None, "resource": None}; '
  for imported in ('import vit_jax', 'from vit_jax import load_pretrained'):
    done = subprocess.run(
      [sys.executable, '-c', blocked + imported],
      capture_output=True,
      text=True,
      timeout=60,
    )
    last = done.stderr.splitlines()[-1]
    assert done.returncode and 'ImportError' in last and 'WSL' in last


def test_dir_and_help_list_the_public_names():
  """They do so before any function has been used."""
  assert {'load_pretrained', 'save_pretrained'} <= {*vit_jax.__all__}
  assert {*vit_jax.__all__} <= {*dir(vit_jax)}
  for name in vit_jax.__all__:
    assert getattr(vit_jax, name).__doc__
  assert 'load_pretrained(' in vit_jax.__doc__
  with pytest.raises(AttributeError, match='load_pretraind'):
    vit_jax.load_pretraind  # noqa: B018
