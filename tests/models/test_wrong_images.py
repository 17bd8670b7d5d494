"""Tests of the messages for images of a wrong dtype, shape or size."""

import functools

import jax
import jax.numpy as jnp
import pytest
from tiny_vit import SIZES, abstract

from examples import axial_resnet, axial_vit
from vit_jax.errors import UserError
from vit_jax.models import resnet, swin, vit

SWIN = dict(width=8, depths=(2, 2), num_heads=2, window_size=4)
MODELS = {
  'vit': vit.Model(3, **SIZES),
  'positions in layers': vit.Model(3, **SIZES, position_at='layers'),
  'rows and columns': vit.Model(3, **SIZES, position='2d'),
  'relative': vit.Model(3, **SIZES, position='relative'),
  'swin': swin.Model(3, **SWIN),
  'resnet': resnet.Model(3, depths=(1,), width_factor=1),
  'axial_vit': axial_vit.Model(3, **SIZES),
  'axial_resnet': axial_resnet.Model(3, depths=(1, 1)),
}


@functools.cache
def params_of(name, size):
  return abstract(MODELS[name], size)


def trace(name, images, method='__call__', size=(16, 16)):
  """Traces a method of a model without computing anything."""

  def apply(params, images):
    return MODELS[name].apply({'params': params}, images, method=method)

  return jax.eval_shape(apply, params_of(name, size), images)


def images(*shape, dtype=jnp.float32):
  return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize('name', MODELS)
def test_images_must_be_floats_in_a_batch(name):
  """The message contains what was given, and what is expected."""
  for dtype in ('uint8', 'int32', 'bool'):
    with pytest.raises(UserError, match=f'{dtype}.*127.5'):
      trace(name, images(2, 16, 16, 3, dtype=dtype))
  for shape in ((16, 16, 3), (2, 16, 16, 4), (2, 3, 16, 16), (1, 2, 16, 16, 3)):
    given = str(list(shape)).replace('[', r'\[')
    with pytest.raises(UserError, match=rf'{given}.*\[n, height, width, 3\]'):
      trace(name, images(*shape))


@pytest.mark.parametrize('name', [x for x in MODELS if x != 'resnet'])
def test_images_of_another_size_are_refused(name):
  """The message names a parameter and its shape; a ResNet takes any size."""
  with pytest.raises(UserError, match=r'has the shape \[.*image_size'):
    trace(name, images(2, 32, 32, 3))


@pytest.mark.parametrize(
  'name, method',
  [('vit', 'embed'), ('vit', 'predict'), ('resnet', 'maps')]
  + [('swin', 'stages')],
)
def test_all_methods_check_images(name, method):
  """`embed`, for example, is used by self-supervised objectives."""
  with pytest.raises(UserError, match='uint8'):
    trace(name, images(2, 16, 16, 3, dtype='uint8'), method)
  if name == 'vit':
    with pytest.raises(UserError, match='position/embedding'):
      trace(name, images(2, 32, 32, 3), method)
