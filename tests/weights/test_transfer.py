"""Tests of the transfer of weights to another model in fine-tuning."""

import dataclasses

import jax
import numpy as np
import pytest
import scipy.ndimage
import tiny_vit
import torch
from minimal_config import completed

from benchmarks import peers
from tests.faults.counts import further
from vit_jax.arrays import sharding, tree
from vit_jax.arrays.pixels import NONE
from vit_jax.data.contract import Source
from vit_jax.errors import UserError
from vit_jax.models.vit import Model
from vit_jax.training.experiment import Experiment
from vit_jax.weights import (
  architecture,
  contract,
  pretrained,
  resizing,
  transfer,
)
from vit_jax.weights.description import Description

SIZES = dict(patch_size=4, width=16, depth=2, mlp_dim=24, num_heads=2)
ABOUT = {
  'model': {'name': 'vit', 'dtype': 'float32', **SIZES},
  'objective': {'name': 'supervised'},
  'num_classes': 7,
}


def weights(image_size=(8, 8), **changes):
  """Returns a source with random numbers for images of that size."""
  about = ABOUT | {'model': ABOUT['model'] | changes}
  description = Description(**about, image_size=image_size)
  model = Model(7, **SIZES, dtype='float32', **changes)
  params = tiny_vit.noise_params(model, (image_size[0], image_size[-1]))

  return described(description, params), params


def described(description, params):
  """Returns a source of parameters."""

  def load(abstract):
    return jax.tree.map(sharding.place, jax.device_get(params), abstract)

  return contract.Pretrained('here', description, load)


def experiment(image_size=(8, 8), others=None, **changes):
  """Returns a run with changes to the model, and to other sections."""
  channels = changes.get('channels', 3)
  config = completed(
    **{f'model.{k}': v for k, v in (SIZES | changes).items()},
    **{f'{k}.channels': channels for k in ('augment', 'preprocess')},
    **{'model.dtype': 'float32', 'image_size': image_size} | (others or {}),
  )
  return Experiment.build(config, jax.devices()[:1])


class Fruits(Source):
  """A source of which only the classes are used."""

  name = 'fruits'

  def __init__(self, class_names=()):
    self.class_names, self.num_classes = [*class_names], len(class_names)


def moved_to(target, source):
  """Returns the parameters of a source for a fine-tuning."""
  with jax.set_mesh(target.mesh):
    return transfer.transfer(source, target, 'aligned')


def started(target, source, class_names=()):
  """Returns the parameters of a training that starts from a source."""
  with jax.set_mesh(target.mesh):
    return transfer.start(source, target, 'aligned', Fruits(class_names))


def zoomed(params, old, new):
  """Zooms the position embedding to another grid as the authors' code does."""
  embedding = np.asarray(params['position']['embedding'])
  grid = embedding[0, 1:].reshape(*old, -1)
  factors = (new[0] / old[0], new[1] / old[1], 1)
  grid = scipy.ndimage.zoom(grid, factors, order=1)
  assert grid.shape[:2] == new
  grid = grid.reshape(1, -1, embedding.shape[-1])
  return np.concatenate([embedding[:, :1], grid], axis=1)


