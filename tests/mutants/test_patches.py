"""Every mutant can be applied; `bash launch/test.sh --mutants` runs them."""

import pytest
import run


@pytest.mark.parametrize(
  'path', sorted(run.HERE.glob('*.patch')), ids=lambda path: path.stem
)
def test_a_patch_fits_the_tree(path):
  """Its old text stands once in its file, and its tests are there."""
  assert run.Mutant.read(path).trouble() is None
