"""The mutants can be made: what they change is there, and who must notice."""

import pytest

from tests.mutants import run

MUTANTS = [run.Mutant.read(path) for path in sorted(run.HERE.glob('*.patch'))]


def test_there_are_many():
  """As many as the tests are meant to notice, each of them once."""
  assert len(MUTANTS) >= 30
  changes = {(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}
  assert len(changes) == len(MUTANTS)


@pytest.mark.parametrize('mutant', MUTANTS, ids=lambda mutant: mutant.name)
def test_its_place_is_there(mutant):
  """Its old text stands once in its file, and its tests exist."""
  assert (run.ROOT / mutant.file).read_text().count(mutant.old) == 1
  assert mutant.old != mutant.new and mutant.red
  for test in mutant.red:
    assert (run.ROOT / test.partition('::')[0]).is_file()
