"""Eight virtual CPU devices and run-time type checks for the whole suite."""

import os

# Before jax is imported: it reads both only once.
os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = ' '.join(
  [
    os.environ.get('XLA_FLAGS', ''),
    '--xla_force_host_platform_device_count=8',
  ]
).strip()

import jaxtyping  # noqa: E402 (after the environment)

from tests.faults.counts import INJECTED  # noqa: E402

# Every annotated function of the package checks its arguments and result, the
# shapes of arrays included, while the tests run; flax modules are no exception.
jaxtyping.install_import_hook('vit_jax', 'typecheck.typechecked')


def pytest_terminal_summary(terminalreporter):
  """How often each kind of fault was injected, a line a kind."""
  if INJECTED:
    terminalreporter.section('faults injected')
  for kind, number in sorted(INJECTED.items()):
    terminalreporter.write_line(f'{number:4d}  {kind}')
