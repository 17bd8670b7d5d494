"""There are mutants enough; that each fits is in tests/mutants."""

from tests.mutants import run

MUTANTS = [run.Mutant.read(path) for path in sorted(run.HERE.glob('*.patch'))]


def test_there_are_many():
  """As many as the tests are meant to notice, each of them once."""
  assert len(MUTANTS) >= 30
  changes = {(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}
  assert len(changes) == len(MUTANTS)
