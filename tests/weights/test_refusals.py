"""Tests of wrong arrays and settings: a message has path, key and value."""

import json

import jax
import numpy as np
import pytest
import safetensors.numpy
import tiny_vit
from references import CLASSES, HEADS, huggingface, timm_file, timm_vit
from test_swin_files import hugging_face_swin, saved_there

from vit_jax import load_pretrained
from vit_jax.errors import UserError
from vit_jax.models import resnet, vit
from vit_jax.weights import pretrained
from vit_jax.weights.description import Description
from vit_jax.weights.formats import npz


def official(model, size):
  """Returns a function that writes an official file of a model."""

  def write(folder):
    path = str(folder / 'a.npz')
    npz.save(path, tiny_vit.noise_params(model, size), None)
    return path

  return write


def with_notes(folder):
  """Writes an .npz file with notes next to it."""
  sizes = dict(patch_size=4, width=16, depth=2, mlp_dim=32, num_heads=2)
  description = Description(
    model=dict(name='vit', **sizes), num_classes=5, image_size=(16, 8)
  )
  params = jax.tree.map(lambda leaf: np.ones(leaf.shape), description.shapes[0])
  pretrained.save(str(folder / 'a.npz'), params, description)
  return str(folder / 'a.npz')


def directory(folder):
  huggingface().save_pretrained(folder)
  return str(folder)


HYBRID = vit.Model(
  7,
  **tiny_vit.SIZES | dict(patch_size=1),
  stem=dict(name='resnet', depths=(2, 1)),
)
BIT = resnet.Model(7, depths=(1, 3), width_factor=1, dtype='float32')
# {kind of weights: function that writes them into a folder}
WEIGHTS = {
  'vit': official(vit.Model(5, **tiny_vit.SIZES), (8, 8)),
  'hybrid': official(HYBRID, (32, 32)),
  'bit': official(BIT, (32, 32)),
  'notes': with_notes,
  'timm': lambda folder: timm_file(folder, timm_vit()),
  'transformers': directory,
  'swin': lambda folder: saved_there(folder, hugging_face_swin()),
  'nothing': str,
}
FC1 = 'Transformer/encoderblock_1/MlpBlock_3/Dense_0/kernel'
# (kind, {name: other array, or None to remove it}, words of the message)
WRONG_ARRAYS = [
  (
    'vit',
    {'embedding/kernel': np.zeros((4, 3, 16))},
    ['embedding/kernel', '[4, 3, 16]'],
  ),
  ('vit', {'cls': np.zeros((1, 1, 0))}, ['cls', '[1, 1, 0]']),
  ('vit', {'cls': np.array('text')}, ['cls', '<U4']),
  ('vit', {'cls': np.zeros((1, 1, 16), complex)}, ['cls', 'complex128']),
  ('vit', {'cls': np.zeros((1, 1, 16), 'V3')}, ['cls', '|V3']),
  (
    'vit',
    {'cls': np.zeros((1, 1, 16), [('a', 'f4')])},
    ['cls', "[('a', '<f4')]"],
  ),
  ('vit', {'head/kernel': np.float32(1)}, ['head/kernel', '[]']),
  ('vit', {FC1: np.zeros((2,) * 5)}, ['MlpBlock_3/Dense_0', '[2, 2, 2, 2, 2]']),
  (
    'vit',
    {'Transformer/posembed_input/pos_embedding': np.zeros(5)},
    ['pos_embedding', '[5]'],
  ),
  ('bit', {'resnet/block2/unit02/b/group_norm/beta': None}, ['missing']),
  ('bit', {'resnet/extra': np.zeros(3, np.float32)}, ['[3]']),
  ('bit', {'resnet/head/conv2d/kernel': np.zeros((2, 3))}, ['[2, 3]']),
  ('hybrid', {'block1/unit1/gn_proj/scale': None}, ['missing']),
  ('hybrid', {'conv_root/kernel': np.zeros((7, 7, 3, 65))}, ['65', 'of 64']),
  (
    'timm',
    {
      'head.bias': np.zeros(6, np.float32),
      'norm_other.weight': np.zeros(3, np.float32),
      'blocks.0.norm1.bias': None,
      'blocks.1.norm1.bias': None,
    },
    [
      'blocks.0.norm1.bias and 1 other layers: missing in the file, [32]',
      'head.bias: [6] in the file, [7] in the model',
      'norm_other.weight: [3] in the file, none in the model',
    ],
  ),
  ('timm', {'patch_embed.proj.weight': None}, ['patch_embed.proj', 'missing']),
  ('timm', {'pos_embed': np.zeros((17, 32), np.float32)}, ['pos_embed', '3 d']),
  (
    'timm',
    {
      'blocks.0.attn.qkv.weight': None,
      'blocks.0.attn.q_proj.weight': np.zeros((32, 32), np.float32),
      'blocks.0.attn.k_proj.weight': np.zeros((32, 31), np.float32),
      'blocks.0.attn.v_proj.weight': np.zeros((32, 32), np.float32),
    },
    ['blocks.0.attn.k_proj.weight: [32, 31] in the file'],
  ),
  ('timm', {'head.bias': np.arange(CLASSES)}, ['head.bias (int64)']),
  (
    'timm',
    {'head.bias': np.full(CLASSES, np.nan, np.float32)},
    ['NaN or infinite: head/bias (7 of 7)'],
  ),
]


