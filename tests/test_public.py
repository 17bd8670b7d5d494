"""The public names of the package, and what importing it does."""

import subprocess
import sys

import pytest

import vit_jax

IMPORTED = """
import signal, sys, threading
before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
sys.argv[:1] = ['-m']  # as in `python -m a_lab.train`, which imports us
import vit_jax
assert before == {n: signal.getsignal(n) for n in before}
assert threading.active_count() == 1
assert 'jax' not in sys.modules
assert [m for m in sys.modules if m.startswith('vit_jax.')] == []
"""


def test_importing_has_no_side_effects():
  """No handler of signals, no thread, no JAX, no other module."""
  subprocess.run([sys.executable, '-c', IMPORTED], check=True, timeout=60)


def test_public_names_are_shown():
  """`dir` and `help` list the functions before anyone has used them."""
  assert {'load_pretrained', 'save_pretrained'} <= {*vit_jax.__all__}
  assert {*vit_jax.__all__} <= {*dir(vit_jax)}
  for name in vit_jax.__all__:
    assert getattr(vit_jax, name).__doc__
  assert 'load_pretrained(' in vit_jax.__doc__
  with pytest.raises(AttributeError, match='load_pretraind'):
    vit_jax.load_pretraind  # noqa: B018
