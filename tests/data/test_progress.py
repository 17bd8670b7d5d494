"""Tests of the progress that long operations report."""

import pytest

from vit_jax.data import progress


@pytest.mark.parametrize(
  'seconds, lines',
  [(0, []), (2, []), (8, ['a set:  50%, 16 s', 'a set: 100%, 32 s'])],
)
def test_there_is_at_most_one_line_in_ten_seconds(
  monkeypatch, capsys, seconds, lines
):
  """If there is a line, there is also a last one."""
  clock = iter([seconds * i for i in range(9)])
  monkeypatch.setattr(progress.time, 'monotonic', lambda: next(clock))
  assert [*progress.shown(iter('abcd'), 4, 'a set')] == [*'abcd']
  assert capsys.readouterr().err.splitlines() == lines
