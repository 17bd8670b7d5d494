"""Tests of models inside of the files of training scripts."""

import argparse

import numpy as np
import pytest
import references
from references import huggingface, timm_file, timm_vit, torch

from tests.faults.counts import further
from vit_jax import load_pretrained
from vit_jax.arrays import tree
from vit_jax.errors import UserError

HEADS = references.HEADS


# Two models of the same architecture: weights, and their average
A = timm_vit().state_dict()
B = {name: 2 * leaf for name, leaf in A.items()}
# The weights without their head
BODY = {k: v for k, v in A.items() if not k.startswith('head.')}
HEAD = {k: v for k, v in A.items() if k.startswith('head.')}


@pytest.fixture(scope='module')
def plain(tmp_path_factory):
  """Returns the parameters of the same weights in a plain file, by path."""
  path = str(tmp_path_factory.mktemp('plain') / 'plain.pth')
  torch.save(A, path)
  return tree.flatten(load_pretrained(path, num_heads=HEADS).params)


def under(prefix, state):
  return {f'{prefix}{name}': leaf for name, leaf in state.items()}


def projector(prefix, head='head.0'):
  return {f'{prefix}{head}.weight': torch.zeros(3, 3)}


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
  'arguments': {'state_dict': A, 'args': argparse.Namespace(lr=0.1)},
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
  'arguments': 'pth.tar',
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
  path = str(tmp_path / f'checkpoint.{ENDINGS.get(name, "pth")}')
  torch.save(CONTAINERS[name], path)
  keys = dict(num_classes=7) if name in HEADLESS else {}
  weights = SELECTED.get(name, 'params')
  loaded = load_pretrained(path, num_heads=HEADS, weights=weights, **keys)
  actual = tree.flatten(loaded.params)
  assert actual.keys() == plain.keys()
  for path, leaf in plain.items():
    if not (name in HEADLESS and path.startswith('head/')):
      np.testing.assert_array_equal(actual[path], leaf)


def test_several_models_without_a_default_are_listed(tmp_path):
  path = str(tmp_path / 'a.pth')
  torch.save(A | under('other.', B), path)
  for keys in ({}, {'weights': 'teacher'}):
    with pytest.raises(UserError, match='--weights=NAME is .*main, other'):
      load_pretrained(path, num_heads=HEADS, **keys)
  params = load_pretrained(path, weights='main', num_heads=HEADS).params
  head = A['head.bias'].numpy()
  np.testing.assert_array_equal(params['head']['bias'], head)


def test_what_is_not_used_is_logged(tmp_path, caplog):
  caplog.set_level('INFO', 'vit_jax')
  path = str(tmp_path / 'a.pth')
  content = under('module.', A) | projector('module.', 'head.0')
  torch.save(content | {'n_averaged': torch.tensor(5)}, path)
  load_pretrained(path, num_heads=HEADS, num_classes=2)
  assert 'left out 1 other arrays, n_averaged' in caplog.text
  assert 'left out a head that is not a single matrix' in caplog.text
  torch.save({'model': A, 'model_ema': B}, path)
  load_pretrained(path, num_heads=HEADS)
  assert "weights are 'model'; --weights selects ema" in caplog.text


@pytest.mark.parametrize(
  'name, content, words',
  [
    ('a.pth', {'epoch': 3}, 'no tensors'),
    ('a.pth', {'module': {'head.weight': torch.ones(0)}}, 'zero_to_fp32.py'),
    ('a.pth', {'_flat_param': torch.ones(9)}, 'FULL_STATE_DICT'),
    ('.metadata', None, 'dcp_to_torch'),
    ('zero_to_fp32.py', None, 'zero_to_fp32.py .* OUT'),
  ],
)
def test_files_to_convert_are_refused(tmp_path, name, content, words):
  """The message contains the command that converts them."""
  path = tmp_path
  if name == 'a.pth':
    path = tmp_path / name
    torch.save(content, path)
  else:
    (path / name).write_text('{}')
  with pytest.raises(UserError, match=words) as error:
    load_pretrained(str(path))
  assert str(path) in str(error.value)


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
