"""Tests that exported models compute the same in their own runtimes."""

import json
import sys

import jax
import numpy as np
import pytest
import tiny_vit

from vit_jax.errors import UserError
from vit_jax.weights import artefacts, pretrained


@pytest.fixture(scope='module')
def weights(tmp_path_factory):
  """Returns the path of a small model with random weights."""
  path = str(tmp_path_factory.mktemp('weights') / 'small.npz')
  tiny_vit.save_classifier(path)
  return path


def expected(path, images):
  """Returns the logits of uint8 images."""
  source = pretrained.find(path)
  params = source.load(source.abstract_params())
  predict = jax.jit(source.objective().predict)
  return np.asarray(predict(params, {'image': images})['logits'])


def export(weights, folder, kind):
  artefacts.write(pretrained.find(weights), str(folder), kind)


def images(n):
  rng = np.random.default_rng(n)
  return rng.integers(0, 256, (n, 32, 32, 3), np.uint8)


@pytest.mark.slow
def test_exported_stablehlo_gives_the_same_logits(weights, tmp_path):
  """For any number of images; a description is next to the program."""
  export(weights, tmp_path / 'out', 'stablehlo')
  data = (tmp_path / 'out' / 'model.stablehlo').read_bytes()
  program = jax.export.deserialize(bytearray(data))
  assert set(program.platforms) == {'cpu', 'cuda', 'tpu'}
  for n in (1, 3):
    logits = program.call(images(n))
    assert np.ptp(logits) > 0.1
    np.testing.assert_allclose(logits, expected(weights, images(n)), atol=1e-5)
  about = json.loads((tmp_path / 'out' / 'description.json').read_text())
  assert about['input']['shape'] == ['n', 32, 32, 3]
  assert about['preprocess']['resize'] == 'squash'
  assert about['preprocess']['interpolation'] == 'bilinear'
  assert about['class_names'] == [f'class {i}' for i in range(3)]


@pytest.mark.slow
def test_exported_saved_model_gives_the_same_logits(weights, tmp_path):
  """TensorFlow loads it without this package."""
  tf = pytest.importorskip('tensorflow')
  export(weights, tmp_path / 'out', 'savedmodel')
  module = tf.saved_model.load(str(tmp_path / 'out'))
  serve = module.signatures['serving_default']
  for n in (1, 3):
    logits = serve(images=tf.constant(images(n)))['logits'].numpy()
    np.testing.assert_allclose(logits, expected(weights, images(n)), atol=1e-5)
  assert (tmp_path / 'out' / 'description.json').exists()


def test_a_saved_model_that_tensorflow_cannot_run_is_refused(
  weights, tmp_path, monkeypatch
):
  """TensorFlow 2.21 cannot run programs of JAX 0.11."""
  tf = pytest.importorskip('tensorflow')
  from jax.experimental import jax2tf

  def refuse(images):
    refusal = tf.debugging.assert_less(tf.shape(images)[0], 0)
    with tf.control_dependencies([refusal]):
      return tf.zeros((1, 3))

  monkeypatch.setattr(jax2tf, 'convert', lambda *_, **__: refuse)
  words = f'TensorFlow {tf.__version__} cannot run'
  with pytest.raises(UserError, match=words):
    export(weights, tmp_path / 'out', 'savedmodel')
  assert not (tmp_path / 'out').exists()


def test_what_cannot_be_written_is_refused(weights, tmp_path, monkeypatch):
  """The message contains the directory, or the command that installs it."""
  with pytest.raises(UserError, match='exists'):
    export(weights, tmp_path, 'stablehlo')
  monkeypatch.setitem(sys.modules, 'tensorflow', None)
  with pytest.raises(UserError, match=r"pip install 'vit_jax\[tensorflow\]'"):
    export(weights, tmp_path / 'out', 'savedmodel')
