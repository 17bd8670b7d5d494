"""Tests of commands at another image size than that of the weights."""

import json

import cv2
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_vit

from tests.faults.counts import further
from vit_jax import evaluate, features, load_pretrained, predict, read_features
from vit_jax.arrays import memory, sharding
from vit_jax.errors import UserError
from vit_jax.evaluators import batch_size
from vit_jax.evaluators.batch_size import largest_batch_size
from vit_jax.models.resnet import Model as ResNet
from vit_jax.models.swin import Model as Swin
from vit_jax.models.vit import Model
from vit_jax.weights import artefacts, pretrained
from vit_jax.weights.description import Description

SIZE = (32, 16)
MODELS = {
  'vit': (Model, tiny_vit.SIZES),
  'swin': (Swin, dict(width=8, depths=(2, 2), num_heads=2, window_size=2)),
  'resnet': (ResNet, dict(depths=(1,), width_factor=1)),
}


@pytest.fixture(scope='module')
def photos(tmp_path_factory):
  """Returns a folder of two classes of images of several sizes."""
  folder = tmp_path_factory.mktemp('photos')
  rng = np.random.default_rng(0)
  for name in ('cat', 'dog'):
    (folder / name).mkdir()
    for side in (20, 31, 40):
      pixels = rng.integers(0, 256, (side, side + 7, 3), np.uint8)
      cv2.imwrite(str(folder / name / f'{side}.png'), pixels)
  return folder


@pytest.fixture(scope='module', params=['vit', *further('swin', 'resnet')])
def weights(request, tmp_path_factory):
  """Returns the path of weights for images of 16 pixels."""
  name = request.param
  kind, sizes = MODELS[name]
  sizes = dict(sizes, dtype='float32')
  params = tiny_vit.noise_params(kind(2, **sizes), (16, 16))
  description = Description(
    model=dict(name=name, **sizes),
    preprocess=dict(resize='central', central_fraction=0.8),
    num_classes=2,
    image_size=(16, 16),
    class_names=('cat', 'dog'),
  )
  mesh = sharding.make_mesh(jax.devices()[:1])
  shapes = sharding.with_shardings(jax.eval_shape(lambda: params), mesh, ())
  placed = jax.device_put(params, jax.tree.map(lambda s: s.sharding, shapes))
  path = str(tmp_path_factory.mktemp('weights') / name)
  pretrained.save(path, placed, description)
  return path


def expected(weights, files):
  """Returns the logits of `load_pretrained` with the other size."""
  loaded = load_pretrained(weights, image_size=SIZE)
  images = np.stack([loaded.preprocess(f.read_bytes()) for f in files])
  assert images.shape[1:] == (*SIZE, 3)
  return loaded.model.apply({'params': loaded.params}, images)


@pytest.mark.slow
def test_commands_equal_load_pretrained(weights, photos, tmp_path):
  """Predictions, accuracy, features and exports are those of that size."""
  files = sorted(photos.glob('*/*.png'))
  logits = expected(weights, files)
  request = predict.Request(top=2, image_size=SIZE)
  found = list(predict.run(weights, [*map(str, files)], request))
  cats = [dict(each.top)['cat'] for each in found]
  np.testing.assert_allclose(cats, jax.nn.softmax(logits)[:, 0], atol=1e-5)
  data = dict(dataset='folder', data_dir=str(photos), split='train')
  request = evaluate.Request(**data, batch_size=8, image_size=SIZE)
  result = evaluate.run(weights, request)
  labels = np.array([f.parent.name == 'dog' for f in files])
  assert result['accuracy'] == np.mean(logits.argmax(-1) == labels)
  assert result['preprocess']['image_size'] == [*SIZE]
  request = features.Request(
    images=[*map(str, files)], image_size=SIZE, batch_size=8
  )
  out = str(tmp_path / 'features')
  features.run(weights, out, request)
  source = pretrained.find(weights, image_size=SIZE)
  params = source.load(source.abstract_params())
  transform = source.description.transform()
  images = np.stack([transform.pixels(f.read_bytes()) for f in files])
  own = source.objective().predict(params, {'image': jnp.asarray(images)})[
    'features'
  ]
  written = read_features(out)['features']
  np.testing.assert_allclose(written, own, atol=1e-4)
  artefacts.write(source, str(tmp_path / 'program'), 'stablehlo')
  described = json.loads((tmp_path / 'program/description.json').read_text())
  assert described['input']['shape'] == ['n', *SIZE, 3]


def test_the_key_of_the_config_names_the_flag(weights, photos):
  settings = ['--config.image_size=64']
  data = dict(dataset='folder', data_dir=str(photos))
  with pytest.raises(UserError, match='give --image_size'):
    evaluate.run(weights, evaluate.Request(**data, settings=settings))
  with pytest.raises(UserError, match='give --image_size'):
    next(predict.run(weights, [], predict.Request(settings=settings)))


@pytest.mark.slow
def test_batches_become_smaller_with_less_memory(weights, monkeypatch, caplog):
  """They are halved until the program fits; small images are not compiled."""
  source = pretrained.find(weights, image_size=(64, 64))
  mesh = sharding.make_mesh(jax.devices()[:1])
  limit = 10**12
  monkeypatch.setattr(memory, 'of_device', lambda device: limit)
  assert largest_batch_size(source, mesh, 32) == 32
  monkeypatch.setattr(batch_size, '_SMALL', 0)
  assert largest_batch_size(source, mesh, 32) == 32
  peaks = []
  program_bytes = memory.program_bytes

  def recorded(compiled):
    peaks.append(program_bytes(compiled)['peak'])
    return {'peak': peaks[-1]}

  monkeypatch.setattr(memory, 'program_bytes', recorded)
  largest_batch_size(source, mesh, 8)
  limit = int(peaks[0] / 0.6) + 1
  with caplog.at_level('INFO', 'vit_jax'):
    assert largest_batch_size(source, mesh, 32) == 8
  assert '8 instead of 32 images of 64x64' in caplog.text
  limit = 1
  assert largest_batch_size(source, mesh, 32) == 1
  three = sharding.make_mesh(jax.devices()[:3])
  assert largest_batch_size(source, three, 32) == 3
  limit = 10**12
  assert largest_batch_size(source, three, 32) == 32
