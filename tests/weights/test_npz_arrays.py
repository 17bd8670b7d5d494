"""Tests of the reader of .npz files: types, damage and memory."""

import io
import tracemalloc
import warnings
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


def archive(path, content, compression=zipfile.ZIP_STORED):
  """Writes a zip file with one member."""
  with zipfile.ZipFile(path, 'w', compression) as written:
    written.writestr('cls.npy', content)
  return str(path)


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


@pytest.mark.parametrize('shape', [(10**13,), (2**28,), (2**40, 2**40)])
@pytest.mark.parametrize(
  'compression', [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]
)
def test_a_wrong_header_allocates_no_memory(tmp_path, shape, compression):
  """It claims 40 TB, or a gigabyte, in a file of 100 bytes."""
  injected('an .npz header that asks for memory')
  path = archive(tmp_path / 'a.npz', member(shape), compression)
  tracemalloc.start()
  with pytest.raises(UserError, match='does not contain') as error:
    npz.read(path)
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert peak < 2**24
  assert path in str(error.value)


def test_pickles_are_refused(tmp_path):
  """Python objects are recognized by the header."""
  injected('a pickled .npz')
  evil = np.array([{'a': 1}], dtype=object)
  np.savez(tmp_path / 'evil.npz', cls=evil)
  with pytest.raises(UserError, match='plain arrays.*Python objects'):
    npz.read(str(tmp_path / 'evil.npz'))


@pytest.mark.parametrize(
  'content, words',
  [
    (b'no array at all', 'magic'),
    (member((4,))[:40], 'header'),
    (member((5,)), ' 20 bytes'),
    (member((3,)), ' 12 bytes'),
    (member((-4,)), ' -16 bytes'),
    (member((4,), "<f4' + 'x"), 'descr'),
    (member((4,), [('a', '<f4')]).replace(b'\x93NUMPY\1', b'\x93NUMPY\3'), '3'),
  ],
)
def test_messages_of_damaged_members(tmp_path, content, words):
  """The message contains the path and what is wrong."""
  path = archive(tmp_path / 'a.npz', content)
  with pytest.raises(UserError, match=words) as error:
    npz.read(path)
  assert path in str(error.value)


def test_a_flipped_bit_is_detected(tmp_path):
  """The zip file's checksum is compared."""
  injected('a flipped bit in an .npz')
  path = tmp_path / 'a.npz'
  np.savez(path, w=np.ones(100, np.float32))
  content = bytearray(path.read_bytes())
  content[300] ^= 1
  path.write_bytes(content)
  with pytest.raises(UserError, match='CRC'):
    npz.read(str(path))


def test_a_duplicate_member_is_refused(tmp_path):
  injected('an .npz with one member twice')
  path = tmp_path / 'a.npz'
  with zipfile.ZipFile(path, 'w') as written:
    for byte in (b'\0', b'\1'):
      with warnings.catch_warnings():
        warnings.simplefilter(
          'ignore'
        )  # zipfile warns about the duplicate name
        written.writestr('cls.npy', member((4,), data=byte * 16))
  with pytest.raises(UserError, match=r'cls\.npy'):
    npz.read(str(path))


def test_an_archive_that_unpacks_to_much_more_is_refused(tmp_path):
  """It is refused by its directory, before anything is unpacked."""
  injected('an .npz that unpacks to a thousand times its size')
  path, size = tmp_path / 'a.npz', 2**27
  with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as written:
    with written.open('cls.npy', 'w') as file:
      file.write(member((size // 4,), data=b''))
      for _ in range(size // 2**20):
        file.write(bytes(2**20))
  assert path.stat().st_size < 2**18
  tracemalloc.start()
  with pytest.raises(UserError, match='unpack to 134,217'):
    npz.read(str(path))
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert peak < 2**24
