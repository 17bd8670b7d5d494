"""How many faults are injected, and cases tested: few in CI, all with --all.

`launch/test_newest.sh --ci` tests only the first case of each test.
"""

import collections
import os
from collections.abc import Iterable
from typing import Any

import pytest

ALL = os.environ.get('VIT_JAX_TESTS') == 'all'
FIRST = os.environ.get('VIT_JAX_TESTS') == 'first'
INJECTED: collections.Counter[str] = collections.Counter()


def count(few: int, many: int) -> int:
  """Returns how often to inject a fault, or the number of cases."""
  return many if ALL else few


def further(*cases: Any) -> list[Any]:
  """Returns cases of a parametrized test that only --all runs.

  Args:
    *cases: values of the test's argument, or lists of its arguments' values.
  """
  return _marked(cases, pytest.mark.long)


def slow(*cases: Any) -> list[Any]:
  """Returns cases that only --ci and --all run; arguments as of `further`."""
  return _marked(cases, pytest.mark.slow)


def _marked(cases: Iterable[Any], mark: pytest.MarkDecorator) -> list[Any]:
  values = [case if isinstance(case, list) else [case] for case in cases]
  return [pytest.param(*each, marks=mark) for each in values]


def injected(kind: str) -> None:
  """Counts one injection; the counts are printed at the end of the tests."""
  INJECTED[kind] += 1
