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

from tests.faults.counts import further, slow
from vit_jax import load_pretrained
from vit_jax.cli import inputs, results
from vit_jax.config import overrides
from vit_jax.data.augment import presets
from vit_jax.data.augment.transforms import EvalTransform
from vit_jax.models.contract import Patches
from vit_jax.models.vit import SIZE_KEYS
from vit_jax.training.experiment import Experiment
from vit_jax.weights import architecture, pretrained, transfer
from vit_jax.weights.formats import timm_models
from vit_jax.weights.patch_embedding import CLIP

HEADS_GIVEN = dict(model_args=dict(num_heads=HEADS))
VIT = 'vit_base_patch16_224'
POOLED = dict(global_pool='avgmax')
GAP = dict(class_token=False, global_pool='avg', fc_norm=False)


# (architecture, changes of the model, content of config.json)
MODELS = [
  [
    VIT,
    GAP | dict(num_classes=0, act_layer='gelu_tanh'),
    dict(model_args=dict(num_heads=HEADS, act_layer='gelu_tanh')),
  ],
  ['vit_base_patch16_siglip_224', {}, HEADS_GIVEN],
  [VIT, dict(qk_norm=True), {}],  # whose scales show the channels of a head
  # After the norm, with a class token that is not used
  [VIT, POOLED | dict(fc_norm=False), HEADS_GIVEN | POOLED],
]
FURTHER = [
  [VIT, dict(global_pool='avg'), HEADS_GIVEN],  # the mean before the norm
  [VIT, dict(reg_tokens=2, no_embed_class=False), HEADS_GIVEN],
  [VIT, GAP | dict(reg_tokens=2), HEADS_GIVEN],
  ['deit_base_distilled_patch16_224', {}, HEADS_GIVEN],
  ['deit3_base_patch16_224', {}, HEADS_GIVEN],
  ['vit_small_patch14_reg4_dinov2', {}, HEADS_GIVEN],
  ['vit_giant_patch14_dinov2', dict(depth=2), HEADS_GIVEN],  # gated
]


def loaded(path, **keys):
  return load_pretrained(path, num_heads=HEADS, **keys)


@pytest.mark.slow
@pytest.mark.parametrize('name, changes, config', MODELS + further(*FURTHER))
def test_logits_and_blocks_equal_timm(tmp_path, name, changes, config):
  """Weights are read from timm, and written into the same architecture.

  Written files contain their description.
  """
  reference = timm_vit(name, **changes)
  stored = dict(mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=0.8)
  stored['label_names'] = list('abcdefg')
  config = config | dict(architecture=name, pretrained_cfg=stored)
  path = timm_file(tmp_path, reference, config)
  same_results(path, reference, (SIZE, SIZE), limit=1e-5)
  description = pretrained.find(path).description
  assert description.built_model.num_heads == HEADS
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
  head = loaded(path, num_classes=3).params['head']
  assert head['kernel'].shape == (references.WIDTH, 3)
  assert not np.any(head['kernel'])
  assert 'head for 3 classes; fresh: head/bias, head/kernel' in caplog.text
  headless = loaded(path, num_classes=0)
  assert 'head' not in headless.params
  reference.reset_classifier(0)
  same_results(headless, reference, (SIZE, SIZE))


