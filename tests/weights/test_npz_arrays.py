"""Tests of the reader of .npz files: types and damage."""

import io
import zipfile

import numpy as np
import pytest
from numpy.lib import format as npy

from tests.faults.counts import injected
from vit_jax.errors import UserError
from vit_jax.weights.formats import npz


def member(shape, descr='<f4', data=bytes(16)):
  """Returns an array's file with any header."""
  file = io.BytesIO()
  fields = dict(shape=shape, descr=descr, fortran_order=False)
  npy.write_array_header_1_0(file, fields)
  return file.getvalue() + data


@pytest.mark.parametrize('save', [np.savez, np.savez_compressed])
@pytest.mark.parametrize('dtype', ['float16', 'float32', 'float64', 'int8'])
def test_arrays_equal_those_of_numpy(tmp_path, save, dtype):
  """Every layout and type that NumPy reads is supported."""
  values = np.arange(24).reshape(2, 3, 4).astype(dtype)
  given = dict(c=values, f=np.asfortranarray(values), zero=values[0, 0, 0])
  save(tmp_path / 'a.npz', empty=values[:0], **given)
  found, _ = npz.read(str(tmp_path / 'a.npz'))
  with np.load(tmp_path / 'a.npz') as expected:
    assert set(found) == set(expected.files)
    for name, array in found.items():
      assert array.dtype == expected[name].dtype
      np.testing.assert_array_equal(array, expected[name])


@pytest.mark.parametrize(
  'content, words',
  [
    (b'no array at all', 'plain arrays'),
    (member((4,))[:40], 'header'),
    (member((5,)), ' 20 bytes'),
    (member((-4,)), 'negative'),
    (member((4,), "<f4' + 'x"), 'descr'),
    (member((1,), '|O'), 'plain arrays.*Object arrays'),
    (member((10**13,)), 'TiB'),  # more memory than any machine has
    (member((2**40, 2**40)), 'shape'),
  ],
)
def test_messages_of_damaged_members(tmp_path, content, words):
  """The message contains the path and what is wrong; nothing is unpickled."""
  injected('a damaged .npz')
  path = str(tmp_path / 'a.npz')
  with zipfile.ZipFile(path, 'w') as written:
    written.writestr('cls.npy', content)
  with pytest.raises(UserError, match=words) as error:
    npz.read(path)
  assert path in str(error.value)


def test_a_flipped_bit_is_detected(tmp_path):
  """By the checksum of the member."""
  injected('a flipped bit in an .npz')
  path = tmp_path / 'a.npz'
  np.savez(path, w=np.ones(100, np.float32))
  content = bytearray(path.read_bytes())
  content[300] ^= 1
  path.write_bytes(content)
  with pytest.raises(UserError, match='CRC'):
    npz.read(str(path))
