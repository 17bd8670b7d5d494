"""Tests that mutants can be applied; `launch/test.sh --mutants` runs them."""

from tests.mutants import run

MUTANTS = [run.Mutant.read(path) for path in sorted(run.HERE.glob('*.patch'))]


def test_there_are_many_different_mutants():
  assert len(MUTANTS) >= 30
  changes = {(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}
  assert len(changes) == len(MUTANTS)


def test_patches_can_be_applied():
  """Each old text occurs once in its file, and its test files exist."""
  troubles = {mutant.name: mutant.trouble() for mutant in MUTANTS}
  assert not {name: each for name, each in troubles.items() if each}
