"""Tests the number of mutants; tests/mutants/test_patches.py applies them."""

from tests.mutants import run

MUTANTS = [run.Mutant.read(path) for path in sorted(run.HERE.glob('*.patch'))]


def test_there_are_many_different_mutants():
  assert len(MUTANTS) >= 30
  changes = {(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}
  assert len(changes) == len(MUTANTS)
