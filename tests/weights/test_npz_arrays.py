"""Tests of the reader of .npz files: types, damage and memory."""

import io
import tracemalloc
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


def refused_without_memory(path, words):
  """Checks that a file is refused without much memory."""
  tracemalloc.start()
  with pytest.raises(UserError, match=words) as error:
    npz.read(path)
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert peak < 2**24
  assert path in str(error.value)


@pytest.mark.parametrize('shape', [(10**13,), (2**28,), (2**40, 2**40)])
@pytest.mark.parametrize(
  'compression', [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]
)
def test_a_wrong_header_allocates_no_memory(tmp_path, shape, compression):
  """It claims 40 TB, or a gigabyte, in a file of 100 bytes."""
  injected('an .npz header that asks for memory')
  path = archive(tmp_path / 'a.npz', member(shape), compression)
  refused_without_memory(path, 'does not contain')


@pytest.mark.parametrize(
  'content, words',
  [
    (b'no array at all', 'magic'),
    (member((4,))[:40], 'header'),
    (member((5,)), ' 20 bytes'),
    (member((-4,)), ' -16 bytes'),
    (member((4,), "<f4' + 'x"), 'descr'),
    (member((1,), '|O'), 'plain arrays.*Python objects'),
  ],
)
def test_messages_of_damaged_members(tmp_path, content, words):
  """The message contains the path and what is wrong; nothing is unpickled."""
  injected('a damaged .npz')
  path = archive(tmp_path / 'a.npz', content)
  with pytest.raises(UserError, match=words) as error:
    npz.read(path)
  assert path in str(error.value)


@pytest.mark.filterwarnings('ignore:Duplicate name')
def test_damaged_archives_are_refused(tmp_path):
  """A flipped bit, by the checksum, and a member that occurs twice."""
  injected('a flipped bit in an .npz')
  path = tmp_path / 'a.npz'
  np.savez(path, w=np.ones(100, np.float32))
  content = bytearray(path.read_bytes())
  content[300] ^= 1
  path.write_bytes(content)
  with pytest.raises(UserError, match='CRC'):
    npz.read(str(path))
  injected('an .npz with one member twice')
  with zipfile.ZipFile(path, 'w') as written:
    for byte in (b'\0', b'\1'):
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
  refused_without_memory(str(path), 'unpack to 134,217')
