"""Tests of wrong files, arrays and settings.

A message contains the path, and the key and value, or what has to be done.
"""

import io
import itertools
import json
import random
import struct
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tiny_vit
from numpy.lib import format as npy
from references import (
  CLASSES,
  HEADS,
  huggingface,
  timm_file,
  timm_vit,
  torch,
  transformers,
)
from test_swin_files import hugging_face_swin, saved_there

from tests.faults.counts import count, further, injected
from vit_jax import load_pretrained
from vit_jax.errors import UserError
from vit_jax.models import resnet, vit
from vit_jax.models.layers import activate
from vit_jax.weights import pretrained
from vit_jax.weights.formats import npz
from vit_jax.weights.metadata import GELUS


def official(model, size):
  """Returns a function that writes an official file of a model."""

  def write(folder):
    path = str(folder / 'a.npz')
    npz.save(path, tiny_vit.noise_params(model, size), None)
    return path

  return write


def with_notes(folder):
  """Writes an .npz file with notes next to it."""
  tiny_vit.save_classifier(str(folder / 'a.npz'))
  return str(folder / 'a.npz')


def directory(name):
  """Returns a function that writes a model of transformers."""

  def write(folder):
    huggingface(name).save_pretrained(folder)
    return str(folder)

  return write


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
  'transformers': directory('ViTForImageClassification'),
  'clip': directory('CLIPVisionModel'),
  'swin': lambda folder: saved_there(folder, hugging_face_swin()),
  'nothing': str,
}


def zeros(*shape):
  return np.zeros(shape, np.float32)


