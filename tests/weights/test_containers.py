"""Tests of models inside of the files of training scripts."""

import argparse
import json

import numpy as np
import pytest
import references
from references import huggingface, timm_file, timm_vit, torch

from vit_jax import load_pretrained
from vit_jax.arrays import tree
from vit_jax.errors import UserError

HEADS = references.HEADS


@pytest.fixture(scope='module')
def states():
  """Two models of the same architecture: a state_dict, and its average."""
  state = timm_vit().state_dict()
  return state, {name: 2 * leaf for name, leaf in state.items()}


@pytest.fixture(scope='module')
def plain(states, tmp_path_factory):
  """Returns the parameters of the same weights in a plain file, by path."""
  path = str(tmp_path_factory.mktemp('plain') / 'plain.pth')
  torch.save(states[0], path)
  return tree.flatten(load_pretrained(path, num_heads=HEADS).params)


def under(prefix, state):
  return {f'{prefix}{name}': leaf for name, leaf in state.items()}


def projector(prefix, head='head.0'):
  return {f'{prefix}{head}.weight': torch.zeros(3, 3)}


def without_head(state):
  return {k: v for k, v in state.items() if not k.startswith('head.')}


def row(make, ending='pth', **keys):
  """Returns a function from weights and average to a file, and its use."""
  return make, ending, keys


CONTAINERS = {
  'DistributedDataParallel': row(lambda a, b: under('module.', a)),
  'compiled': row(lambda a, b: under('_orig_mod.', a)),
  'compiled, DDP': row(lambda a, b: under('module._orig_mod.', a), 'pt'),
  'DDP, compiled': row(lambda a, b: under('_orig_mod.module.', a), 'bin'),
  'net': row(lambda a, b: under('net.', a)),
  'backbone': row(lambda a, b: {'model': under('backbone.', a)}),
  'encoder, and another layer': row(
    lambda a, b: under('model.encoder.', a) | projector('model.', 'fc')
  ),
  'head next to the backbone': row(
    lambda a, b: (
      under('backbone.', without_head(a))
      | {'head.weight': a['head.weight'], 'head.bias': a['head.bias']}
    )
  ),
  'Lightning': row(
    lambda a, b: {'state_dict': under('model.', a), 'epoch': 3, 'loops': {}},
    'ckpt',
  ),
  'arguments': row(
    lambda a, b: {'state_dict': a, 'args': argparse.Namespace(lr=0.1)},
    'pth.tar',
  ),
  'capitals': row(lambda a, b: {'model': a}, 'PTH'),
  'optimizer': row(
    lambda a, b: {
      'optimizer': {'state': {0: {'exp_avg': torch.zeros(3)}}},
      'model': a,
    }
  ),
  'DeepSpeed': row(lambda a, b: {'module': a, 'optimizer': None}, 'pt'),
  'FSDP': row(
    lambda a, b: {
      f'_fsdp_wrapped_module.{k}'.replace(
        'blocks.0.', 'blocks.0._checkpoint_wrapped_module.'
      ): v
      for k, v in a.items()
    },
    'pt',
  ),
  'AveragedModel': row(
    lambda a, b: under('module.', a) | {'n_averaged': torch.tensor(5)}
  ),
  'weights and average': row(
    lambda a, b: {'state_dict': a, 'state_dict_ema': b}
  ),
  'average': row(
    lambda a, b: {'state_dict': b, 'state_dict_ema': a}, weights='ema'
  ),
  'average in a module': row(
    lambda a, b: {'model': b, 'model_ema': under('module.', a)}, weights='ema'
  ),
  'DINO': row(
    lambda a, b: {
      'student': under('module.backbone.', b) | projector('module.'),
      'teacher': under('backbone.', a) | projector('', 'head.mlp.0'),
    },
    num_classes=7,
  ),
  'student of DINO': row(
    lambda a, b: {
      'teacher': under('backbone.', b),
      'student': under('module.backbone.', a),
    },
    weights='student',
  ),
  'flat student': row(
    lambda a, b: under('student.', a) | under('teacher.', b),
    'ckpt',
    weights='student',
  ),
  'MoCo v3': row(
    lambda a, b: {
      'state_dict': under('module.base_encoder.', without_head(a))
      | projector('module.base_encoder.')
      | under('module.momentum_encoder.', b)
      | projector('module.predictor.', '0')
    },
    'pth.tar',
    weights='base_encoder',
    num_classes=7,
  ),
  'head of several layers': row(
    lambda a, b: without_head(a) | projector('', 'head.1'), num_classes=7
  ),
  'head with a name': row(
    lambda a, b: without_head(a) | projector('', 'head.fc'), num_classes=7
  ),
  'chunks': row(
    lambda a, b: {k.replace('blocks.', 'blocks.0.'): v for k, v in a.items()}
  ),
}


