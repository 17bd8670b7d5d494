"""Tests of official .npz weights against an independent implementation."""

import tempfile

import numpy as np
import pytest
import safetensors.numpy
import scipy.ndimage
import tiny_vit

from benchmarks import peers
from vit_jax import load_pretrained
from vit_jax.arrays import tree
from vit_jax.errors import UserError
from vit_jax.models.vit import Model
from vit_jax.weights.formats import npz

torch = pytest.importorskip('torch')
peers.import_timm()  # transformers imports torchvision as well
transformers = pytest.importorskip('transformers')

SIZES = dict(
  hidden_size=48,
  num_hidden_layers=3,
  num_attention_heads=4,
  intermediate_size=96,
  patch_size=4,
)
ORIGINAL = ('LayerNorm_2', 'MultiHeadDotProductAttention_1', 'MlpBlock_3')
LATER = ('LayerNorm_1', 'MultiHeadDotProductAttention_0', 'MlpBlock_0')


def _reference(image_size: int):
  """Returns a Hugging Face ViT with random weights of a useful scale."""
  torch.manual_seed(0)
  config = transformers.ViTConfig(
    image_size=image_size,
    num_labels=7,
    hidden_act='gelu',
    layer_norm_eps=1e-6,
    attn_implementation='eager',
    **SIZES,
  )
  model = transformers.ViTForImageClassification(config).eval()
  with torch.no_grad():
    for parameter in model.parameters():
      parameter.add_(0.1 * torch.randn_like(parameter))
  return model


def _official(model, numbering) -> dict[str, np.ndarray]:
  """Returns the reference's weights with the official names and layout."""
  norm, attention, mlp = numbering
  with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)  # with the names of all versions
    weights = safetensors.numpy.load_file(f'{folder}/model.safetensors')
  width, heads = SIZES['hidden_size'], SIZES['num_attention_heads']
  embeddings = 'vit.embeddings.'
  patches = f'{embeddings}patch_embeddings.projection.'
  kernel = weights[f'{patches}weight']  # [D, 3, P, P]
  arrays = {
    'cls': weights[f'{embeddings}cls_token'],
    'embedding/kernel': kernel.transpose(2, 3, 1, 0),
    'embedding/bias': weights[f'{patches}bias'],
    'Transformer/posembed_input/pos_embedding': weights[
      f'{embeddings}position_embeddings'
    ],
    'Transformer/encoder_norm/scale': weights['vit.layernorm.weight'],
    'Transformer/encoder_norm/bias': weights['vit.layernorm.bias'],
    'head/kernel': weights['classifier.weight'].T,
    'head/bias': weights['classifier.bias'],
  }
  split = (heads, width // heads)
  for i in range(SIZES['num_hidden_layers']):
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
      (f'{attention}/out', 'attention.output.dense', (width,)),
      (f'{mlp}/Dense_0', 'intermediate.dense', (-1,)),
      (f'{mlp}/Dense_1', 'output.dense', (-1,)),
    ):
      kernel = weights[f'{theirs}{there}.weight'].T
      inputs = split if name.endswith('/out') else kernel.shape[:1]
      arrays[f'{ours}{name}/kernel'] = kernel.reshape(*inputs, *shape)
      bias = weights[f'{theirs}{there}.bias']
      arrays[f'{ours}{name}/bias'] = bias.reshape(shape)
  return arrays


def _logits(model, images: np.ndarray) -> np.ndarray:
  with torch.no_grad():
    pixels = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
    return model(pixels).logits.numpy()


def _images(size: int) -> np.ndarray:
  rng = np.random.default_rng(0)
  return rng.uniform(-1, 1, (3, size, size, 3)).astype(np.float32)


@pytest.mark.parametrize('numbering', [ORIGINAL, LATER])
def test_logits_equal_hugging_face(tmp_path, numbering):
  """Same weights, same images: the logits differ by at most 1e-4."""
  reference = _reference(image_size=16)
  file = tmp_path / 'vit.npz'
  np.savez(file, **_official(reference, numbering))
  model, params = load_pretrained(str(file), gelu='exact')
  images = _images(16)
  ours = model.apply({'params': params}, images)
  theirs = _logits(reference, images)
  assert np.ptp(theirs) > 1
  np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)


