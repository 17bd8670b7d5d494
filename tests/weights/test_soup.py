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


def saved(path, number, changes=None, classes=3, **model):
  """Writes weights of random parameters; returns the path."""
  built = Model(classes, **tiny_vit.SIZES | model)
  params = tiny_vit.noise_params(built, (8, 8))
  params = jax.tree.map(lambda leaf: number * leaf, params)
  first = str(path) + '.first.npz'
  save_pretrained(first, params, {})
  about = pretrained.find(first).about | {'class_names': NAMES[:classes]}
  for key, value in (changes or {}).items():
    about[key] = about[key] | value if isinstance(value, dict) else value
  save_pretrained(first, params, about)
  convert.run(first, str(path))
  return str(path)


def in_memory(path, **model):
  """Returns the description of weights that are never read."""
  about = dict(
    model=dict(name='vit', **tiny_vit.SIZES, **model),
    objective=dict(name='supervised'),
    preprocess=dict(resize='squash'),
    num_classes=3,
    image_size=[8, 8],
    class_names=NAMES,
  )
  return Pretrained(path, about, load=lambda abstract: abstract)


@pytest.mark.parametrize(
  'units',
  [
    dict(pixels='imagenet'),
    dict(mean=(0.5, 0.5, 0.4), std=(0.5, 0.5, 0.5)),
    dict(mean=(0.5, 0.5, 0.5), std=(0.5, 0.2, 0.5)),
  ],
)
def test_weights_for_other_units_of_pixels_are_refused(units):
  """The shapes of all parameters are equal."""
  plain, other = in_memory('plain'), in_memory('other', **units)
  pretrained.average([other, in_memory('same', **units)])
  for pair in ([plain, other], [other, plain]):
    with pytest.raises(UserError, match='mean and std of pixels'):
      pretrained.average(pair)


def test_the_mean_of_three_weights():
  """Averages and extra state of the weights are not averaged."""
  on_a_mesh = sharding.replicated(sharding.make_mesh(jax.local_devices()[:1]))

  def weights(value):
    def load(abstract):
      return {'w': jnp.full(abstract['w'], value, device=on_a_mesh)}

    return dataclasses.replace(
      in_memory(str(value)), load=load, load_average=load, load_extra=load
    )

  mixed = pretrained.average([weights(1.0), weights(2.0), weights(6.0)])
  np.testing.assert_array_equal(mixed.load({'w': (2, 3)})['w'], 3.0)
  assert mixed.load_average is None and mixed.load_extra is None


@pytest.mark.slow
def test_the_mean_of_several_formats(tmp_path):
  """All parameters are averaged; the description is that of the first."""
  preprocess = {'preprocess': {'resize': 'central', 'central_fraction': 0.5}}
  paths = [
    saved(tmp_path / 'a.npz', 1.0, preprocess),
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
  path = str(tmp_path / 'a.npz')
  built = Model(3, **tiny_vit.SIZES)
  save_pretrained(path, tiny_vit.noise_params(built, (8, 8)), {})
  source = pretrained.find(path)

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


@pytest.mark.slow
def test_other_architectures_are_refused(tmp_path):
  """The message contains both paths and the first difference."""
  first = saved(tmp_path / 'a.npz', 1.0)
  renamed = {'class_names': ['ant', 'cat', 'bee']}
  cases = {
    'model.depth is 2, not 3': saved(tmp_path / 'b.npz', 1.0, depth=2),
    "model.gelu is 'exact', not 'tanh'": saved(
      tmp_path / 'c', 1.0, {'model': {'gelu': 'exact'}}
    ),
    'num_classes is 2, not 3': saved(tmp_path / 'd.npz', 1.0, classes=2),
    "class 1 is 'cat', not 'bee'": saved(tmp_path / 'e.npz', 1.0, renamed),
  }
  for message, path in cases.items():
    with pytest.raises(UserError, match=f'{path} .*{first}: .*{message}'):
      convert.run(first, str(tmp_path / 'mean.npz'), averaged_with=[path])
  assert not (tmp_path / 'mean.npz').exists()


def test_weights_for_another_image_size_are_refused():
  plain = in_memory('plain')
  about = plain.about | {'image_size': [12, 12]}
  other = dataclasses.replace(plain, path='other', about=about)
  with pytest.raises(UserError, match=r'image_size is \(12, 12\)'):
    pretrained.average([plain, other])
