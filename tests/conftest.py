"""Sets up eight virtual CPU devices and run-time type checks for all tests."""

import collections
import os
import signal
import sys

from tests import xla_flags

# Set before jax is imported, because jax reads both only once.
os.environ['JAX_PLATFORMS'] = 'cpu'
_given = os.environ.get('XLA_FLAGS', '')
os.environ['XLA_FLAGS'] = f'{_given} {xla_flags.flags(devices=8)}'.strip()

# The processes of tests inherit ignored signals: SIGINT in the background of a
# script, SIGHUP under nohup.
for _number, _default in (
  (signal.SIGINT, signal.default_int_handler),
  (signal.SIGHUP, signal.SIG_DFL),
):
  if signal.getsignal(_number) is signal.SIG_IGN:
    signal.signal(_number, _default)

# PyTorch imports Triton if it can, which crashes a process that has imported
# TensorFlow 2.21 (Python 3.13). It is only needed on GPUs.
sys.modules['triton'] = None

import jaxtyping  # noqa: E402 (after the environment)
import pytest  # noqa: E402

from tests.faults.counts import FIRST, INJECTED  # noqa: E402

# While the tests run, every annotated function of the package checks its
# arguments and result, including array shapes and Flax modules.
jaxtyping.install_import_hook('vit_jax', 'typecheck.typechecked')

import jax  # noqa: E402

from tests import cli  # noqa: E402
from tests.command_line import command_line as command_line  # noqa: E402

# Created before worker processes start, so that tests share compiled programs.
jax.config.update('jax_compilation_cache_dir', cli.compilation_cache())
# Writing and finding the programs of single operations would take longer.
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.1)


# The signals of these tests race with processes on a busy machine. A test that
# fails is repeated and counted in the summary; broken code fails three times.
_RACES = ('tests/faults/', 'tests/multiprocess/')


def pytest_collection_modifyitems(config, items):
  """Begins with slow files; repeats failing tests that kill processes.

  Otherwise, a worker could be left with a slow test when the others have ended.
  """
  if FIRST:
    _keep_first_cases(config, items)
  slow = {item.path for item in items if not _is_fast(item)}
  items.sort(key=lambda item: item.path not in slow)
  for item in items:
    races = item.nodeid.startswith(_RACES) and not _is_fast(item)
    if races or item.get_closest_marker('long'):
      item.add_marker(pytest.mark.flaky(reruns=2))


def _is_fast(item):
  return not (
    item.get_closest_marker('slow') or item.get_closest_marker('long')
  )


def _keep_first_cases(config, items):
  """Removes all cases of a parametrized test but the first fast one."""
  kept = {}
  for item in items:
    if _is_fast(item):
      kept.setdefault(item.nodeid.partition('[')[0], item)
  first = set(kept.values())
  others = [item for item in items if item not in first]
  config.hook.pytest_deselected(items=others)
  items[:] = kept.values()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
  """Adds the faults that a test injects to its report."""
  before = INJECTED.copy()
  try:
    return (yield)
  finally:
    item.user_properties += (INJECTED - before).items()


def pytest_terminal_summary(terminalreporter):
  """Prints how often each kind of fault was injected."""
  injected = collections.Counter()
  for reports in terminalreporter.stats.values():
    for report in reports:
      if getattr(report, 'when', None) == 'call':
        injected.update(dict(report.user_properties))
  if injected:
    terminalreporter.section('faults injected')
  for kind, number in sorted(injected.items()):
    terminalreporter.write_line(f'{number:4d}  {kind}')
