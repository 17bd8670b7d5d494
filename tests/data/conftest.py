"""Datasets and directories shared by several tests of sources."""

import shutil

import pytest
from bucket import Bucket
from etils.epath import gpath

from vit_jax.data.storage import index


@pytest.fixture(scope='session')
def prepared(tmp_path_factory):
  """Writes a TFDS dataset in each format: {format: folder}."""
  import tensorflow_datasets as tfds_lib
  from tfds_twin import Twin

  config = tfds_lib.download.DownloadConfig(num_shards=3)
  folders = {}
  for kind in ('tfrecord', 'array_record'):
    folders[kind] = tmp_path_factory.mktemp(kind)
    builder = Twin(data_dir=str(folders[kind]), file_format=kind)
    builder.download_and_prepare(download_config=config)
  return folders


@pytest.fixture
def copied(prepared, tmp_path, monkeypatch):
  """Copies the dataset in one format: (folder, its second training shard)."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))

  def copy(kind):
    folder = tmp_path / kind
    shutil.copytree(prepared[kind], folder)
    shutil.rmtree(folder / 'twin/1.0.0' / index.FOLDER, ignore_errors=True)
    return folder, folder / f'twin/1.0.0/twin-train.{kind}-00001-of-00003'

  return copy


@pytest.fixture
def bucket(tmp_path, monkeypatch):
  """Creates the local folder that gs://bucket refers to."""
  root = tmp_path / 'bucket'
  root.mkdir()
  monkeypatch.setattr(gpath, '_is_tf_installed', lambda: False)
  monkeypatch.setitem(gpath._PREFIX_TO_BACKEND, 'gs', Bucket(root))
  return root
