"""Tests of learning rate and weight decay of each parameter, by its layer."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.arrays import tree
from vit_jax.config import complete
from vit_jax.config.loading import load
from vit_jax.config.schema import build_section
from vit_jax.errors import UserError
from vit_jax.models import resnet, swin
from vit_jax.models.contract import abstract_params
from vit_jax.objectives.contract import Setting
from vit_jax.optim import optimizers

DEPTH = 3
SIZES = dict(
  patch_size=8, width=16, depth=DEPTH, mlp_dim=16, num_heads=2, variant=None
)
COMMON = dict(
  registers=2,
  layer_scale=0.1,
  qk_norm=True,
  attention_norm=True,
  mlp_norm=True,
  patch_norm=True,
  pre_norm=True,
)
# All options that add parameters, in models in which they exclude no other.
MODELS = [
  COMMON | dict(pool='token', distilled=True, rope='mixed'),
  COMMON | dict(pool='gap', fc_norm=True, class_token=True, position='2d'),
  dict(pool='gap', fc_norm=True, position='relative_bias'),
  dict(pool='gap', position='learned', position_at='layers'),
  dict(pool='gap', position='relative', position_at='shared'),
  dict(pool='map', pre_logits=True),
  dict(stem=dict(name='resnet', depths=(1,)), patch_size=1, pixels='symmetric'),
]
# The sources' names for the beginnings of paths; others are those of heads.
NAMES = {
  'cls': 'cls_token',
  'registers': 'reg_token',
  'distillation': 'dist_token',
  'mask': 'mask_token',
  'position': 'pos_embed',
  'embedding': 'patch_embed.proj',
  'patch_norm': 'patch_embed.norm',
  'stem': 'patch_embed.backbone',
  'pre_norm': 'norm_pre',
  'encoder/layers': 'blocks.{i}',
}


def mae(name):
  """Returns the layer of MAE's util/lr_decay.py, for further tokens timm's.

  Weight decay is left out for all that has one axis in PyTorch, and for
  `no_weight_decay` of timm: tokens, positions, frequencies of rotations.
  """
  first = ('cls_token', 'reg_token', 'dist_token', 'pos_embed', 'norm_pre')
  if name.startswith((*first, 'patch_embed')):
    layer = 0
  else:
    block = re.match(r'blocks\.(\d+)', name)
    layer = int(block[1]) + 1 if block else DEPTH + 1
  return 0.65 ** (DEPTH + 1 - layer), name.endswith('kernel')


def dinov2(name):
  """Returns the factors of get_params_groups_with_decay of DINOv2."""
  tokens = ('pos_embed', 'patch_embed', 'mask_token', 'cls_token', 'reg_token')
  extra = ('dist_token', 'norm_pre')  # which DINOv2 does not have
  layer = DEPTH + 1
  if name.startswith((*tokens, *extra)):
    layer = 0
  elif block := re.match(r'blocks\.(\d+)', name):
    layer = int(block[1]) + 1
  # Its names of our `scale1` and `scale2` contain 'gamma'.
  decays = not re.search(r'bias$|norm|scale\d$', name)
  rate = 0.9 ** (DEPTH + 1 - layer)
  return rate * (0.2 if 'patch_embed' in name else 1), decays


def measured(config, options):
  """Returns {path: (rates, weight decays)} of the layers of each parameter."""
  with config.unlocked():
    config.model.update(**(SIZES | options))
  model = build_section(complete(config), 'model', config.num_classes)
  objective = build_section(config, 'objective', Setting(model, (16, 16)))
  shapes, _ = jax.eval_shape(objective.init, jax.random.key(0), None)
  setting = optimizers.Setting(lambda duration: 0, objective.layers_above)
  of = build_section(config, 'optimizer', lambda count: 1.0, setting)

  def changes(gradient, value):
    def filled(path, leaf, number):  # one number for each layer
      layers = leaf.shape[0] if 'layers/' in path else 1
      return np.full((layers, *[1] * (leaf.ndim - 1)), number, np.float32)

    grads, params = (
      tree.map_with_path(functools.partial(filled, number=number), shapes)
      for number in (gradient, value)
    )
    updates, _ = of.update(grads, of.init(params), params)
    return {k: -np.ravel(leaf) for k, leaf in tree.flatten(updates).items()}

  # Adam's first direction is the sign of the gradient.
  rates, decays = changes(1.0, 0.0), changes(0.0, 1.0)
  return {path: (rates[path], decays[path] / rates[path]) for path in rates}


@pytest.mark.parametrize(
  'recipe, source, options',
  [
    *(('finetune_mae.py:model=B', mae, options) for options in MODELS),
    *(('dinov2.py:model=S', dinov2, options) for options in MODELS[:2]),
  ],
)
def test_each_parameter_is_in_the_group_of_the_source(recipe, source, options):
  """Its learning rate and weight decay are those of its group."""
  config = load(f'configs/{recipe}')
  prefix = 'model/' if source is dinov2 else ''
  found = measured(config, dict(fc_norm=False) | options)
  assert len(found) >= 20
  for path, (rates, decays) in found.items():
    name = path.removeprefix(prefix)
    for beginning, theirs in NAMES.items():
      name = re.sub(rf'^{beginning}(?=/|$)', theirs, name)
    for i in range(len(rates)):
      rate, decay = source(name.format(i=i))
      assert rates[i] == pytest.approx(rate, rel=1e-4), path
      weight_decay = config.optimizer.weight_decay * decay
      assert decays[i] == pytest.approx(weight_decay, rel=1e-4), path


def test_pre_training_of_mae_decays_matrices_and_tokens():
  """LayerScale and norms of queries do not decay, as all that has one axis."""
  config = load('configs/mae.py:model=B')
  with config.unlocked():
    config.objective.decoder.update(width=16, depth=1, num_heads=2, mlp_dim=16)
  found = measured(config, dict(layer_scale=0.1, qk_norm=True))
  decaying = {path.split('/')[-1] for path in found if found[path][1].any()}
  assert decaying == {'kernel', 'cls', 'mask'}
  assert {'scale1', 'scale', 'bias'} <= {path.split('/')[-1] for path in found}


def authors_swin(name, depths):
  """Returns the layer of get_swin_layer of Swin's authors (in SimMIM)."""
  first, stage, _, block = (*name.split('.'), '', '', '')[:4]
  if first == 'patch_embed':
    return 0
  if first != 'layers':
    return sum(depths) + 1
  before = sum(depths[: int(stage)])
  if block in ('reduction', 'norm'):
    return before + depths[int(stage)]
  return before + int(block) + 1