@pytest.mark.parametrize(
  'old, new',
  [((8, 8), (12, 16)), ((16, 8), (8, 16)), ((8, 12), (8, 12))],
)
def test_finetuning_loads_all_but_the_head(old, new):
  """Parameters are the same bit for bit; the head is initialized."""
  source, params = weights(old)
  target = experiment(new)
  result = tree.flatten(moved_to(target, source))
  assert tree.shapes(result) == tree.shapes(target.abstract_state.params)
  positions = result.pop('position/embedding')
  patches = [tuple(side // 4 for side in size) for size in (old, new)]
  np.testing.assert_allclose(
    positions, zoomed(params, *patches), rtol=1e-5, atol=1e-6
  )
  head = {key: result.pop(key) for key in ('head/kernel', 'head/bias')}
  assert not any(np.any(leaf) for leaf in head.values())
  for path, leaf in result.items():
    np.testing.assert_array_equal(leaf, tree.flatten(params)[path], path)


@pytest.mark.slow
@pytest.mark.parametrize(
  'before, after',
  [('symmetric', 'imagenet'), *further(['imagenet', 'symmetric'])],
)
def test_fine_tuning_converts_units_of_pixels(before, after):
  """The function of an image stays the same if `model.pixels` changes."""
  source, params = weights(pixels=before)
  moved = moved_to(experiment(pixels=after), source)
  images = np.random.default_rng(1).uniform(-1, 1, (2, 8, 8, 3))
  images = np.float32(images)
  ours, expected = (
    Model(0, **SIZES, dtype='float32', pixels=pixels).apply(
      {'params': params}, images, method='predict'
    )['features']
    for pixels, params in ((after, moved), (before, params))
  )
  np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_initialized_parts_depend_on_the_seed():
  """Pre-logits of another fine-tuning are not loaded."""
  source, params = weights(pre_logits=True)
  target = experiment(pre_logits=True)
  result = moved_to(target, source)
  with jax.set_mesh(target.mesh):
    key = sharding.random_key(target.config.seed, target.mesh)
    fresh = jax.jit(target.init_state)(key).params
  for name in ('pre_logits', 'head'):
    jax.tree.map(np.testing.assert_array_equal, result[name], fresh[name])
  kernel = np.asarray(params['pre_logits']['kernel'])
  assert not np.allclose(result['pre_logits']['kernel'], kernel)


@pytest.mark.slow
def test_init_from_loads_all_that_fits(caplog):
  """The head is loaded, too; leaves of another shape are logged."""
  source, params = weights()
  result = started(experiment(others=dict(num_classes=7)), source)
  jax.tree.map(np.testing.assert_array_equal, result, params)
  assert 'not taken over' not in caplog.text
  other = experiment(mlp_dim=32)  # and with another number of classes
  result = tree.flatten(started(other, source))
  assert 'fc1/kernel (2, 16, 24) (in the model: (2, 16, 32))' in caplog.text
  assert not np.any(result['head/kernel'])
  for path, leaf in tree.flatten(params).items():
    if 'mlp' not in path and 'head' not in path:
      np.testing.assert_array_equal(result[path], leaf, path)


@pytest.mark.parametrize('objective', ['supervised', 'linear_probe'])
def test_heads_are_taken_over_by_the_names_of_classes(objective, caplog):
  """Their outputs are in the order of the data; other names are refused."""
  section, classes = dict(name=objective), 7
  if objective == 'linear_probe':
    section, classes = section | dict(num_classes=7), 0
  target = experiment(others=dict(num_classes=classes, objective=section))
  shapes = target.abstract_state.params
  params = jax.tree.map(lambda s: np.random.normal(size=s.shape), shapes)
  names = [*'abcdefg']
  about = ABOUT | {'objective': section, 'num_classes': classes}
  about |= {'class_names': tuple(names)}
  source = described(Description(**about, image_size=(8, 8)), params)
  for given, order in (
    (names, range(7)),
    ([*'cab'], [2, 0, 1, 3, 4, 5, 6]),
    ([f'class {i}' for i in range(7)], range(7)),
  ):
    result = tree.flatten(started(target, source, given))
    expected = tree.flatten(params)
    assert result.keys() == expected.keys()
    for path, leaf in result.items():
      is_head = path.startswith('head/')
      wanted = expected[path][..., [*order]] if is_head else expected[path]
      np.testing.assert_allclose(leaf, wanted, rtol=1e-6, err_msg=path)
    assert ('fruits' in caplog.text) == (given != names)
  assert 'differ' not in caplog.text.replace('order of the classes differs', '')
  with pytest.raises(UserError, match="fruits.*here.*'x'.*vit_jax.finetune"):
    started(target, source, 'abcdefx')


@pytest.mark.parametrize(
  'keys, reported',
  [
    (dict(gelu='quick', norm_eps=1e-3), ['gelu', 'norm_eps']),
    (dict(pool='gap'), ['pool']),
    (dict(fc_norm=True), ['fc_norm']),
    (dict(layer_scale=1e-4), ['layer_scale']),
    (dict(drop_path=0.1, dropout=0.1, pixels='imagenet'), []),
  ],
)
def test_keys_that_differ_from_the_weights_are_listed(keys, reported, caplog):
  """`train` keeps those of the config."""
  started(experiment(**keys), weights()[0])
  listed = [x for x in caplog.text.splitlines() if 'in the weights' in x]
  assert [line.split(':')[0] for line in listed] == [
    f'  model.{key}' for key in reported
  ]
  # Parameters of the weights replace those that a key initializes.
  caplog.clear()
  started(experiment(layer_scale=1e-4), weights(layer_scale=1e-5)[0])
  assert 'in the weights' not in caplog.text


OPEN = {f'model.{key}': None for key in SIZES}


def test_fine_tuning_determines_the_model_by_the_weights(caplog):
  """Sizes that contradict them are refused, and other keys are listed."""
  source, _ = weights(norm_eps=1e-3)
  for key in ('patch_size', 'width'):
    with pytest.raises(UserError) as error:
      architecture.adopt(completed(**OPEN | {f'model.{key}': 6}), source)
    assert f'{key}: {SIZES[key]} in the weights, 6' in str(error.value)
    assert sum(other in str(error.value) for other in SIZES) == 1
  adopted = architecture.adopt(
    completed(**OPEN, **{'model.gelu': 'quick'}), source
  )
  assert (adopted.model.gelu, adopted.model.norm_eps) == ('tanh', 1e-3)
  assert "model.gelu: 'tanh' in the weights, 'quick' in the" in caplog.text
  assert 'norm_eps' not in caplog.text  # the config has the default


@pytest.mark.parametrize(
  'given, remainder, used',
  [
    ((18, 17), 'error', (16, 16)),
    ((18, 17), 'drop', (18, 17)),
    ((16, 16), 'error', (16, 16)),
    ((8, 3), 'error', (8, 3)),  # smaller than a patch, and refused
  ],
)
def test_images_of_a_fine_tuning_are_whole_patches(
  given, remainder, used, caplog
):
  caplog.set_level('INFO')
  config = completed(**OPEN, image_size=given, **{'model.remainder': remainder})
  adopted = architecture.adopt(config, weights()[0])
  assert tuple(adopted.image_size) == used
  assert (f'{used} instead of {given}' in caplog.text) == (given != used)


def test_a_plan_reads_missing_sizes_from_the_weights(tmp_path):
  """A model that the config specifies is not changed."""
  path = str(tmp_path / 'tiny.npz')
  tiny_vit.save_classifier(path)
  config = completed(**OPEN, init_from=path, image_size=(40, 32))
  found = architecture.complete(config)
  assert (found.model.patch_size, found.image_size) == (16, (32, 32))
  specified = completed(init_from=path)
  assert architecture.complete(specified) is specified
  with pytest.raises(UserError, match='lacks patch_size'):
    architecture.complete(completed(**OPEN))


@pytest.mark.slow
def test_weights_that_do_not_fit_are_refused():
  """Messages name leaves and shapes, or both numbers of channels."""
  source, _ = weights()
  words = r'mlp/fc1/bias: \[2, 24\] in the file, \[2, 32\] in the model'
  with pytest.raises(UserError, match=words):
    moved_to(experiment(mlp_dim=32), source)
  multispectral, _ = weights(channels=5)
  with pytest.raises(UserError, match=r'model\.channels is 4.* for 5'):
    moved_to(experiment(channels=4), multispectral)
  other = {'strange': jax.numpy.zeros(3)}
  empty = dataclasses.replace(source, load=lambda abstract: other)
  with pytest.raises(UserError, match=r'of here \(strange'):
    started(experiment(width=32, mlp_dim=48, pool='gap'), empty)


@pytest.mark.parametrize('channels', [1, 2, 4, 5, 13])
def test_channels_are_adapted_like_timm(channels):
  """The kernel is that of timm's `adapt_input_conv`."""
  source, params = weights()
  moved = moved_to(experiment(channels=channels), source)
  kernel = np.array(params['embedding']['kernel']).transpose(3, 2, 0, 1)
  peers.import_timm()
  from timm.models._manipulate import adapt_input_conv

  expected = adapt_input_conv(channels, torch.tensor(kernel))
  np.testing.assert_allclose(
    moved['embedding']['kernel'],
    expected.numpy().transpose(2, 3, 1, 0),
    rtol=1e-6,
  )
  np.testing.assert_array_equal(
    moved['embedding']['bias'], params['embedding']['bias']
  )


OWN = dict(mean=(0.3, 0.2, 0.1), std=(0.1, 0.2, 0.3))


@pytest.mark.slow
@pytest.mark.parametrize(
  'before, channels',
  [
    (OWN, 4),
    *further([dict(pixels='imagenet'), 3], [dict(pixels='imagenet'), 4]),
  ],
)
def test_normalized_images_get_the_kernel_of_normalized_images(
  before, channels
):
  """Both inputs have the mean 0 and the standard deviation 1."""
  source, params = weights(**before)
  statistics = dict(mean=(0.01,) * channels, std=(0.02,) * channels)
  moved = moved_to(experiment(channels=channels, **statistics), source)
  kernel = np.array(params['embedding']['kernel'])
  np.testing.assert_allclose(
    moved['embedding']['kernel'],
    kernel[:, :, np.arange(channels) % 3] * (3 / channels),
    rtol=1e-4,
    atol=1e-5,
  )


def test_other_projects_have_rgb_files_only():
  """The message names the channels and the bits."""
  about = ABOUT | {'model': ABOUT['model'] | {'channels': 5}}
  description = Description(**about, image_size=(8, 8), preprocess={'bits': 16})
  for path in ('x.npz', 'x.safetensors', 'big_vision:x.npz', 'huggingface:x'):
    with pytest.raises(UserError, match=r'RGB.* 5 channel.* 16 bits'):
      pretrained.save(path, {}, description)


@pytest.mark.slow
def test_resized_weights_can_be_normalized_by_other_statistics():
  """All sets of weights have them, as in `evaluate` with both flags."""
  source, _ = weights()
  description = dataclasses.replace(source.description, statistics=NONE)
  source = dataclasses.replace(source, description=description)
  mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
  resized = resizing.resized(source, (12, 12))
  changed = resizing.renormalized(resized, mean, std)
  assert changed.image_size == (12, 12)
  assert changed.description.statistics == (mean, std)
  mesh = sharding.make_mesh(jax.devices()[:1])
  params = changed.load(changed.abstract_params(mesh))
  before = resized.load(resized.abstract_params(mesh))
  assert not np.allclose(
    params['embedding']['kernel'], before['embedding']['kernel']
  )
  jax.tree.map(
    np.testing.assert_array_equal, changed.weights(mesh)['params'], params
  )
