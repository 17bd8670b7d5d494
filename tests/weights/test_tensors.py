"""Tests of PyTorch's files: types, code, damage, and models inside of them."""

import argparse
import pathlib
import re

import numpy as np
import pytest
import references
from references import HEADS, huggingface, timm_file, timm_vit, torch

from tests.faults.counts import further, injected
from vit_jax import load_pretrained
from vit_jax.arrays import tree
from vit_jax.arrays.pixels import IMAGENET
from vit_jax.errors import UserError
from vit_jax.weights.formats import tensors, timm

# Two models of the same architecture: weights, and their average
A = timm_vit().state_dict()
B = {name: 2 * leaf for name, leaf in A.items()}
# The weights without their head
BODY = {k: v for k, v in A.items() if not k.startswith('head.')}
HEAD = {k: v for k, v in A.items() if k.startswith('head.')}


def loaded(path, **keys):
  return load_pretrained(str(path), num_heads=HEADS, **keys)


def test_types_of_8_bits_are_refused(tmp_path):
  """Those of 16 bits are read."""
  save = pytest.importorskip('safetensors.torch').save_file
  state = {k: v.bfloat16() for k, v in A.items()}
  path = str(tmp_path / 'a.safetensors')
  save(state, path)
  kernel = state['head.weight'].float().numpy().T
  np.testing.assert_array_equal(loaded(path)[1]['head']['kernel'], kernel)
  state['head.weight'] = state['head.weight'].to(torch.float8_e4m3fn)
  save(state, path)
  with pytest.raises(UserError, match=r'head.weight \(float8_e4m3fn\)'):
    loaded(path)


@pytest.mark.parametrize(
  'name', ['bfloat16', 'float8_e4m3fn', 'float8_e5m2', 'float8_e4m3fnuz']
)
def test_types_that_numpy_lacks_are_read_exactly(tmp_path, name):
  """Of any shape, also an odd number of values."""
  path, values = str(tmp_path / 'a.pth'), torch.tensor([0.5, -1.75, 96.0])
  low = values.to(getattr(torch, name))
  torch.save({'row': low, 'scalar': low[1], 'empty': low[:0]}, path)
  arrays, _ = tensors.read(path)
  assert {str(array.dtype) for array in arrays.values()} == {name}
  np.testing.assert_array_equal(arrays['row'].astype(float), low.float())
  np.testing.assert_array_equal(arrays['scalar'].astype(float), -1.75)
  assert arrays['empty'].shape == (0,)


DECODER = ('mask_token', 'decoder_pos_embed', 'decoder_blocks.0.x')


@pytest.mark.parametrize(
  'name, family, other, left_out',
  [
    ('deit_base_patch16_224-b5f2ef4d.pth', 'deit', (), ''),
    ('deit_3_base_224_1k.pth', 'deit3', (), ''),
    ('mae_pretrain_vit_base.pth', 'mae', (), ''),
    ('dino_deitsmall16_pretrain.pth', 'dino', (), ''),
    ('dinov2_vits14_pretrain.pth', 'dinov2', (), ''),
    ('anything.pth', 'vit', (), ''),
    ('a.pth', 'vit', ('mask_token',), 'its mask token, which is not used'),
    ('a.pth', 'mae', DECODER, "a decoder and its mask token (MAE's), 3"),
    (
      'a.pth',
      'dino',
      ('head.last_layer.weight_g',),
      'parts of DINO or DINOv3, 1',
    ),
  ],
)
def test_file_names_and_arrays_select_the_family(
  tmp_path, caplog, name, family, other, left_out
):
  """Released files do not contain the preprocessing of evaluations."""
  caplog.set_level('INFO', 'vit_jax')
  state = timm_vit(num_classes=0).state_dict()
  state |= {key: torch.zeros(1, 1, 3) for key in other}
  torch.save(state, tmp_path / name)
  description = timm.load(str(tmp_path / name)).description
  assert f'the defaults of the family {family}:' in caplog.text
  assert not left_out or f'left out {left_out}' in caplog.text
  mean, _ = description.statistics
  assert (mean == IMAGENET[0]) == (family != 'vit')


