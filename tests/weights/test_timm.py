"""Tests of weights with timm's names against timm's results."""

import dataclasses

import jax
import minimal_config
import numpy as np
import pytest
import references
import safetensors.numpy
from PIL import Image
from references import (
  HEADS,
  SIZE,
  same_results,
  timm_file,
  timm_vit,
  torch,
)

from tests.faults.counts import further
from vit_jax import load_pretrained
from vit_jax.arrays.pixels import NONE
from vit_jax.cli import inputs, results
from vit_jax.config import overrides
from vit_jax.data.augment import presets
from vit_jax.data.augment.transforms import EvalTransform
from vit_jax.models.vit import NAMES
from vit_jax.training.experiment import Experiment
from vit_jax.weights import architecture, pretrained, transfer
from vit_jax.weights.formats import timm_models
from vit_jax.weights.patch_embedding import CLIP

HEADLESS = dict(num_classes=0)
GAP = dict(class_token=False, global_pool='avg', fc_norm=False)
KINDS = {
  'gap, headless': (
    'vit_base_patch16_224',
    GAP | HEADLESS | dict(act_layer='gelu_tanh'),
  ),
  'map': ('vit_base_patch16_siglip_224', {}),
}
OPTIONS = {
  'token': ('vit_base_patch16_224', {}),
  'mean, then norm': ('vit_base_patch16_224', dict(global_pool='avg')),
  'distilled': ('deit_base_distilled_patch16_224', {}),
  'DeiT-III': ('deit3_base_patch16_224', {}),
  'registers': ('vit_small_patch14_reg4_dinov2', {}),
  'registers with positions': (
    'vit_base_patch16_224',
    dict(reg_tokens=2, no_embed_class=False),
  ),
  'registers, gap': ('vit_base_patch16_224', GAP | dict(reg_tokens=2)),
  'qk norm': ('vit_base_patch16_224', dict(qk_norm=True)),
  'gated': ('vit_giant_patch14_dinov2', dict(depth=2)),
  'CLIP': ('vit_base_patch16_clip_224', {}),
}


def loaded(path, **keys):
  return load_pretrained(path, num_heads=HEADS, **keys)


@pytest.mark.slow
@pytest.mark.parametrize('kind', [*KINDS, *further(*OPTIONS)])
def test_logits_and_blocks_equal_timm(tmp_path, kind):
  """Weights are read from timm, and written into the same architecture.

  Written files contain their description.
  """
  name, changes = (KINDS | OPTIONS)[kind]
  reference = timm_vit(name, **changes)
  model_args = {'num_heads': HEADS} | {
    k: v for k, v in changes.items() if k == 'act_layer'
  }
  stored = dict(mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=0.8)
  stored['label_names'] = list('abcdefg')
  config = dict(architecture=name, model_args=model_args, pretrained_cfg=stored)
  path = timm_file(tmp_path, reference, config)
  same_results(path, reference, (SIZE, SIZE), limit=1e-5)
  description = pretrained.find(path).description
  names = description.class_names
  assert not description.num_classes or names == tuple('abcdefg')
  back = str(tmp_path / 'back.safetensors')
  pretrained.save(back, load_pretrained(path).params, description)
  again = pretrained.find(back).description
  for key in ('model', 'preprocess', 'class_names', 'position_resize'):
    assert getattr(again, key) == getattr(description, key)
  tensors = safetensors.numpy.load_file(back)
  state = {k: torch.from_numpy(v) for k, v in tensors.items()}
  timm_vit(name, **changes).load_state_dict(state, strict=True)
  for key, array in references.state(reference).items():
    np.testing.assert_array_equal(tensors[key], array)


@pytest.mark.slow
def test_num_classes_initializes_a_new_head(tmp_path, caplog):
  """It is zero; the log says so."""
  caplog.set_level('INFO', 'vit_jax')
  reference = timm_vit()
  path = timm_file(tmp_path, reference)
  model, params = loaded(path, num_classes=3)
  assert model.num_classes == 3
  assert params['head']['kernel'].shape == (references.WIDTH, 3)
  assert not np.any(params['head']['kernel'])
  assert 'head for 3 classes; fresh: head/bias, head/kernel' in caplog.text
  model, params = loaded(path, num_classes=0)
  assert 'head' not in params
  reference.reset_classifier(0)
  same_results((model, params), reference, (SIZE, SIZE))


@pytest.mark.slow
def test_finetuning_adopts_the_architecture(tmp_path):
  """Keys that the config leaves open are read from the weights."""
  reference = timm_vit(class_token=False, global_pool='avg')
  source = pretrained.find(timm_file(tmp_path, reference))
  config = minimal_config.completed(
    image_size=SIZE, **{f'model.{name}': None for name in NAMES}
  )
  adopted = architecture.adopt(config, source)
  assert adopted.model.width == 32 and adopted.model.gelu == 'exact'
  assert adopted.model.fc_norm and adopted.model.pool == 'gap'
  experiment = Experiment.build(adopted, jax.devices()[:1])
  with jax.set_mesh(experiment.mesh):
    moved = transfer.transfer(source, experiment, None)
  np.testing.assert_array_equal(
    moved['fc_norm']['scale'], references.state(reference)['fc_norm.weight']
  )