def test_logits_at_another_resolution(tmp_path):
  """The positions of the larger reference are zoomed by SciPy."""
  small, large = _reference(image_size=16), _reference(image_size=28)
  arrays = _official(small, ORIGINAL)
  np.savez(tmp_path / 'vit.npz', **arrays)
  embedding = arrays['Transformer/posembed_input/pos_embedding']
  grid = embedding[0, 1:].reshape(4, 4, -1)
  zoomed = scipy.ndimage.zoom(grid, (7 / 4, 7 / 4, 1), order=1)
  state = small.state_dict()
  name = next(k for k in state if k.endswith('position_embeddings'))
  state[name] = torch.from_numpy(
    np.concatenate([embedding[:, :1], zoomed.reshape(1, 49, -1)], axis=1)
  )
  large.load_state_dict(state)
  model, params = load_pretrained(
    str(tmp_path / 'vit.npz'), image_size=28, gelu='exact'
  )
  images = _images(28)
  ours = model.apply({'params': params}, images)
  np.testing.assert_allclose(ours, _logits(large, images), atol=1e-4, rtol=0)


def test_save_and_load_are_inverse(tmp_path):
  """Arrays with official names are restored bit for bit."""
  reference = _reference(image_size=16)
  np.savez(tmp_path / 'a.npz', **_official(reference, LATER))
  params = load_pretrained(str(tmp_path / 'a.npz'))[1]
  npz.save(str(tmp_path / 'b.npz'), params, {})
  with np.load(tmp_path / 'b.npz') as written:
    assert set(written.files) == set(_official(reference, ORIGINAL))
  again = load_pretrained(str(tmp_path / 'b.npz'))[1]
  assert tree.flatten(again).keys() == tree.flatten(params).keys()
  for path, leaf in tree.flatten(params).items():
    np.testing.assert_array_equal(leaf, tree.flatten(again)[path])


# (official name, stored array, words that the message must contain)
WRONG_ARRAYS = [
  ('embedding/kernel', np.zeros((4, 3, 16)), '[4, 3, 16]'),
  ('cls', np.zeros(16), '[16]'),
  ('cls', np.zeros((1, 1, 0)), '[1, 1, 0]'),
  ('cls', np.array('text'), '<U4'),
  ('cls', np.zeros((1, 1, 16), complex), 'complex128'),
  ('cls', np.zeros((1, 1, 16), int), 'int64'),
  ('cls', np.zeros((1, 1, 16), 'V3'), '|V3'),
  ('cls', np.zeros((1, 1, 16), [('a', 'f4')]), "[('a', '<f4')]"),
  ('head/kernel', np.float32(1), '[]'),
  ('head/bias', np.zeros((2, 5)), '[2, 5]'),
  ('Transformer/posembed_input/pos_embedding', np.zeros(5), '[5]'),
  ('Transformer/encoder_norm/scale', np.zeros((16, 1)), '[16, 1]'),
  (
    'Transformer/encoderblock_1/MlpBlock_3/Dense_0/kernel',
    np.zeros((2,) * 5),
    '[2, 2, 2, 2, 2]',
  ),
]


def _small():
  """Returns parameters of a small model at 8 pixels with five classes."""
  return tiny_vit.noise_params(Model(5, **tiny_vit.SIZES), (8, 8))


def _saved(path, **changes) -> str:
  """Writes a file with those arrays, some of them changed."""
  npz.save(str(path), _small(), {})
  with np.load(path) as arrays:
    np.savez(path, **{**arrays, **changes})
  return str(path)


@pytest.mark.parametrize('name, array, words', WRONG_ARRAYS)
def test_arrays_of_wrong_rank_or_type_are_refused(tmp_path, name, array, words):
  """The message contains the path and the name."""
  path = _saved(tmp_path / 'wrong.npz', **{name: array})
  with pytest.raises(UserError) as error:
    npz.load(path)
  for word in (path, name.partition('encoderblock_1/')[2] or name, words):
    assert word in str(error.value)


@pytest.mark.parametrize(
  'changes, words',
  [
    ({'position': 'sincos2d'}, "learned.*'sincos2d'"),
    ({'prefix_positions': False}, 'a position for the class token'),
  ],
)
def test_models_without_official_names_are_not_written(
  tmp_path, changes, words
):
  """They would be read back as another model."""
  sizes = dict(patch_size=4, width=16, depth=1, mlp_dim=24, num_heads=2)
  about = {'model': {'name': 'vit', **sizes, **changes}, 'num_classes': 3}
  with pytest.raises(UserError, match=words):
    npz.save(str(tmp_path / 'a.npz'), {}, about)
