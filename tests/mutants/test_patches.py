"""Tests that mutants can be applied; `launch/test.sh --mutants` runs them."""

import pytest
import run


@pytest.mark.parametrize(
  'path', sorted(run.HERE.glob('*.patch')), ids=lambda path: path.stem
)
def test_a_patch_can_be_applied(path):
  """Its old text occurs once in its file, and its test files exist."""
  assert run.Mutant.read(path).trouble() is None
