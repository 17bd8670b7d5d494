"""Tests of official .npz weights against transformers, and of big_vision's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import scipy.ndimage
import tiny_vit
from references import DEPTH, HEADS, SIZE, WIDTH, huggingface, same_results

from tests.faults.counts import further
from vit_jax import load_pretrained
from vit_jax.arrays import tree
from vit_jax.models.vit import Model
from vit_jax.weights import pretrained
from vit_jax.weights.formats import npz

ORIGINAL = ('LayerNorm_2', 'MultiHeadDotProductAttention_1', 'MlpBlock_3')
LATER = ('LayerNorm_1', 'MultiHeadDotProductAttention_0', 'MlpBlock_0')
POSITIONS = 'Transformer/posembed_input/pos_embedding'


def official(folder, model, numbering=ORIGINAL):
  """Returns a library's weights with the official names and layout."""
  norm, attention, mlp = numbering
  model.save_pretrained(folder)  # with the names of all versions
  weights = safetensors.numpy.load_file(f'{folder}/model.safetensors')
  embeddings = 'vit.embeddings.'
  patches = f'{embeddings}patch_embeddings.projection.'
  kernel = weights[f'{patches}weight']  # [D, 3, P, P]
  arrays = {
    'cls': weights[f'{embeddings}cls_token'],
    'embedding/kernel': kernel.transpose(2, 3, 1, 0),
    'embedding/bias': weights[f'{patches}bias'],
    POSITIONS: weights[f'{embeddings}position_embeddings'],
    'Transformer/encoder_norm/scale': weights['vit.layernorm.weight'],
    'Transformer/encoder_norm/bias': weights['vit.layernorm.bias'],
    'head/kernel': weights['classifier.weight'].T,
    'head/bias': weights['classifier.bias'],
  }
  split = (HEADS, WIDTH // HEADS)
  for i in range(DEPTH):
    ours = f'Transformer/encoderblock_{i}/'
    theirs = f'vit.encoder.layer.{i}.'
    for name, there in (
      ('LayerNorm_0', 'layernorm_before'),
      (norm, 'layernorm_after'),
    ):
      arrays[f'{ours}{name}/scale'] = weights[f'{theirs}{there}.weight']
      arrays[f'{ours}{name}/bias'] = weights[f'{theirs}{there}.bias']
    for name, there, shape in (
      *(
        (f'{attention}/{kind}', f'attention.attention.{kind}', split)
        for kind in ('query', 'key', 'value')
      ),
      (f'{attention}/out', 'attention.output.dense', (WIDTH,)),
      (f'{mlp}/Dense_0', 'intermediate.dense', (-1,)),
      (f'{mlp}/Dense_1', 'output.dense', (-1,)),
    ):
      kernel = weights[f'{theirs}{there}.weight'].T
      inputs = split if name.endswith('/out') else kernel.shape[:1]
      arrays[f'{ours}{name}/kernel'] = kernel.reshape(*inputs, *shape)
      bias = weights[f'{theirs}{there}.bias']
      arrays[f'{ours}{name}/bias'] = bias.reshape(shape)
  return arrays


@pytest.mark.parametrize('with_notes', [True, False])
def test_positions_are_interpolated_with_aligned_corners(tmp_path, with_notes):
  """As the authors do, also in files without notes: official ones."""
  path = tmp_path / 'tiny.npz'
  params = tiny_vit.save_classifier(str(path))
  if not with_notes:
    (tmp_path / 'tiny.npz.json').unlink()
  large = load_pretrained(str(path), image_size=(48, 80)).params
  (small,), (found,) = (
    np.asarray(each['position']['embedding'])[:, 1:] for each in (params, large)
  )
  expected = scipy.ndimage.zoom(small.reshape(2, 2, -1), (1.5, 2.5, 1), order=1)
  np.testing.assert_allclose(
    found, expected.reshape(found.shape), rtol=1e-5, atol=1e-6
  )


@pytest.mark.parametrize('numbering', [ORIGINAL, LATER])
def test_logits_equal_the_library(tmp_path, numbering):
  """Arrays are written with the original numbering, bit for bit."""
  reference = huggingface(layer_norm_eps=1e-6)
  path, back = str(tmp_path / 'vit.npz'), str(tmp_path / 'back.npz')
  np.savez(path, **official(tmp_path, reference, numbering))
  same_results(path, reference, (SIZE, SIZE), gelu='exact')
  npz.save(back, load_pretrained(path).params, None)
  expected = official(tmp_path, reference)
  with np.load(back) as written:
    assert set(written.files) == set(expected)
    for name, array in expected.items():
      np.testing.assert_array_equal(written[name], array)


# big_vision


def small(**changes):
  """Returns our model with random weights."""
  model = Model(5, **(tiny_vit.SIZES | changes))
  return model, tiny_vit.noise_params(model, (12, 12))


def theirs(params, scanned=False):
  """Returns the arrays as big_vision stores them, written out by hand.

  Positions are added before the class token, so its own position is part of it.
  """
  flat = {k: np.asarray(v) for k, v in tree.flatten(params).items()}
  arrays = {}
  table = flat.pop('position/embedding')
  if 'cls' in flat:
    flat['cls'] = flat['cls'] + table[:, :1]
    table = table[:, 1:]
  arrays['params/pos_embedding'] = table
  inner = (
    ('norm1', 'LayerNorm_0'),
    ('norm2', 'LayerNorm_1'),
    ('attention/', 'MultiHeadDotProductAttention_0/'),
    ('mlp/fc1', 'MlpBlock_0/Dense_0'),
    ('mlp/fc2', 'MlpBlock_0/Dense_1'),
  )
  outer = (('encoder/norm', 'Transformer/encoder_norm'), ('map/', 'MAPHead_0/'))
  for path, array in flat.items():
    name = path.replace('map/norm', 'map/LayerNorm_0')
    for here, there in (*inner, *outer):
      name = name.replace(here, there)
    if not name.startswith('encoder/layers/'):
      arrays[f'params/{name}'] = array
      continue
    block, name = 'params/Transformer/encoderblock', name[15:]
    if scanned:
      arrays[f'{block}/{name}'] = array
    else:
      for i, layer in enumerate(array):
        arrays[f'{block}_{i}/{name}'] = layer
  return arrays


def logits(model, params):
  apply = jax.jit(lambda p, x: model.apply({'params': p}, x))
  return apply(params, tiny_vit.images_of(2, 12, 12))


@pytest.mark.slow
@pytest.mark.parametrize('pool', ['map', *further('token', 'gap')])
def test_big_vision_files_are_read_and_written(tmp_path, pool):
  """All parameters but the class token are the same bit for bit."""
  model, params = small(pool=pool, pre_logits=True)
  path, expected = str(tmp_path / 'a.npz'), logits(model, params)
  for scanned in (True, False):
    np.savez(path, **theirs(params, scanned))
    found, loaded = load_pretrained(path)
    assert found == model
    np.testing.assert_allclose(logits(model, loaded), expected, atol=1e-5)
    if pool != 'token':
      jax.tree.map(np.testing.assert_array_equal, loaded, params)
  description = pretrained.find(path).description
  pretrained.save(f'big_vision:{tmp_path}/b.npz', params, description)
  with np.load(tmp_path / 'b.npz') as written:
    assert set(written.files) == set(theirs(params))
    for name, array in theirs(params).items():
      np.testing.assert_array_equal(written[name], array, name)


def test_official_names_below_opt_target_are_read(tmp_path, caplog):
  """Other arrays in the file are left out."""
  caplog.set_level('INFO', 'vit_jax')
  model, params = small()
  npz.save(str(tmp_path / 'a.npz'), params, None)
  with np.load(tmp_path / 'a.npz') as official:
    arrays = {f'opt/target/{name}': official[name] for name in official.files}
  arrays |= {'opt/state/step': np.array(3), 'extra/x': np.zeros(2)}
  np.savez(tmp_path / 'b.npz', **arrays)
  _, loaded = load_pretrained(str(tmp_path / 'b.npz'))
  jax.tree.map(np.testing.assert_array_equal, loaded, params)
  assert 'left out extra, opt' in caplog.text


def test_bfloat16_arrays_are_read(tmp_path):
  """NumPy stores them as void16."""
  _, params = small(pool='map')
  low = {
    name: np.asarray(array.astype(jnp.bfloat16))
    for name, array in theirs(params).items()
  }
  np.savez(tmp_path / 'a.npz', **low)
  with np.load(tmp_path / 'a.npz') as stored:
    assert stored['params/head/bias'].dtype.kind == 'V'
  _, loaded = load_pretrained(str(tmp_path / 'a.npz'))
  expected = low['params/head/bias'].astype(np.float32)
  np.testing.assert_array_equal(loaded['head']['bias'], expected)


def test_files_without_positions_use_the_fixed_table(tmp_path):
  """They have no array of it, at any image size."""
  arrays = theirs(small()[1])
  del arrays['params/pos_embedding']
  path = str(tmp_path / 'b.npz')
  np.savez(path, **arrays)
  source, params = pretrained.find(path), load_pretrained(path).params
  assert source.model().position == 'sincos2d' and 'position' not in params
  assert source.image_size == (224, 224)
  pretrained.save(f'big_vision:{tmp_path}/c.npz', params, source.description)
  with np.load(tmp_path / 'c.npz') as written:
    assert set(written.files) == set(arrays)
