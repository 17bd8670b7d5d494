"""Prints how often each kind of fault was injected."""

from tests.faults.counts import INJECTED


def pytest_terminal_summary(terminalreporter):
  """One line a kind, below the results."""
  if INJECTED:
    terminalreporter.section('faults injected')
  for kind, number in sorted(INJECTED.items()):
    terminalreporter.write_line(f'{number:4d}  {kind}')
