"""Tests of official .npz weights against an independent implementation."""

import io
import zipfile

import numpy as np
import pytest
import safetensors.numpy
import scipy.ndimage
import tiny_vit
from numpy.lib import format as npy
from references import DEPTH, HEADS, SIZE, WIDTH, huggingface, same_results

from tests.faults.counts import injected
from vit_jax import load_pretrained
from vit_jax.errors import UserError
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


# Damage


def member(shape, descr='<f4', data=bytes(16)):
  """Returns an array's file with any header."""
  file = io.BytesIO()
  fields = dict(shape=shape, descr=descr, fortran_order=False)
  npy.write_array_header_1_0(file, fields)
  return file.getvalue() + data


@pytest.mark.parametrize(
  'content, words',
  [
    (b'no array at all', 'plain arrays'),
    (member((4,))[:40], 'header'),
    (member((5,)), ' 20 bytes'),
    (member((-4,)), 'negative'),
    (member((4,), "<f4' + 'x"), 'descr'),
    (member((1,), '|O'), 'plain arrays.*Object arrays'),
    (member((10**13,)), 'TiB'),  # more memory than any machine has
    (member((2**40, 2**40)), 'shape'),
  ],
)
def test_messages_of_damaged_members(tmp_path, content, words):
  """The message contains the path and what is wrong; nothing is unpickled."""
  injected('a damaged .npz')
  path = str(tmp_path / 'a.npz')
  with zipfile.ZipFile(path, 'w') as written:
    written.writestr('cls.npy', content)
  with pytest.raises(UserError, match=words) as error:
    npz.read(path)
  assert path in str(error.value)


@pytest.mark.filterwarnings('ignore:Duplicate name')
def test_repeated_members_are_refused(tmp_path):
  """NumPy would read the second one."""
  injected('a damaged .npz')
  path = str(tmp_path / 'a.npz')
  with zipfile.ZipFile(path, 'w') as written:
    for _ in range(2):
      written.writestr('cls.npy', member((4,)))
  with pytest.raises(UserError, match='cls more than once') as error:
    npz.read(path)
  assert path in str(error.value)


def test_a_flipped_bit_is_detected(tmp_path):
  """By the checksum of the member."""
  injected('a flipped bit in an .npz')
  path = tmp_path / 'a.npz'
  np.savez(path, w=np.ones(100, np.float32))
  content = bytearray(path.read_bytes())
  content[300] ^= 1
  path.write_bytes(content)
  with pytest.raises(UserError, match='CRC'):
    npz.read(str(path))
