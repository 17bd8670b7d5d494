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
  assert output_parts.batch_size(out) == 2
  assert output_parts.batch_size(epath.Path(tmp_path / 'new.npz')) is None
  with pytest.raises(UserError, match='part_examples'):
    output_parts.resume(out, ABOUT, 3, batches)
  parts, count = output_parts.resume(out, ABOUT, 2, batches)
  found = [parts.read(number)['x'] for number in range(count)]
  np.testing.assert_array_equal(np.concatenate(found), np.arange(10))


def test_parts_with_missing_rows_are_refused(tmp_path):
  """A valid part that has lost rows is not joined."""
  out = epath.Path(tmp_path / 'out.npz')
  parts, _ = output_parts.resume(out, ABOUT, 2, batches)
  path = tmp_path / 'out.npz.parts' / '00001.npz'
  with np.load(path) as arrays:
    columns = dict(arrays)
  np.savez(path, **columns | {'x': columns['x'][:-1]})
  with pytest.raises(UserError, match='00001.npz cannot be read'):
    parts.read(1)
  np.savez(path, x=columns['x'])  # as older versions wrote it
  assert len(parts.read(1)['x']) == 4
  with pytest.raises(UserError, match='00001.npz cannot be read'):
    parts.read(1, ['y'])


def test_results_of_older_versions_are_recognized(tmp_path):
  """Their fingerprints have fewer entries; other entries must be equal."""
  out = epath.Path(tmp_path / 'out.npz')
  older = ABOUT | {'fingerprint': {'size': 10}}
  output_parts.resume(out, older, 2, batches)
  newer = ABOUT | {'fingerprint': {'size': 10, 'contents': 'abc'}}
  output_parts.resume(out, newer, 2, batches)
  with pytest.raises(UserError, match='fingerprint.size'):
    output_parts.resume(out, ABOUT | {'fingerprint': {'size': 9}}, 2, batches)
