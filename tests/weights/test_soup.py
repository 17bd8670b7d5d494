"""Tests of averages of weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_vit

from vit_jax import convert, load_pretrained, save_pretrained
from vit_jax.arrays import sharding, tree
from vit_jax.errors import UserError
from vit_jax.models.vit import Model
from vit_jax.weights import pretrained
from vit_jax.weights.contract import Pretrained

NAMES = ['ant', 'bee', 'cat']
ON_A_MESH = sharding.replicated(sharding.make_mesh(jax.local_devices()[:1]))


def in_memory(path, **model):
  """Returns the description of weights that are never read."""
  about = dict(
    format=3,
    model=dict(name='vit', **(tiny_vit.SIZES | model)),
    objective=dict(name='supervised'),
    preprocess=dict(resize='squash'),
    num_classes=3,
    image_size=[8, 8],
    class_names=NAMES,
  )
  return Pretrained(path, about, load=lambda abstract: abstract)


def saved(path, number, **changes):
  """Writes random parameters times a number; returns the path."""
  params = tiny_vit.noise_params(Model(3, **tiny_vit.SIZES), (8, 8))
  params = jax.tree.map(lambda leaf: number * leaf, params)
  params = jax.device_put(params, ON_A_MESH)
  save_pretrained(str(path), params, in_memory('').about | changes)
  return str(path)


@pytest.mark.parametrize(
  'model, about, words',
  [
    (dict(pixels='imagenet'), {}, 'mean and std of pixels'),
    (dict(mean=(0.5, 0.5, 0.4), std=(0.5,) * 3), {}, 'mean and std of pixels'),
    (dict(mean=(0.5,) * 3, std=(0.5, 0.2, 0.5)), {}, 'mean and std of pixels'),
    ({}, dict(image_size=[12, 12]), r'image_size is \(12, 12\)'),
    (dict(depth=2), {}, 'model.depth is 2, not 3'),
    (dict(gelu='exact'), {}, "model.gelu is 'exact', not 'tanh'"),
    ({}, dict(num_classes=2), 'num_classes is 2, not 3'),
    ({}, dict(class_names=['ant', 'cat', 'bee']), "1 is 'cat', not 'bee'"),
  ],
)
def test_other_weights_are_refused(model, about, words):
  """The message contains both paths and the first difference."""
  plain, other = in_memory('plain'), in_memory('other', **model)
  other = dataclasses.replace(other, about=other.about | about)
  pretrained.average([other, dataclasses.replace(other, path='same')])
  with pytest.raises(UserError, match=f'other .*plain: .*{words}'):
    pretrained.average([plain, other])


def test_the_mean_of_three_weights():
  """Averages and extra state of the weights are not averaged."""

  def weights(value):
    def load(abstract):
      return {'w': jnp.full(abstract['w'], value, device=ON_A_MESH)}

    return dataclasses.replace(
      in_memory(str(value)), load=load, load_average=load, load_extra=load
    )

  mixed = pretrained.average([weights(1.0), weights(2.0), weights(6.0)])
  np.testing.assert_array_equal(mixed.load({'w': (2, 3)})['w'], 3.0)
  assert mixed.load_average is None and mixed.load_extra is None


@pytest.mark.slow
def test_the_mean_of_several_formats(tmp_path):
  """All parameters are averaged; the description is that of the first."""
  preprocess = dict(resize='central', central_fraction=0.5)
  paths = [
    saved(tmp_path / 'a.npz', 1.0, preprocess=preprocess),
    saved(tmp_path / 'b.safetensors', 2.0),
    saved(tmp_path / 'c', 4.5),
  ]
  target = str(tmp_path / 'mean.npz')
  convert.run(paths[0], target, averaged_with=paths[1:])
  about = pretrained.find(target).about
  assert about['class_names'] == NAMES
  assert about['preprocess']['central_fraction'] == 0.5
  single, mean = (load_pretrained(path)[1] for path in (paths[0], target))
  for path, leaf in tree.flatten(mean).items():
    expected = 2.5 * tree.flatten(single)[path]
    np.testing.assert_allclose(
      leaf, expected, rtol=1e-5, atol=1e-6, err_msg=path
    )


def test_sums_that_overflow_are_refused(tmp_path):
  """The message contains the paths and the leaf."""
  source = pretrained.find(saved(tmp_path / 'a.npz', 1.0))

  def load(abstract):
    params = tree.flatten(source.load(abstract))
    bias = params['head/bias']
    large = np.full(bias.shape, 2e38, np.float32)
    params['head/bias'] = jax.device_put(large, bias.sharding)
    return tree.unflatten(params)

  large = dataclasses.replace(source, path='large', load=load)
  abstract = source.abstract_params(sharding.make_mesh(jax.devices()[:1]))
  pretrained.average([source, large]).load(abstract)
  with pytest.raises(UserError, match=r'sum of large, large .*head/bias \(3'):
    pretrained.average([large, large]).load(abstract)
