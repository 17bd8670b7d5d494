"""Tests of .npz files that other programs wrote or changed."""

import numpy as np
import pytest
from etils import epath

from vit_jax.cli import output_parts
from vit_jax.data.sources import pseudo_labels
from vit_jax.errors import UserError

COLUMNS = {
  'soft': np.ones((2, 3), np.float32),
  'index': np.arange(2),
  'copies': np.ones(2, np.int64),
  'about': np.array('{"count": 2}'),
}


def _unknown_compression(path):
  """Writes 99, which no program uses, as the method of all members."""
  np.savez(path, **COLUMNS)
  data = bytearray(path.read_bytes())
  for signature, offset in ((b'PK\x03\x04', 8), (b'PK\x01\x02', 10)):
    at = data.find(signature)
    while at >= 0:
      data[at + offset : at + offset + 2] = b'\x63\0'
      at = data.find(signature, at + 4)
  path.write_bytes(data)


def _single_array(path):
  with path.open('wb') as file:
    np.save(file, np.ones(3))


WRITERS = [
  _unknown_compression,
  _single_array,
  lambda path: np.savez(path, soft=np.ones(2)),
  lambda path: np.savez(path, about='[1]'),
  lambda path: path.write_bytes(b'PK\x03\x04'),
  lambda path: path.write_bytes(b''),
]


@pytest.mark.parametrize('write', WRITERS)
def test_each_reader_refuses_other_archives(tmp_path, write):
  """A result that cannot be read has no description; others are one message."""
  parts = output_parts.Parts(epath.Path(tmp_path / 'out.npz'))
  parts.open({}, 8, 8)
  path = tmp_path / 'out.npz.parts' / '00000.npz'
  write(path)
  assert output_parts.about_of(str(path)) == {}
  with pytest.raises(UserError, match='00000.npz'):
    pseudo_labels.Labels.of_file(str(path))
  with pytest.raises(UserError, match='00000.npz'):
    pseudo_labels._columns(str(path))
  with pytest.raises(UserError, match='00000.npz'):
    parts.read(0, ['index'])
