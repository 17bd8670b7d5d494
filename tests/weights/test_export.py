"""What is exported computes the same in its own runtime."""

import json

import jax
import numpy as np
import pytest
import tiny_vit

from vit_jax import export
from vit_jax.arrays import sharding
from vit_jax.errors import UserError
from vit_jax.models.vit import Model
from vit_jax.weights import pretrained
from vit_jax.weights.formats import npz


@pytest.fixture(scope='module')
def weights(tmp_path_factory):
  """A small model with random weights."""
  path = str(tmp_path_factory.mktemp('weights') / 'small.npz')
  model = Model(5, **tiny_vit.SIZES)
  npz.save(path, tiny_vit.noise_params(model, (8, 8)), {})
  return path


def expected(path, images):
  """The logits of uint8 images."""
  source = pretrained.find(path)
  mesh = sharding.make_mesh(jax.devices()[:1])
  params = source.load(source.abstract_params(mesh))
  predict = jax.jit(source.objective().predict)
  return np.asarray(predict(params, {'image': images})['logits'])


def images(n):
  rng = np.random.default_rng(n)
  return rng.integers(0, 256, (n, 8, 8, 3), np.uint8)


def test_stablehlo(weights, tmp_path):
  """Any number of images; with preprocessing and names beside it."""
  export.run(weights, str(tmp_path / 'out'), 'stablehlo')
  data = (tmp_path / 'out' / 'model.stablehlo').read_bytes()
  program = jax.export.deserialize(bytearray(data))
  assert set(program.platforms) == {'cpu', 'cuda', 'tpu'}
  for n in (1, 3):
    logits = program.call(images(n))
    assert np.ptp(logits) > 0.1
    np.testing.assert_allclose(logits, expected(weights, images(n)), atol=1e-5)
  said = json.loads((tmp_path / 'out' / 'description.json').read_text())
  assert said['input']['shape'] == ['n', 8, 8, 3]
  assert said['preprocess']['resize'] == 'squash'
  assert said['preprocess']['interpolation'] == 'bilinear'
  assert said['class_names'] == [f'class {i}' for i in range(5)]


def test_saved_model(weights, tmp_path):
  """TensorFlow loads it without this package."""
  tf = pytest.importorskip('tensorflow')
  export.run(weights, str(tmp_path / 'out'), 'savedmodel')
  serve = tf.saved_model.load(str(tmp_path / 'out')).signatures[
    'serving_default'
  ]
  for n in (1, 3):
    logits = serve(images=tf.constant(images(n)))['logits'].numpy()
    np.testing.assert_allclose(logits, expected(weights, images(n)), atol=1e-5)
  assert (tmp_path / 'out' / 'description.json').exists()


def test_a_tensorflow_that_is_too_old(weights, tmp_path, monkeypatch):
  """As 2.21 is for JAX 0.11: known before anything is written."""
  tf = pytest.importorskip('tensorflow')
  from jax.experimental import jax2tf

  def refuse(images):
    refusal = tf.debugging.assert_less(tf.shape(images)[0], 0)
    with tf.control_dependencies([refusal]):
      return tf.zeros((1, 5))

  monkeypatch.setattr(jax2tf, 'convert', lambda *_, **__: refuse)
  with pytest.raises(
    UserError, match=f'TensorFlow {tf.__version__} cannot run'
  ):
    export.run(weights, str(tmp_path / 'out'), 'savedmodel')
  assert not (tmp_path / 'out').exists()


def test_what_is_refused(weights, tmp_path):
  """Another kind, and a directory that is there, cost nothing."""
  with pytest.raises(UserError, match='onnx'):
    export.run(weights, str(tmp_path / 'out'), 'onnx')
  with pytest.raises(UserError, match="'stablehlo'.*savedmodel"):
    export.run(weights, str(tmp_path / 'out'), 'stablehl')
  assert not (tmp_path / 'out').exists()
  with pytest.raises(UserError, match='exists'):
    export.run(weights, str(tmp_path), 'stablehlo')
