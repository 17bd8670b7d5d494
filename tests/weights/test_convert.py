"""Tests of the command `convert`, of notes and of `load_pretrained`."""

import numpy as np
import pytest
import tiny_vit

from vit_jax import convert, load_pretrained, save_pretrained
from vit_jax.errors import UserError
from vit_jax.models.vit import Model
from vit_jax.weights import pretrained
from vit_jax.weights.description import Description

NAMES = ['ant', 'bee', 'cat', 'dog', 'eel']


@pytest.fixture
def source(tmp_path):
  """Returns the path of weights with class names."""
  params = tiny_vit.noise_params(Model(5, **tiny_vit.SIZES), (8, 8))
  path = str(tmp_path / 'source.npz')
  description = Description(
    model=dict(name='vit', **tiny_vit.SIZES),
    num_classes=5,
    image_size=(8, 8),
    class_names=tuple(NAMES),
    preprocess=dict(resize='central'),
  )
  save_pretrained(path, params, description)
  return path


@pytest.mark.slow
def test_an_existing_file_is_not_overwritten(tmp_path, source):
  """--overwrite replaces it."""
  target = tmp_path / 'a.npz'
  target.write_bytes(b'of another model')
  for path in (target, f'big_vision:{target}'):
    with pytest.raises(UserError, match=r'a\.npz .*--overwrite'):
      convert.run(source, str(path))
  assert target.read_bytes() == b'of another model'
  convert.run(source, str(target), overwrite=True)
  assert pretrained.find(str(target)).description.class_names == tuple(NAMES)


def test_notes_of_other_weights_are_not_used(tmp_path, source, caplog):
  """Notes next to an .npz are compared with its arrays."""
  with np.load(source) as arrays:
    changed = {name: array + 1 for name, array in arrays.items()}
  np.savez(source, **changed)
  names = pretrained.find(source).description.class_names
  assert names == tuple(f'class {i}' for i in range(5))
  assert 'source.npz.json' in caplog.text


@pytest.mark.slow
def test_load_pretrained_returns_names_and_preprocessing(source):
  """The result still unpacks to a model and parameters."""
  loaded = load_pretrained(source)
  model, params = loaded
  assert loaded.model is model and loaded.params is params
  assert loaded.class_names == NAMES and loaded.image_size == (8, 8)
  pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
  image = loaded.preprocess(pixels)
  assert image.shape == (8, 8, 3) and image.dtype == np.float32
  assert -1 <= image.min() < image.max() <= 1
  expected = pretrained.find(source).description.transform().pixels(pixels)
  np.testing.assert_array_equal(np.round((image + 1) * 127.5), expected)
  assert model.apply({'params': params}, image[None]).shape == (1, 5)
  other = load_pretrained(source, num_classes=2, image_size=12)
  assert len(other.class_names) == 2
  assert other.preprocess(pixels).shape == (12, 12, 3)