@pytest.mark.parametrize('name', CONTAINERS)
def test_the_model_in_a_container_is_read(tmp_path, states, plain, name):
  """Its arrays are those of the same weights in a plain file."""
  make, ending, keys = CONTAINERS[name]
  path = str(tmp_path / f'checkpoint.{ending}')
  torch.save(make(*states), path)
  _, params = load_pretrained(path, num_heads=HEADS, **keys)
  actual = tree.flatten(params)
  assert actual.keys() == plain.keys()
  for path, leaf in plain.items():
    if not ('num_classes' in keys and path.startswith('head/')):
      np.testing.assert_array_equal(actual[path], leaf)


def test_several_models_without_a_default_are_listed(tmp_path, states):
  path = str(tmp_path / 'a.pth')
  torch.save({'encoder': states[0], 'target_encoder': states[1]}, path)
  for keys in ({}, {'weights': 'teacher'}):
    with pytest.raises(UserError, match='encoder, target_encoder.*--weights'):
      load_pretrained(path, num_heads=HEADS, **keys)
  torch.save(states[0] | under('other.', states[1]), path)
  with pytest.raises(UserError, match='main, other.*--weights'):
    load_pretrained(path, num_heads=HEADS)
  _, params = load_pretrained(path, weights='main', num_heads=HEADS)
  head = states[0]['head.bias'].numpy()
  np.testing.assert_array_equal(params['head']['bias'], head)


def test_what_is_not_used_is_logged(tmp_path, states, caplog):
  caplog.set_level('INFO', 'vit_jax')
  path = str(tmp_path / 'a.pth')
  content = under('module.', states[0]) | projector('module.', 'head.0')
  torch.save(content | {'n_averaged': torch.tensor(5)}, path)
  load_pretrained(path, num_heads=HEADS, num_classes=2)
  assert 'left out 1 other arrays, n_averaged' in caplog.text
  assert 'left out a head that is not a single matrix' in caplog.text
  torch.save({'model': states[0], 'model_ema': states[1]}, path)
  load_pretrained(path, num_heads=HEADS)
  assert "weights are 'model'; --weights selects ema" in caplog.text


@pytest.mark.parametrize(
  'content, words',
  [
    ({'conv1.weight': torch.ones(3, 3)}, 'patch_embed.*conv1.weight'),
    ({'epoch': 3}, 'no tensors'),
    ({'_fsdp_wrapped_module._flat_param': torch.ones(3)}, 'FULL_STATE_DICT'),
    ({'module': {'head.weight': torch.ones(0)}}, 'zero_to_fp32'),
  ],
)
def test_files_without_a_model_are_refused(tmp_path, content, words):
  path = str(tmp_path / 'a.pth')
  torch.save(content, path)
  with pytest.raises(UserError, match=words) as error:
    load_pretrained(path)
  assert path in str(error.value)


@pytest.mark.parametrize(
  'name, words',
  [
    ('adapter_config.json', 'merge_and_unload'),
    ('.metadata', 'dcp_to_torch'),
    ('zero_to_fp32.py', 'zero_to_fp32.py .* OUT'),
  ],
)
def test_directories_to_convert_are_refused(tmp_path, name, words):
  """The message contains the command that converts them."""
  (tmp_path / name).write_text('{}')
  with pytest.raises(UserError, match=words) as error:
    load_pretrained(str(tmp_path))
  assert str(tmp_path) in str(error.value)


def test_the_newest_checkpoint_of_a_trainer_is_read(tmp_path, caplog):
  """It is that with the largest number, not the last by name."""
  caplog.set_level('INFO', 'vit_jax')
  for step in (900, 1000):
    folder = tmp_path / f'checkpoint-{step}'
    huggingface(num_labels=step // 100).save_pretrained(folder)
  model, _ = load_pretrained(str(tmp_path))
  assert model.num_classes == 10
  assert 'the newest checkpoint is checkpoint-1000' in caplog.text


def test_wrapped_models_of_timm_are_read(tmp_path):
  """transformers saves them with the prefix `timm_model.`."""
  reference = timm_vit()
  path = timm_file(tmp_path / 'plain', reference)
  _, expected = load_pretrained(path, num_heads=HEADS)
  wrapped = tmp_path / 'wrapped'
  module = torch.nn.Module()
  module.timm_model = reference
  config = dict(
    architecture='vit_base_patch16_224',
    model_type='timm_wrapper',
    model_args={'num_heads': HEADS},
    num_classes=references.CLASSES,
  )
  timm_file(wrapped, module, config)
  _, params = load_pretrained(str(wrapped))
  actual = tree.flatten(params)
  for path, leaf in tree.flatten(expected).items():
    np.testing.assert_array_equal(actual[path], leaf)
  assert json.loads((wrapped / 'config.json').read_text())