@pytest.mark.slow
def test_finetuning_adopts_the_architecture(tmp_path):
  """Keys that the config leaves open are read from the weights."""
  reference = timm_vit(class_token=False, global_pool='avg')
  source = pretrained.find(timm_file(tmp_path, reference))
  config = minimal_config.completed(
    image_size=SIZE, **{f'model.{name}': None for name in SIZE_KEYS}
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
  same_results(path, reference, (SIZE, SIZE), CLIP, num_heads=HEADS)
  back = str(tmp_path / 'back.safetensors')
  description = pretrained.find(path).changed(num_heads=HEADS).description
  assert description.built_model.gelu == 'quick'
  pretrained.save(back, loaded(path).params, description)
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
  config = HEADS_GIVEN | dict(architecture=VIT)
  found = pretrained.find(timm_file(tmp_path, reference, config))
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


# Every row of the table of architectures, as a small model

# One row for each option; `--ci` adds those in `SLOW`, `--all` all rows.
FAST = ('vit_small_patch16_dinov3', 'eva02_tiny_patch14_336', 'test_vit3')
SLOW = ('vit_pe_lang_large_patch14_448', 'vit_base_patch16_radio_v3')
REST = [
  name
  for name, row in timm_models.table().items()
  if '.' not in name
  and 'Swin' not in row.block
  and row.block not in timm_models.REFUSED
  and name not in FAST + SLOW
]


def small(name, num_heads=4):
  """Returns timm's model of an architecture with few and small layers."""
  sizes = dict(depth=2, embed_dim=64, num_heads=num_heads, num_classes=7)
  if 'sapiens2' in name:  # keys and values of two heads in the second block
    sizes['num_kv_heads'] = (4, 2)
  if 'giant_patch14' in name:  # an even number of hidden units
    sizes['mlp_ratio'] = 6
  create = references.timm.create_model
  with torch.device('meta'):
    patch, _ = create(name, **sizes).patch_embed.patch_size
  torch.manual_seed(0)
  model = create(name, img_size=4 * patch, **sizes)
  return references.noisy(model), patch


def written(folder, theirs, name, num_heads=4):
  """Writes a model with a config.json; returns the path."""
  config = dict(
    architecture=name,
    model_args=dict(num_heads=num_heads),
    global_pool=theirs.global_pool,
    pretrained_cfg=dict(mean=(0.5,) * 3, std=(0.5,) * 3),
  )
  return timm_file(folder, theirs, config)


@pytest.mark.parametrize('name', [*FAST, *slow(*SLOW), *further(*REST)])
def test_architectures_equal_timm(tmp_path, name):
  """At the size of the weights, and at a smaller one that is not square."""
  theirs, patch = small(name)
  path = written(tmp_path, theirs, name)
  # Ten prefix tokens and 2 x 3 patches have as many tokens as 4 x 4 patches.
  columns = 4 if 'radio_v4' in name else 3
  own, other = (4 * patch, 4 * patch), (2 * patch, columns * patch)
  references.same_results(path, theirs, own, limit=1e-5)
  theirs.set_input_size(img_size=other)
  references.same_results(path, theirs, other, limit=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
  'name',
  [
    'vit_small_patch16_rope_mixed_224',
    *further('vit_small_patch16_dinov3', 'vit_small_patch16_rope_ape_224'),
  ],
)
def test_kept_patches_have_their_own_rotations(tmp_path, name):
  """As in timm, whose dropped patches are those that are not kept here."""
  theirs, patch = small(name)
  index = np.array([[1, 3, 4, 11], [0, 2, 7, 15]])

  def keep(x):
    kept = torch.from_numpy(index)
    prefix, patches = x.split([theirs.num_prefix_tokens, 16], dim=1)
    patches = patches[torch.arange(2)[:, None], kept]
    return torch.cat([prefix, patches], dim=1), kept

  theirs.patch_drop = keep
  path = written(tmp_path, theirs, name)
  images = references.images(4 * patch, 2)
  pixels = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
  with torch.no_grad():
    expected = theirs.forward_features(pixels).numpy()
  model, params = load_pretrained(path)

  def encode(model, images):
    tokens = model.embed(images)[np.arange(2)[:, None], index]
    return model.encode(tokens, None, Patches((4, 4), index))

  run = jax.jit(lambda params: model.apply(params, images, method=encode))
  found = run({'params': params})
  difference = np.abs(found - expected).max()
  assert difference < 1e-5 * np.abs(expected).max()


@pytest.mark.slow
@pytest.mark.parametrize(
  'name', ['vit_small_patch16_dinov3', *further('eva02_base_patch14_224')]
)
def test_kernels_equal_xla(tmp_path, name):
  """TPU kernels, interpreted, differ only by the order of sums.

  The models have five prefix tokens, or one.
  """
  theirs, patch = small(name, num_heads=2)  # of 32 channels, as kernels require
  path = written(tmp_path, theirs, name, num_heads=2)
  model, params = load_pretrained(path, attention='kernel')
  assert model.kernels is not None and model.reference.kernels is None
  x = references.images(4 * patch)
  ours, theirs = (
    np.asarray(references.jitted(each)(params, x))
    for each in (model, model.reference)
  )
  assert np.ptp(theirs) > 0.1
  assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()
