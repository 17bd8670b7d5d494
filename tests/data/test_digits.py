"""Tests of the directory and the log of the embedded digits."""

import io

import numpy as np
import pytest
from PIL import Image

from vit_jax.data.sources import digits, tfds


@pytest.fixture
def user_directory(tmp_path, monkeypatch):
  """Sets $TFDS_DATA_DIR to an empty directory next to the cache."""
  monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path / 'tfds'))
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  (tmp_path / 'tfds').mkdir()
  return tmp_path / 'tfds'


def test_the_users_directory_is_not_written_to(user_directory, capfd):
  """Digits are written to the cache, without progress bars in the log."""
  source = tfds.Source('train', dataset='digits')
  assert len(source) == digits.NUM_TRAIN
  assert not list(user_directory.iterdir())
  cache = user_directory.parent / 'cache/vit_jax/tfds/digits/1.0.0'
  assert (cache / 'dataset_info.json').exists()
  printed = capfd.readouterr()
  assert '%|' not in printed.out + printed.err


def test_digits_in_the_users_directory_are_used(user_directory):
  """Digits written there by an earlier version are still used."""
  given = tfds.Source('test', dataset='digits', data_dir=str(user_directory))
  assert len(given) == digits.NUM_TEST
  assert len(tfds.Source('test', dataset='digits')) == digits.NUM_TEST
  assert not (user_directory.parent / 'cache').exists()


def test_digits_have_the_bytes_that_tensorflow_writes(user_directory):
  """A run resumes whether or not TensorFlow prepared its digits."""
  tf = pytest.importorskip('tensorflow')
  source = tfds.Source('test', dataset='digits', data_dir=str(user_directory))
  for row in range(len(source)):
    data = source[row]['image']
    pixels = np.asarray(Image.open(io.BytesIO(data)))
    assert pixels.shape == (8, 8, 3)
    assert data == tf.io.encode_png(pixels).numpy()