@pytest.mark.parametrize('kind, changes, words', WRONG_ARRAYS)
def test_wrong_arrays(tmp_path, kind, changes, words):
  path = WEIGHTS[kind](tmp_path)
  if path.endswith('.npz'):
    with np.load(path) as file:
      arrays = dict(file)
  else:
    arrays = safetensors.numpy.load_file(path)
  arrays = {k: v for k, v in (arrays | changes).items() if v is not None}
  if path.endswith('.npz'):
    np.savez(path, **arrays)
  else:
    safetensors.numpy.save_file(arrays, path)
  keys = dict(num_heads=HEADS) if kind == 'timm' else {}
  with pytest.raises(UserError) as error:
    load_pretrained(path, **keys)
  for word in (path, *words):
    assert word in str(error.value)


CONFIG, PROCESSOR = 'config.json', 'preprocessor_config.json'
NOTES = 'a.npz.json'
# (kind, file, changes of its content, words of the message)
WRONG_SETTINGS = [
  *(
    ('transformers', file, {key: value}, [f'{key} is {repr(value)[:40]}'])
    for file, key, value in (
      (CONFIG, 'num_hidden_layers', 10**9),
      (CONFIG, 'id2label', {'9' * 6000: 'x'}),
      (CONFIG, 'image_size', []),
      (CONFIG, 'image_size', 2),
      (CONFIG, 'layer_norm_eps', float('nan')),
      (PROCESSOR, 'vit_jax_preprocess', 3),
      (PROCESSOR, 'do_rescale', 'false'),
      (PROCESSOR, 'rescale_factor', 0),
      (PROCESSOR, 'size', {'longest_edge': 3}),
      (PROCESSOR, 'size', {'height': '16', 'width': 16}),
    )
  ),
  # Options of the library's Swin that this one does not have
  ('swin', CONFIG, dict(mlp_ratio=2.0), ["'mlp_ratio': 2.0", ': 4']),
  ('swin', CONFIG, dict(num_heads=[2, 2, 2]), ['[2, 2, 2]', '[2, 4, 8]']),
  # Sizes of other arrays
  ('swin', CONFIG, dict(embed_dim=48), ['embed_dim is 48', 'those of 24']),
  ('swin', CONFIG, dict(depths=[2, 2, 4]), ['depths', '[2, 2, 2]']),
  ('swin', CONFIG, dict(num_heads=[3, 6, 12]), ['num_heads', '[2, 4, 8]']),
  ('swin', CONFIG, dict(layer_norm_eps=0.01), ['model.norm_eps']),
  ('swin', CONFIG, dict(hidden_act='mish'), ['hidden_act', 'mish']),
  # Other types are refused by their name; no weights are read.
  ('nothing', CONFIG, dict(model_type='pixio'), ["'pixio'; ", 'allowed']),
  # A setting that is right in another model is not called wrong.
  (
    'nothing',
    CONFIG,
    dict(model_type='segformer', num_attention_heads=[1, 2, 5, 8]),
    ["'segformer'; ", 'allowed'],
  ),
  *(
    (
      'timm',
      CONFIG,
      dict(architecture='x', global_pool=pool),
      [f"'{pool}'", "'token'"],
    )
    for pool in ('map', 'unknown')
  ),
  *(
    ('timm', CONFIG, dict(architecture=name), [name, 'not a plain Vision'])
    for name in ('hiera_base_224', 'cait_s24_224')
  ),
  # Notes contain keys of the model, which could name a module to import.
  *(
    ('notes', NOTES, dict(model_args=args), words)
    for args, words in (
      (dict(name='json'), ['name is not a key']),
      (dict(stem={'name': 'json'}), ['stem is not a key']),
      (dict(unknown=1), ['unknown is not a key']),
      (dict(width='wide'), ["width is 'wide'"]),
      (dict(pool='mean'), ["model.pool is 'mean'"]),
    )
  ),
]


@pytest.mark.parametrize('kind, file, changes, words', WRONG_SETTINGS)
def test_wrong_settings(tmp_path, kind, file, changes, words):
  path = WEIGHTS[kind](tmp_path)
  file = tmp_path / file
  content = json.loads(file.read_text()) if file.exists() else {}
  file.write_text(json.dumps(content | changes))
  with pytest.raises(UserError) as error:
    pretrained.find(path)
  for word in (str(tmp_path), *words):
    assert word in str(error.value)
