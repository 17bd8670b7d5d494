"""Tests of sources in a bucket against local sources."""

import shutil

import contract
import pytest
from bucket import NAME
from test_index import load, write_shards
from test_sources_tar import images, samples, write_tar
from tfds_twin import open_twin

from vit_jax.data.images.headers import DecodeError
from vit_jax.data.sources import manifest, tar
from vit_jax.data.storage import files, index, records
from vit_jax.errors import UserError


def test_tar_shards_in_a_bucket(bucket):
  """By directory and by pattern; the index is in the bucket."""
  write_tar(bucket / 'set' / 'train-0.tar', samples(0, 4))
  write_tar(bucket / 'set' / 'train-1.tar', samples(4, 7))
  write_tar(bucket / 'set' / 'val' / '0.tar', samples(7, 8))
  path = f'{NAME}/set'
  contract.check(tar.Source('val', path=path), images(7, 8), [])
  patterns = {'': 0, '/train-{1..1}.tar': 4, '/train-*.tar': 0}
  for pattern, first in patterns.items():
    source = tar.Source('train', path=path + pattern)
    contract.check(source, images(first, 7), [f'{path}/train-'])
  assert len(list((bucket / 'set' / index.FOLDER).iterdir())) == 2
  with pytest.raises(UserError, match='no .tar file matches'):
    tar.Source('train', path=f'{NAME}/other')


def test_a_manifest_in_a_bucket(bucket):
  """Images are next to the manifest, or at any address."""
  (bucket / 'a.png').write_bytes(contract.png(1))
  (bucket / 'list.csv').write_text(
    'image,label,split\na.png,0,train\ngs://bucket/a.png,1,train\n'
    'gs://bucket/b.png,1,test\n'
  )
  source = manifest.Source('train', path=f'{NAME}/list.csv')
  expected = [(contract.png(1), 0), (contract.png(1), 1)]
  contract.check(source, expected, ['gs://bucket/a.png'] * 2)
  with pytest.raises(DecodeError, match='No such file'):
    manifest.Source('test', path=f'{NAME}/list.csv')[0]


def test_the_tfrecord_index_is_stored_in_the_bucket(bucket, monkeypatch):
  """It is built once."""
  local, _ = write_shards(bucket, [3, 0, 4])
  remote = [f'{NAME}/{path.rpartition("/")[2]}' for path in local]
  expected = load(local).columns['offset'].tolist()
  assert load(remote).columns['offset'].tolist() == expected
  assert (bucket / index.FOLDER).is_dir()
  monkeypatch.setattr(records, 'scan', lambda path: pytest.fail('again'))
  assert load(remote).columns['offset'].tolist() == expected
  opened = files.Files(remote)
  assert opened.read(2, 12, 5) == files.Files(local).read(2, 12, 5)
  with pytest.raises(DecodeError):
    opened.read(0, 10, 1000)


def test_a_tfds_dataset_in_a_bucket(bucket, prepared):
  """In tfrecord."""
  shutil.copytree(prepared['tfrecord'], bucket / 'tfds')
  source = open_twin(f'{NAME}/tfds', 'train[5:]')
  local = open_twin(prepared['tfrecord'], 'train[5:]')
  expected = [(local[i]['image'], local[i]['label']) for i in range(35)]
  contract.check(source, expected, ['gs://bucket/tfds/twin/1.0.0/twin-train'])
