"""How many faults are injected, and cases tested: few in CI, all with --all."""

import collections
import os

ALL = os.environ.get('VIT_JAX_TESTS') == 'all'
INJECTED: collections.Counter[str] = collections.Counter()


def count(few: int, many: int) -> int:
  """Returns how often to inject a fault, or the number of cases."""
  return many if ALL else few


def injected(kind: str) -> None:
  """Counts one injection; the counts are printed at the end of the tests."""
  INJECTED[kind] += 1
