"""Datasets and directories shared by several tests of sources."""

import pytest
from bucket import Bucket
from etils.epath import gpath


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
def bucket(tmp_path, monkeypatch):
  """Creates the local folder that gs://bucket refers to."""
  root = tmp_path / 'bucket'
  root.mkdir()
  monkeypatch.setattr(gpath, '_is_tf_installed', lambda: False)
  monkeypatch.setitem(gpath._PREFIX_TO_BACKEND, 'gs', Bucket(root))
  return root