KERNEL, HEAD = 'embedding/kernel', 'resnet/head/conv2d/kernel'
FC1 = 'Transformer/encoderblock_1/MlpBlock_3/Dense_0/kernel'
POSITIONS = 'Transformer/posembed_input/pos_embedding'
RECORD = np.zeros((1, 1, 16), [('a', 'f4')])
NAN = np.full(CLASSES, np.nan, np.float32)
CLIP = 'embeddings.{}_embedding.weight'
# (kind, {name: other array, or None to remove it}, words of the message)
WRONG_ARRAYS = [
  ('vit', {KERNEL: zeros(4, 3, 16)}, [KERNEL, '[4, 3, 16]']),
  ('vit', {'cls': zeros(1, 1, 0)}, ['cls', '[1, 1, 0]']),
  ('vit', {'cls': np.array('text')}, ['cls', '<U4']),
  ('vit', {'cls': np.zeros((1, 1, 16), complex)}, ['cls', 'complex128']),
  ('vit', {'cls': np.zeros((1, 1, 16), 'V3')}, ['cls', '|V3']),
  ('vit', {'cls': RECORD}, ['cls', "[('a', '<f4')]"]),
  ('vit', {'head/kernel': np.float32(1)}, ['head/kernel', '[]']),
  ('vit', {FC1: zeros(2, 2, 2, 2, 2)}, ['MlpBlock_3/D', '[2, 2, 2, 2, 2]']),
  ('vit', {POSITIONS: zeros(5)}, ['pos_embedding', '[5]']),
  ('vit', {POSITIONS: zeros(1, 4, 16)}, ['3 positions', 'a.npz.json']),
  ('vit', {POSITIONS: zeros(1, 1, 16)}, ['0 positions', 'a.npz.json']),
  ('bit', {'resnet/block2/unit02/b/group_norm/beta': None}, ['missing']),
  ('bit', {'resnet/extra': zeros(3)}, ['[3]']),
  ('bit', {HEAD: zeros(2, 3)}, ['[2, 3]']),
  ('hybrid', {'block1/unit1/gn_proj/scale': None}, ['missing']),
  ('hybrid', {'conv_root/kernel': zeros(7, 7, 3, 65)}, ['65', 'of 64']),
  (
    'timm',
    {
      'head.bias': zeros(6),
      'norm_other.weight': zeros(3),
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
  ('timm', {'pos_embed': zeros(17, 32)}, ['pos_embed', '3 d']),
  (
    'timm',
    {
      'blocks.0.attn.qkv.weight': None,
      'blocks.0.attn.q_proj.weight': zeros(32, 32),
      'blocks.0.attn.k_proj.weight': zeros(32, 31),
      'blocks.0.attn.v_proj.weight': zeros(32, 32),
    },
    ['blocks.0.attn.k_proj.weight: [32, 31] in the file'],
  ),
  ('timm', {'head.bias': np.arange(CLASSES)}, ['head.bias (int64)']),
  ('timm', {'head.bias': NAN}, ['NaN or infinite: head/bias (7 of 7)']),
  ('clip', {CLIP.format('patch'): None}, ['projection.weight', 'missing']),
  ('clip', {CLIP.format('position'): None}, ['position', 'missing']),
]


@pytest.mark.parametrize('kind, changes, words', WRONG_ARRAYS)
def test_wrong_arrays(tmp_path, kind, changes, words):
  path = WEIGHTS[kind](tmp_path)
  if path.endswith('.npz'):
    file, read, write = path, np.load, lambda arrays, to: np.savez(to, **arrays)
  else:
    file = tmp_path / 'model.safetensors'
    read, write = safetensors.numpy.load_file, safetensors.numpy.save_file
  arrays = dict(read(file)) | changes
  write({k: v for k, v in arrays.items() if v is not None}, file)
  keys = dict(num_heads=HEADS) if kind == 'timm' else {}
  with pytest.raises(UserError) as error:
    load_pretrained(path, **keys)
  for word in (path, *words):
    assert word in str(error.value)


def archive(*members):
  """Returns a function that writes an .npz file of one or two arrays `cls`."""

  def write(path):
    with zipfile.ZipFile(path, 'w') as written:
      for content in members:
        written.writestr('cls.npy', content)

  return write


def member(shape, descr='<f4', data=bytes(16)):
  """Returns the content of an .npy file with any header."""
  file = io.BytesIO()
  fields = dict(shape=shape, descr=descr, fortran_order=False)
  npy.write_array_header_1_0(file, fields)
  return file.getvalue() + data


def flipped(path):
  """Writes an .npz file, one bit of which then changes."""
  np.savez(path, w=np.ones(100, np.float32))
  content = bytearray(path.read_bytes())
  content[300] ^= 1
  path.write_bytes(content)


def raw(content):
  return lambda path: path.write_bytes(content)


def pickled(**tensors):
  return lambda path: torch.save(tensors, path)


def converted(convert):
  """Returns a function that writes a tensor without plain values."""
  return lambda path: torch.save({'x': convert(FLAT)}, path)


ROW = '"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
REPEATED = f'{{{ROW},{ROW}}}'.encode()  # the header of a .safetensors file
FLAT = torch.ones(4, 4)
# (name of a file, function that writes it, words of the message)
WRONG_FILES = [
  ('a.npz', archive(b'no array at all'), 'plain arrays'),
  ('a.npz', archive(member((4,))[:40]), 'header'),
  ('a.npz', archive(member((5,))), ' 20 bytes'),
  ('a.npz', archive(member((-4,))), 'negative'),
  ('a.npz', archive(member((4,), "<f4' + 'x")), 'descr'),
  ('a.npz', archive(member((1,), '|O')), 'plain arrays.*Object arrays'),
  ('a.npz', archive(member((10**13,))), 'TiB'),  # more than any memory
  ('a.npz', archive(member((2**40, 2**40))), 'shape'),
  # Programs differ in which of two arrays they read.
  ('a.npz', archive(member((4,)), member((4,))), 'cls more than once'),
  (
    'a.safetensors',
    raw(struct.pack('<Q', len(REPEATED)) + REPEATED + bytes(8)),
    'contains a more than once',
  ),
  ('a.npz', flipped, 'CRC'),
  # Strides of 0 would become gigabytes of memory.
  (
    'a.pth',
    pickled(x=torch.ones(1).expand(10**5, 10**4)),
    'describe tensors of 4,000,000,000 byte',
  ),
  (
    'a.pth',
    converted(lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)),
    r'x \(.*qint8',
  ),
  ('a.pth', converted(lambda x: x.to_sparse_csr()), r'x \(.*sparse_csr'),
  ('a.pth', converted(lambda x: x.to('meta')), r'x \(.*meta'),
  (
    'a.pth',
    converted(lambda x: x.to(torch.uint8).view(torch.float4_e2m1fn_x2)),
    r'x \(.*float4',
  ),
  # Other programs have to convert these, by the command in the message.
  ('a.pth', pickled(epoch=3), 'no tensors'),
  ('a.pth', pickled(module={'head.weight': FLAT[:0]}), 'zero_to_fp32.py'),
  ('a.pth', pickled(_flat_param=FLAT), 'FULL_STATE_DICT'),
  ('.metadata', raw(b'{}'), 'dcp_to_torch'),
  ('zero_to_fp32.py', raw(b''), 'zero_to_fp32.py .* OUT'),
  # Nothing says that these are damaged, because nothing was compared.
  *(
    (f'a.{end}', raw(start), f'^(?!.*damaged).*{kind}.*Supported: .npz')
    for (start, kind), end in itertools.product(
      (
        (b'', 'is empty'),
        (b'<html>Not found', 'a web page'),
        (b'version https://git-lfs.github.com/spec/v1', 'git lfs pull'),
      ),
      ('npz', 'pth', 'safetensors', 'h5', 'npy'),
    )
  ),
]


@pytest.mark.filterwarnings('ignore')  # of zipfile and torch, about these files
@pytest.mark.parametrize('name, write, words', WRONG_FILES)
def test_wrong_files(tmp_path, name, write, words):
  injected('a damaged file of weights')
  path = tmp_path / name
  write(path)
  if not name.startswith('a.'):  # the directory of a checkpoint
    path = tmp_path
  with pytest.raises(UserError, match=words) as error:
    load_pretrained(str(path))
  assert str(path) in str(error.value)


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
  # Other types are refused by their name; no weights are read, and a setting
  # that is right in another model is not called wrong.
  ('nothing', CONFIG, dict(model_type='pixio'), ["'pixio'; ", 'allowed']),
  (
    'nothing',
    CONFIG,
    dict(model_type='segformer', num_attention_heads=[1, 2, 5, 8]),
    ["'segformer'; ", 'allowed'],
  ),
  *(
    ('timm', CONFIG, dict(architecture=name, **keys), words)
    for name, keys, words in (
      ('x', dict(global_pool='map'), ["'map'", "'token'"]),
      ('x', dict(global_pool='unknown'), ["'unknown'", "'token'"]),
      ('hiera_base_224', {}, ['hiera_base_224', 'not a plain Vision']),
      ('cait_s24_224', {}, ['cait_s24_224', 'not a plain Vision']),
    )
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


VALUES = ['x', 5, -1, 0, 10**9, 1.5, 1e300, float('nan'), True, None]
VALUES += [[], ['x'], [-1, 0], {}, {'x': []}]


def mutations(content):
  """Yields copies of settings with one value replaced, at any depth."""
  for key, value in content.items():
    for other in VALUES:
      yield content | {key: other}
    if isinstance(value, dict):
      for changed in mutations(value):
        yield content | {key: changed}


SETTINGS_OF_PROCESSOR = dict(
  do_normalize=True,
  do_center_crop=True,
  size={'height': 20, 'width': 20},
  crop_size={'height': 16, 'width': 16},
  resample=3,
  image_mean=[0.5] * 3,
  image_std=[0.5] * 3,
)
SETTINGS_OF_TIMM = dict(
  architecture='vit_base_patch16_224',
  global_pool='token',
  model_args=dict(num_heads=HEADS, act_layer='gelu'),
  label_names=list('abcdefg'),
  pretrained_cfg=dict(
    input_size=[3, 16, 16],
    mean=[0.5] * 3,
    std=[0.5] * 3,
    crop_pct=0.9,
    interpolation='bicubic',
    crop_mode='center',
  ),
)


@pytest.mark.parametrize('name', sorted(GELUS.keys() - {'gelu_tanh'}))
def test_activations_have_the_names_of_the_library(name):
  """`gelu_tanh` is a name of timm."""
  x = np.linspace(-5, 5, 101, dtype=np.float32)
  theirs = transformers.activations.get_activation(name)(torch.tensor(x))
  ours = activate(jnp.asarray(x), GELUS[name])
  np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
  'project, name',
  [
    ('transformers', 'config'),
    *further(['transformers', 'preprocessor_config'], ['timm', 'config']),
  ],
)
def test_mutated_settings(tmp_path, project, name):
  """Each is accepted, or refused by one message, key by key."""
  if project == 'timm':
    path = timm_file(tmp_path, timm_vit(), SETTINGS_OF_TIMM)
  else:
    path = WEIGHTS['transformers'](tmp_path)
    (tmp_path / PROCESSOR).write_text(json.dumps(SETTINGS_OF_PROCESSOR))
  file, refused = tmp_path / f'{name}.json', 0
  found = list(mutations(json.loads(file.read_text())))
  limit = min(count(60, 250), len(found))
  for content in random.Random(0).sample(found, limit):
    file.write_text(json.dumps(content))
    try:
      source = pretrained.find(path)
      source.description.transform()
    except UserError as error:
      refused += 1
      assert len(str(error)) < 5000, content
  assert refused > 10
