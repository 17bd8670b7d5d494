"""Number of injections of each fault: few in CI, all with --all."""

import collections
import os

ALL = os.environ.get('VIT_JAX_FAULTS') == 'all'
INJECTED: collections.Counter[str] = collections.Counter()


def count(few: int, many: int) -> int:
  """Returns how often to inject a fault in this run of the tests."""
  return many if ALL else few


def injected(kind: str) -> None:
  """Counts one injection; the counts are printed at the end of the tests."""
  INJECTED[kind] += 1
