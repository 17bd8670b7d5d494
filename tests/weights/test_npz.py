"""Tests of official .npz weights against an independent implementation."""

import jax.numpy as jnp
import numpy as np
import pytest
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
  weights = {k: v.numpy() for k, v in model.state_dict().items()}
  width, heads = SIZES['hidden_size'], SIZES['num_attention_heads']

  def find(*endings: str) -> np.ndarray:
    found = [k for k in weights if any(k.endswith(end) for end in endings)]
    assert len(found) == 1, (endings, found)
    return weights[found[0]]

  kernel = find('patch_embeddings.projection.weight')  # [D, 3, P, P]
  arrays = {
    'cls': find('cls_token'),
    'embedding/kernel': kernel.transpose(2, 3, 1, 0),
    'embedding/bias': find('patch_embeddings.projection.bias'),
    'Transformer/posembed_input/pos_embedding': find('position_embeddings'),
    'Transformer/encoder_norm/scale': find('vit.layernorm.weight'),
    'Transformer/encoder_norm/bias': find('vit.layernorm.bias'),
    'head/kernel': find('classifier.weight').T,
    'head/bias': find('classifier.bias'),
  }
  for i in range(SIZES['num_hidden_layers']):
    ours = f'Transformer/encoderblock_{i}/'
    # Names before and since version 5.
    layer = (f'layer.{i}.', f'layers.{i}.')

    def of(*names: str, layer=layer) -> np.ndarray:
      return find(*(prefix + name for prefix in layer for name in names))

    for kind, leaf in (('weight', 'scale'), ('bias', 'bias')):
      arrays[f'{ours}LayerNorm_0/{leaf}'] = of(f'layernorm_before.{kind}')
      arrays[f'{ours}{norm}/{leaf}'] = of(f'layernorm_after.{kind}')
    for part, letter in (('query', 'q'), ('key', 'k'), ('value', 'v')):
      names = [f'attention.attention.{part}.', f'attention.{letter}_proj.']
      name = f'{ours}{attention}/{part}'
      arrays[f'{name}/kernel'] = of(*(n + 'weight' for n in names)).T.reshape(
        width, heads, width // heads
      )
      arrays[f'{name}/bias'] = of(*(n + 'bias' for n in names)).reshape(
        heads, width // heads
      )
    names = ['attention.output.dense.', 'attention.o_proj.']
    arrays[f'{ours}{attention}/out/kernel'] = of(
      *(n + 'weight' for n in names)
    ).T.reshape(heads, width // heads, width)
    arrays[f'{ours}{attention}/out/bias'] = of(*(n + 'bias' for n in names))
    for number, names in (
      (0, ['intermediate.dense.', 'mlp.fc1.']),
      (1, [f'{i}.output.dense.', 'mlp.fc2.']),
    ):
      if number == 1:
        weight = find(
          *(f'layer.{n}weight' for n in names[:1]),
          *(prefix + names[1] + 'weight' for prefix in layer),
        )
        bias = find(
          *(f'layer.{n}bias' for n in names[:1]),
          *(prefix + names[1] + 'bias' for prefix in layer),
        )
      else:
        weight = of(*(n + 'weight' for n in names))
        bias = of(*(n + 'bias' for n in names))
      arrays[f'{ours}{mlp}/Dense_{number}/kernel'] = weight.T
      arrays[f'{ours}{mlp}/Dense_{number}/bias'] = bias
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


def test_messages_of_bad_files(tmp_path):
  """Files that are missing, damaged, of another kind or incomplete."""
  reference = _official(_reference(image_size=16), ORIGINAL)
  np.savez(tmp_path / 'foreign.npz', w=np.zeros(3))
  (tmp_path / 'damaged.npz').write_bytes(b'PK\x03\x04 not really')
  del reference['Transformer/encoder_norm/bias']
  np.savez(tmp_path / 'incomplete.npz', **reference)
  for name, what in (
    ('absent', 'does not exist'),
    ('foreign', 'embedding/kernel'),
    ('damaged', 'not an .npz file'),
    ('incomplete', 'encoder_norm/bias'),
  ):
    with pytest.raises(UserError, match=what) as error:
      npz.load(str(tmp_path / f'{name}.npz'))
    assert name in str(error.value)


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
  *(
    (
      f'Transformer/encoderblock_1/{name}',
      np.zeros((2,) * 5),
      '[2, 2, 2, 2, 2]',
    )
    for name in (
      'LayerNorm_0/bias',
      'LayerNorm_2/scale',
      'MlpBlock_3/Dense_1/bias',
      'MlpBlock_3/Dense_0/kernel',
      'MlpBlock_3/Dense_1/kernel',
      *(f'{ORIGINAL[1]}/query/{leaf}' for leaf in ('kernel', 'bias')),
      *(f'{ORIGINAL[1]}/out/{leaf}' for leaf in ('kernel', 'bias')),
    )
  ),
  (
    'Transformer/encoderblock_1/MlpBlock_3/Dense_0/bias',
    np.zeros(7),
    '[7]',
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


def test_correct_files_of_any_float_type_are_read(tmp_path):
  exact = load_pretrained(_saved(tmp_path / 'a.npz'))[1]
  low = tree.flatten(_small())['head/kernel'].astype(jnp.bfloat16)
  changes = {'head/kernel': np.asarray(low)}
  _, params = load_pretrained(_saved(tmp_path / 'b.npz', **changes))
  for path, leaf in tree.flatten(params).items():
    expected = tree.flatten(exact)[path]
    if path == 'head/kernel':
      assert not np.array_equal(leaf, expected)
      expected = low.astype(np.float32)
    np.testing.assert_array_equal(leaf, expected)


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
