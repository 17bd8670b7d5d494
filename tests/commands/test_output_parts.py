"""Tests of results that are written in parts."""

import json
import pathlib

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


def read(path):
  return json.loads((pathlib.Path(path)).read_text())


def write(about, parts, path):
  found = np.concatenate([*parts.column('x')]).tolist()
  pathlib.Path(path).write_text(json.dumps(ABOUT | {'found': found}))
  return {'found': found}


FORM = output_parts.Format(read, write, ['found'])


def interrupted(tmp_path, about=ABOUT):
  out = epath.Path(tmp_path / 'out.json')
  with pytest.raises(KeyboardInterrupt):
    output_parts.compute(out, about, 2, lambda start: batches(start, 6), FORM)
  return out


def test_parts_of_another_size_are_not_continued(tmp_path):
  """The same size continues without a gap; another size is refused."""
  out = interrupted(tmp_path)
  assert output_parts.batch_size(out) == 2
  assert output_parts.batch_size(epath.Path(tmp_path / 'new.npz')) is None
  with pytest.raises(UserError, match='part_examples'):
    output_parts.compute(out, ABOUT, 3, batches, FORM)
  result = output_parts.compute(out, ABOUT, 2, batches, FORM)
  assert result == {'found': [*range(10)]}
  assert [path.name for path in tmp_path.iterdir()] == ['out.json']
  assert output_parts.compute(out, ABOUT, 2, batches, FORM) == ABOUT | result


def test_damaged_parts_are_refused(tmp_path):
  """Parts of earlier versions, with the numbers of rows, are read."""
  out = interrupted(tmp_path)
  part = tmp_path / 'out.json.parts' / '00000.npz'
  np.savez(part, x=np.arange(4), _rows=np.array([4]))
  assert output_parts.Parts(out).read(0).keys() == {'x'}
  part.write_bytes(part.read_bytes()[:-9])
  with pytest.raises(UserError, match='00000.npz cannot be read'):
    output_parts.compute(out, ABOUT, 2, batches, FORM)


def test_results_of_older_versions_are_recognized(tmp_path):
  """Their fingerprints have fewer entries; other entries must be equal."""
  out = interrupted(tmp_path, ABOUT | {'fingerprint': {'size': 10}})
  with pytest.raises(UserError, match='fingerprint.size'):
    other = ABOUT | {'fingerprint': {'size': 9}}
    output_parts.compute(out, other, 2, batches, FORM)
  newer = ABOUT | {'fingerprint': {'size': 10, 'contents': 'abc'}}
  output_parts.compute(out, newer, 2, batches, FORM)