def test_layers_of_a_swin_are_those_of_the_authors():
  depths = (2, 4)
  model = swin.Model(5, width=16, depths=depths, num_heads=2, window_size=2)
  others = {
    'embedding': 'patch_embed.proj',
    'embedding_norm': 'patch_embed.norm',
    'merge1': 'layers.0.downsample.reduction',
  }
  for path in tree.flatten(abstract_params(model, (32, 32))):
    module, _, kind, *_ = (*path.split('/'), '')
    names = [others.get(module, module)]
    if module.startswith('stage'):
      stage, first = int(module[-1]) - 1, int(kind == 'shifted')
      blocks = range(first, depths[stage], 2)
      names = [f'layers.{stage}.blocks.{block}' for block in blocks]
    expected = [7 - authors_swin(name, depths) for name in names]
    assert np.ravel(model.layers_above(path)).tolist() == expected, path


def test_a_model_without_layers_is_refused():
  model = resnet.Model(5, depths=(1, 1), width_factor=1)
  setting = optimizers.Setting(layers_above=model.layers_above)
  of = optimizers.sgd(lambda count: 0.1, setting, layer_decay=0.75)
  params = {'head': {'kernel': jnp.ones((2, 2))}}
  with pytest.raises(UserError, match="'head/kernel'.*layer_decay=1"):
    of.update(params, of.init(params), params)