class Evil:
  """An object whose unpickling calls a function."""

  def __reduce__(self):
    return print, ('run!',)


class Own:
  """A class that is not importable elsewhere."""


@pytest.mark.parametrize(
  'content, words',
  [
    ({'model': Evil()}, 'never run'),
    ({'o': np.array([Evil()], dtype=object)}, 'never run'),
    ({'own': Own()}, rf'{__name__}.Own.*safetensors'),
  ],
)
@pytest.mark.parametrize('is_zip', [True, False])
def test_pickled_code_is_not_executed(tmp_path, capsys, content, words, is_zip):
  """PyTorch's advice to load a file unsafely is not repeated."""
  injected('a pickled .pth')
  path = tmp_path / 'a.pth'
  torch.save(content, path, _use_new_zipfile_serialization=is_zip)
  with pytest.raises(UserError, match=words) as error:
    tensors.read(str(path))
  assert not re.search('weights_only|safe_globals|2\\.6', str(error.value))
  assert 'run!' not in capsys.readouterr().out


@pytest.mark.parametrize('ending', ['pth', 'safetensors'])
def test_a_changed_byte_is_detected(tmp_path, ending):
  """PyTorch's archives have checksums, and so have files written here."""
  injected('a flipped bit in weights')
  state = {name: leaf.numpy() for name, leaf in A.items()}
  path = tmp_path / f'a.{ending}'
  if ending == 'pth':
    torch.save(A, path)
  else:
    tensors.write(str(path), state, {'a note': 'text'})
  content, refused = path.read_bytes(), 0
  rng = np.random.default_rng(0)
  for place in rng.choice(len(content), 60, replace=False):
    changed = bytearray(content)
    changed[place] ^= 1 << rng.integers(8)
    path.write_bytes(bytes(changed))
    try:
      found, _ = tensors.read(str(path))
    except UserError as error:
      refused += 1
      assert str(path) in str(error)
      continue
    assert found.keys() == state.keys()  # a byte that is not read
    for name, array in state.items():
      np.testing.assert_array_equal(found[name], array)
  assert refused > 50


# Models inside of the files of training scripts


@pytest.fixture(scope='module')
def plain(tmp_path_factory):
  """Returns the parameters of the same weights in a plain file, by path."""
  path = tmp_path_factory.mktemp('plain') / 'plain.pth'
  torch.save(A, path)
  return tree.flatten(loaded(path).params)


def under(prefix, state):
  return {f'{prefix}{name}': leaf for name, leaf in state.items()}


def projector(prefix, head='head.0'):
  return {f'{prefix}{head}.weight': torch.zeros(3, 3)}


# Objects that are left out, and none of whose code runs
HARMLESS = {
  'best': np.float64(77.1),
  'flag': np.bool_(True),
  'random': np.random.default_rng(0).normal(size=3),
  'text': np.array(['text'], dtype=object),
  'args': argparse.Namespace(output=pathlib.Path('/x'), lr=np.float32(1)),
}
# {name: content of the file}
CONTAINERS = {
  'DistributedDataParallel': under('module.', A),
  'compiled, DDP': under('module._orig_mod.', A),
  'backbone': {'model': under('backbone.', A)},
  'encoder, and another layer': (
    under('model.encoder.', A) | projector('model.', 'fc')
  ),
  'head next to the backbone': under('backbone.', BODY) | HEAD,
  'Lightning': {'state_dict': under('model.', A), 'epoch': 3, 'loops': {}},
  'harmless objects': {'state_dict': A, **HARMLESS},
  'capitals': {'model': A},
  'optimizer': {
    'optimizer': {'state': {0: {'exp_avg': torch.zeros(3)}}},
    'model': A,
  },
  'FSDP': {
    f'_fsdp_wrapped_module.{k}'.replace(
      'blocks.0.', 'blocks.0._checkpoint_wrapped_module.'
    ): v
    for k, v in A.items()
  },
  'AveragedModel': under('module.', A) | {'n_averaged': torch.tensor(5)},
  'weights and average': {'state_dict': A, 'state_dict_ema': B},
  'average in a module': {'model': B, 'model_ema': under('module.', A)},
  'DINO': {
    'student': under('module.backbone.', B) | projector('module.'),
    'teacher': under('backbone.', A) | projector('', 'head.mlp.0'),
  },
  'student of DINO': {
    'teacher': under('backbone.', B),
    'student': under('module.backbone.', A),
  },
  'MoCo v3': {
    'state_dict': under('module.base_encoder.', BODY)
    | projector('module.base_encoder.')
    | under('module.momentum_encoder.', B)
    | projector('module.predictor.', '0')
  },
  'head of several layers': BODY | projector('', 'head.1'),
  'head with a name': BODY | projector('', 'head.fc'),
  'chunks': {k.replace('blocks.', 'blocks.0.'): v for k, v in A.items()},
}
# Endings of files other than .pth
ENDINGS = {
  'compiled, DDP': 'pt',
  'backbone': 'bin',
  'Lightning': 'ckpt',
  'harmless objects': 'pth.tar',
  'capitals': 'PTH',
  'FSDP': 'pt',
}
SELECTED = {
  'average in a module': 'ema',
  'student of DINO': 'student',
  'MoCo v3': 'base_encoder',
}
# Files without a head for classes
HEADLESS = ('DINO', 'MoCo v3', 'head of several layers', 'head with a name')