@pytest.mark.slow
@pytest.mark.parametrize('pool', ['avgmax', *further('avg', 'max')])
def test_patches_are_pooled_after_the_norm(tmp_path, pool):
  """With a class token that is not used."""
  reference = timm_vit(global_pool=pool, fc_norm=False)
  config = dict(
    architecture='x', model_args={'num_heads': HEADS}, global_pool=pool
  )
  path = timm_file(tmp_path, reference, config)
  model = load_pretrained(path).model
  assert model.class_token and model.config.prefix == 1
  same_results(path, reference, (SIZE, SIZE), mean=NONE[0], std=NONE[1])


@pytest.mark.parametrize('mode', ['center', 'squash'])
def test_preprocessing_equals_timm(mode):
  """The settings of a config give the pixels of timm's own transform."""
  rng = np.random.default_rng(0)
  pixels = rng.integers(0, 256, (61, 83, 3), np.uint8)
  make = references.timm.data.create_transform
  for share in (0.9, 0.875, 1.0):
    section = timm_models.preprocess((SIZE, SIZE), share, 'bicubic', mode)
    ours = EvalTransform((SIZE, SIZE), **section).pixels(pixels)
    there = make(
      (3, SIZE, SIZE),
      interpolation='bicubic',
      mean=(0,) * 3,
      std=(1,) * 3,
      crop_pct=share,
      crop_mode=mode,
    )
    theirs = there(Image.fromarray(pixels)).numpy().transpose(1, 2, 0) * 255
    np.testing.assert_array_equal(ours, np.round(theirs))


@pytest.mark.slow
def test_clip_without_a_config(tmp_path):
  """Its statistics are those of the family, and are folded into the bias."""
  reference = timm_vit('vit_base_patch16_clip_quickgelu_224')
  name = 'vit_clip_quickgelu.safetensors'
  path = timm_file(tmp_path, reference, name=name)
  model, params = load_pretrained(path, num_heads=HEADS)
  assert model.gelu == 'quick' and model.pre_norm
  same_results((model, params), reference, (SIZE, SIZE), CLIP)
  back = str(tmp_path / 'back.safetensors')
  source = pretrained.find(path).changed(num_heads=HEADS)
  pretrained.save(back, params, source.description)
  written = safetensors.numpy.load_file(back)
  original = references.state(reference)
  assert written.keys() == original.keys()
  for key, array in original.items():
    np.testing.assert_allclose(written[key], array, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize('form', ['', 'big_vision:'])
def test_npz_logs_what_it_cannot_store(tmp_path, caplog, form):
  """GELU and ε other than the official ones are logged."""
  source = pretrained.find(timm_file(tmp_path, timm_vit()))
  params = load_pretrained(source.path).params
  path = f'{form}{tmp_path}/a.npz'
  description = source.description
  pretrained.save(path, params, description)
  assert "'gelu': 'tanh'" in caplog.text and "'gelu': 'exact'" in caplog.text
  again = pretrained.find(path).description
  assert again.position_resize == description.position_resize
  caplog.clear()
  pretrained.save(path, params, description.with_model(gelu='tanh'))
  assert 'gelu' not in caplog.text


@pytest.mark.slow
def test_preset_sets_mean_and_standard_deviation(tmp_path, caplog):
  """Logits equal timm's for pixels normalized that way."""
  reference = timm_vit()
  config = dict(architecture='vit_base_patch16_224')
  config['model_args'] = {'num_heads': HEADS}
  path = timm_file(tmp_path, reference, config)
  found = pretrained.find(path)
  for name in (None, 'timm', 'mae'):
    source = inputs.with_preset(found, name)
    params = source.load(source.abstract_params())
    statistics = presets.PRESETS[name or 'timm'].normalization
    same_results((source.model(), params), reference, (SIZE, SIZE), statistics)
  ours = dataclasses.replace(source.description, statistics=None)
  ours = pretrained.Pretrained('ours', ours, found.load)
  kept = inputs.with_preset(ours, 'dino')
  assert kept.load is found.load and 'resizing' in caplog.text
  assert kept.description.preprocess['resize'] == 'torchvision'
  for weights in (found, kept):
    config = overrides.apply(
      {'preprocess': weights.description.preprocess_section},
      ['--config.preprocess.interpolation=area'],
    )
    description = results.describe(weights, config)
    assert description['mean'] == [0.5] * 3
    assert description['resize'] == 'torchvision'
    assert 'interpolation=area' in results.line(description)
