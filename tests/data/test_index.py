"""Tests of the index of record offsets: content, cache and renewal."""

import os
import resource
import struct
from concurrent import futures

import numpy as np
import pytest

from vit_jax.data.images.headers import DecodeError
from vit_jax.data.storage import files, index
from vit_jax.data.storage import records as records_lib


def record(payload):
  length = struct.pack('<Q', len(payload))
  checksums = [
    struct.pack('<I', records_lib._masked_crc(x)) for x in (length, payload)
  ]
  return length + checksums[0] + payload + checksums[1]


def write_shards(folder, counts):
  """Writes shards of numbered records; returns paths and records."""
  paths, records, number = [], [], 0
  for shard, count in enumerate(counts):
    path = folder / f'x.tfrecord-{shard:05d}-of-{len(counts):05d}'
    own = [b'record %d' % (number + i) * (i % 3) for i in range(count)]
    number += count
    path.write_bytes(b''.join(map(record, own)))
    paths.append(str(path))
    records.append(own)
  return paths, records


def load(paths, **settings):
  settings = dict(on_bad_shard='error') | settings
  return index.load(paths, 'tfrecord', records_lib.scan, **settings)


def read(paths, found):
  columns = found.split('offset'), found.split('size')
  return [
    [
      files.Files([path]).read(0, int(offset), int(size))
      for offset, size in zip(offsets, sizes, strict=True)
    ]
    for path, offsets, sizes in zip(paths, *columns, strict=True)
  ]


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory, monkeypatch):
  home = tmp_path_factory.mktemp('cache')
  monkeypatch.setenv('XDG_CACHE_HOME', str(home))
  return home


@pytest.fixture
def scans(monkeypatch):
  """Returns a list of the paths of scanned shards."""
  scanned, scan = [], records_lib.scan
  monkeypatch.setattr(
    records_lib, 'scan', lambda path: (scanned.append(path), scan(path))[1]
  )
  return scanned


def test_the_index_is_cached(tmp_path, scans):
  """The second time it is read from the folder of the data."""
  paths, records = write_shards(tmp_path, [3, 0, 4])
  load(paths)
  assert sorted(scans) == paths
  assert len(list((tmp_path / index.FOLDER).glob('*.npz'))) == 1
  assert read(paths, load(paths)) == records
  assert len(scans) == 3


@pytest.mark.parametrize('change', ['grow', 'touch', 'damage'])
def test_a_stale_index_is_built_again(tmp_path, scans, change):
  """After a change of a shard, or of the cache."""
  paths, records = write_shards(tmp_path, [3, 4])
  load(paths)
  if change == 'grow':
    with open(paths[1], 'ab') as file:
      file.write(record(b'more'))
    records[1].append(b'more')
  elif change == 'touch':
    os.utime(paths[1], ns=(0, 12345))
  else:
    [cached] = (tmp_path / index.FOLDER).iterdir()
    cached.write_bytes(cached.read_bytes()[:100])
  assert read(paths, load(paths)) == records
  assert len(scans) == 4
  load(paths)
  assert len(scans) == 4


def test_the_cache_moves_if_the_folder_cannot_be_written(
  tmp_path, scans, cache_home, monkeypatch, caplog
):
  """It moves to the home directory, or is built each time."""
  paths, records = write_shards(tmp_path, [3])
  (tmp_path / index.FOLDER).write_text('a file where the folder would be')
  load(paths)
  assert len(list((cache_home / 'vit_jax').iterdir())) == 1
  assert read(paths, load(paths)) == records
  assert len(scans) == 1
  monkeypatch.setenv('XDG_CACHE_HOME', '/dev/null')
  assert read(paths, load(paths)) == records
  assert 'XDG_CACHE_HOME' in caplog.text


# Files


def test_the_number_of_open_files_is_limited(tmp_path, monkeypatch):
  """More shards than descriptors can be read, by many threads at once."""
  monkeypatch.setattr(resource, 'getrlimit', lambda _: (32, 32))
  paths = []
  for i in range(50):
    (tmp_path / str(i)).write_bytes(b'%04d' % i)
    paths.append(str(tmp_path / str(i)))
  before = len(os.listdir('/proc/self/fd'))
  shards, wrong = files.Files(paths), []

  def work(seed):
    for i in np.random.default_rng(seed).integers(0, 50, 400).tolist():
      if shards.read(i, 0, 4) != b'%04d' % i:
        wrong.append(i)

  with futures.ThreadPoolExecutor(8) as pool:
    list(pool.map(work, range(8)))
  assert not wrong
  assert len(os.listdir('/proc/self/fd')) <= before + 4
  shards = None
  assert len(os.listdir('/proc/self/fd')) <= before


def test_a_record_beyond_a_shrunken_file_is_bad(tmp_path):
  (tmp_path / 'x').write_bytes(b'12345')
  opened = files.Files([str(tmp_path / 'x')])
  assert opened.read(0, 1, 4) == b'2345'
  with pytest.raises(DecodeError, match='changed'):
    opened.read(0, 2, 4)


# Examples


def test_records_without_an_example_are_bad():
  """The bytes are not an Example, or lack a feature."""
  example = records_lib._PROTO.Example()
  feature = example.features.feature
  feature['image'].bytes_list.value.append(b'pixels')
  feature['label'].int64_list.value.append(7)
  whole = example.SerializeToString()
  expected = {'image': b'pixels', 'label': 7}
  assert records_lib.example(whole, 'image', 'label') == expected
  for record, keys, words in (
    (whole[:-3], ('image', 'label'), 'tf.train.Example'),
    (whole, ('image', 'coarse'), 'coarse'),
    (whole, ('label', 'label'), '0 images'),
  ):
    with pytest.raises(DecodeError, match=words):
      records_lib.example(record, *keys)
