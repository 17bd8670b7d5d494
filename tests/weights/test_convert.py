"""Tests that converted weights keep class names and preprocessing."""

import dataclasses

import numpy as np
import pytest
import tiny_vit

from tests.faults.counts import further
from vit_jax import convert, load_pretrained, save_pretrained
from vit_jax.errors import UserError
from vit_jax.models import resnet
from vit_jax.models.vit import Model
from vit_jax.weights import pretrained
from vit_jax.weights.formats import npz

NAMES = ['ant', 'bee', 'cat', 'dog', 'eel']
PREPROCESS = {
  'resize': 'central',
  'central_fraction': 0.5,
  'interpolation': 'area',
}


@pytest.fixture
def source(tmp_path):
  """Returns the path of weights with class names and special preprocessing."""
  params = tiny_vit.noise_params(Model(5, **tiny_vit.SIZES), (8, 8))
  path = str(tmp_path / 'source.npz')
  npz.save(path, params, None)
  description = pretrained.find(path).description
  description = dataclasses.replace(
    description.with_model(gelu='exact', norm_eps=1e-5),
    class_names=tuple(NAMES),
    preprocess=PREPROCESS,
  )
  save_pretrained(path, params, description)
  return path


@pytest.mark.slow
@pytest.mark.parametrize(
  'target',
  [
    'a.npz',
    'huggingface:a',
    *further('a.safetensors', 'big_vision:a.npz', 'a'),
  ],
)
def test_conversion_keeps_everything(tmp_path, source, target):
  """Through every format, and back to the first.

  These are class names, preprocessing, constants, and the logits of weights
  with model.pixels='imagenet'.
  """
  changed = pretrained.find(source).description.with_model(pixels='imagenet')
  trained = f'{tmp_path}/trained'
  save_pretrained(trained, load_pretrained(source).params, changed)
  form, _, name = target.rpartition(':')
  path = f'{tmp_path}/{name}'
  convert.run(trained, f'{form}:{path}' if form else path)
  convert.run(path, f'{tmp_path}/back.npz')
  for each in (path, f'{tmp_path}/back.npz'):
    description = pretrained.find(each).description
    assert description.class_names == tuple(NAMES)
    assert description.preprocess == PREPROCESS
    assert description.model['gelu'] == 'exact'
    assert description.model['norm_eps'] == 1e-5
  images = np.random.default_rng(0).uniform(-1, 1, (2, 8, 8, 3))
  images = images.astype(np.float32)

  def logits(path):
    model, params = load_pretrained(path)
    return model.apply({'params': params}, images)

  expected = logits(trained)
  for each in (path, f'{tmp_path}/back.npz'):
    np.testing.assert_allclose(logits(each), expected, rtol=1e-4, atol=1e-5)
  assert not np.allclose(logits(source), expected, atol=1e-2)


def test_npz_files_keep_an_image_size_that_no_array_has(tmp_path):
  """A ResNet fits any size, but its evaluation needs the one of training."""
  model = resnet.Model(5, depths=(1,), width_factor=1, dtype='float32')
  params = tiny_vit.noise_params(model, (32, 32))
  path = str(tmp_path / 'a.npz')
  npz.save(path, params, None)
  description = pretrained.find(path).description
  larger = dataclasses.replace(description, image_size=(96, 64))
  save_pretrained(path, params, larger)
  assert pretrained.find(path).image_size == (96, 64)


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
