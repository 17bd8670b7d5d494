"""Tests of progress reports on a terminal and in a log."""

import pytest

from vit_jax.data import progress


@pytest.fixture
def reported(monkeypatch, capsys):
  """Returns a function: (terminal, seconds per item) → stderr of four items."""

  def work(terminal, seconds):
    clock = iter(range(0, 1000, seconds)) if seconds else iter([0.0] * 9)
    monkeypatch.setattr(progress.time, 'monotonic', lambda: next(clock))
    monkeypatch.setattr(progress.sys.stderr, 'isatty', lambda: terminal)
    assert [*progress.shown(iter('abcd'), 4, 'indexing')] == [*'abcd']
    return capsys.readouterr().err

  return work


@pytest.mark.parametrize('terminal', [False, True])
def test_short_operations_are_not_reported(reported, terminal):
  assert reported(terminal, 0) == ''


def test_lines_in_a_log(reported):
  """There is at most one line in ten seconds, and a last line."""
  assert reported(False, 8).splitlines() == [
    'indexing:  50%, 16 s',
    'indexing: 100%, 32 s',
  ]


def test_a_bar_on_a_terminal(reported):
  """A single line is overwritten, and ends with a line feed."""
  drawn = reported(True, 2)
  assert drawn.count('\n') == 1 and drawn.endswith('100%, 8 s\n')
  first, *_, last = drawn.strip().split('\r')
  assert first == f'indexing: [{"#" * 6}{" " * 18}]  25%, 2 s'
  assert last == f'indexing: [{"#" * 24}] 100%, 8 s'