@pytest.mark.parametrize(
  'name', [*[*CONTAINERS][:8], *further(*[*CONTAINERS][8:])]
)
def test_the_model_in_a_container_is_read(tmp_path, plain, name):
  """Its arrays are those of the same weights in a plain file."""
  path = tmp_path / f'checkpoint.{ENDINGS.get(name, "pth")}'
  torch.save(CONTAINERS[name], path)
  keys = dict(num_classes=7) if name in HEADLESS else {}
  weights = SELECTED.get(name, 'params')
  actual = tree.flatten(loaded(path, weights=weights, **keys).params)
  assert actual.keys() == plain.keys()
  for path, leaf in plain.items():
    if not (name in HEADLESS and path.startswith('head/')):
      np.testing.assert_array_equal(actual[path], leaf)


def test_several_models_without_a_default_are_listed(tmp_path):
  path = tmp_path / 'a.pth'
  torch.save(A | under('other.', B), path)
  for keys in ({}, {'weights': 'teacher'}):
    with pytest.raises(UserError, match='--weights=NAME is .*main, other'):
      loaded(path, **keys)
  bias = loaded(path, weights='main').params['head']['bias']
  np.testing.assert_array_equal(bias, A['head.bias'].numpy())


def test_what_is_not_used_is_logged(tmp_path, caplog):
  caplog.set_level('INFO', 'vit_jax')
  path = tmp_path / 'a.pth'
  content = under('module.', A) | projector('module.', 'head.0')
  torch.save(content | {'n_averaged': torch.tensor(5)}, path)
  loaded(path, num_classes=2)
  assert 'left out 1 other arrays, n_averaged' in caplog.text
  assert 'left out a head that is not a single matrix' in caplog.text
  torch.save({'model': A, 'model_ema': B}, path)
  loaded(path)
  assert "weights are 'model'; --weights selects ema" in caplog.text


@pytest.mark.slow
def test_the_newest_checkpoint_of_a_trainer_is_read(tmp_path, caplog):
  """It is that with the largest number, not the last by name."""
  caplog.set_level('INFO', 'vit_jax')
  for step in (900, 1000):
    folder = tmp_path / f'checkpoint-{step}'
    huggingface(num_labels=step // 100).save_pretrained(folder)
  model, _ = load_pretrained(str(tmp_path))
  assert model.num_classes == 10
  assert 'the newest checkpoint is checkpoint-1000' in caplog.text


def test_wrapped_models_of_timm_are_read(tmp_path, plain):
  """transformers saves them with the prefix `timm_model.`."""
  module = torch.nn.Module()
  module.timm_model = timm_vit()
  config = dict(
    architecture='vit_base_patch16_224',
    model_type='timm_wrapper',
    model_args={'num_heads': HEADS},
    num_classes=references.CLASSES,
  )
  timm_file(tmp_path, module, config)
  actual = tree.flatten(load_pretrained(str(tmp_path)).params)
  for path, leaf in plain.items():
    np.testing.assert_array_equal(actual[path], leaf)
