"""Eight virtual CPU devices and run-time type checks for the whole suite."""

import collections
import os

# Before jax is imported: it reads both only once.
os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = ' '.join(
  [
    os.environ.get('XLA_FLAGS', ''),
    '--xla_force_host_platform_device_count=8',
    # Compiling takes longer than what is compiled: a fifth of the suite's time.
    '--xla_backend_optimization_level=0',
  ]
).strip()

import jaxtyping  # noqa: E402 (after the environment)
import pytest  # noqa: E402

from tests.faults.counts import INJECTED  # noqa: E402

# Every annotated function of the package checks its arguments and result, the
# shapes of arrays included, while the tests run; flax modules are no exception.
jaxtyping.install_import_hook('vit_jax', 'typecheck.typechecked')

import jax  # noqa: E402

from tests import runs  # noqa: E402
from tests.command_line import command_line as command_line  # noqa: E402

# Made before worker processes start. What one test compiled, the next loads.
jax.config.update('jax_compilation_cache_dir', runs.compilation_cache())
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)


# Their signals race with processes on a busy machine: one that fails is tried
# again, and the summary counts it. What is broken fails three times.
_RACES = ('tests/faults/', 'tests/multiprocess/')


def pytest_collection_modifyitems(items):
  """Tests that kill and stop processes get two more tries."""
  for item in items:
    races = item.nodeid.startswith(_RACES) and item.get_closest_marker('slow')
    if races or item.get_closest_marker('long'):
      item.add_marker(pytest.mark.flaky(reruns=2))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
  """Puts the faults that a test injects into its report."""
  before = INJECTED.copy()
  try:
    return (yield)
  finally:
    item.user_properties += (INJECTED - before).items()


def pytest_terminal_summary(terminalreporter):
  """How often each kind of fault was injected, a line a kind."""
  injected = collections.Counter()
  for reports in terminalreporter.stats.values():
    for report in reports:
      if getattr(report, 'when', None) == 'call':
        injected.update(dict(report.user_properties))
  if injected:
    terminalreporter.section('faults injected')
  for kind, number in sorted(injected.items()):
    terminalreporter.write_line(f'{number:4d}  {kind}')
