"""How often each fault is injected: a few in CI, all with --all."""

import os

ALL = os.environ.get('VIT_JAX_FAULTS') == 'all'


def count(kind: str, few: int, many: int) -> int:
  """The number of injections, printed as the tests run (see -rP or --all)."""
  number = many if ALL else few
  print(f'{kind}: {number} injections')
  return number
