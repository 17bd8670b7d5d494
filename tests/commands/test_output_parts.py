"""Tests of results that are written in parts."""

import numpy as np
import pytest
from etils import epath

from vit_jax.cli import output_parts
from vit_jax.errors import UserError

ABOUT = {'examples': 10, 'batch_size': 2}


def batches(start, end=10):
  """Yields the numbers of examples, and fails after `end` of them."""
  for i in range(start, 10, 2):
    if i >= end:
      raise KeyboardInterrupt
    yield {'x': np.arange(i, i + 2)}


def test_parts_of_another_size_are_not_continued(tmp_path):
  """The same size continues without a gap; another size is refused."""
  out = epath.Path(tmp_path / 'out.npz')
  with pytest.raises(KeyboardInterrupt):
    output_parts.resume(out, ABOUT, 2, lambda start: batches(start, 6))
  with pytest.raises(UserError, match='part_examples'):
    output_parts.resume(out, ABOUT, 3, batches)
  parts, count = output_parts.resume(out, ABOUT, 2, batches)
  found = [parts.read(number)['x'] for number in range(count)]
  np.testing.assert_array_equal(np.concatenate(found), np.arange(10))
