"""Sizes, images and parameters of a Vision Transformer that compiles fast."""

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.models.vit import Model
from vit_jax.weights import pretrained
from vit_jax.weights.description import Description

SIZES = dict(
  patch_size=4, width=16, depth=3, mlp_dim=24, num_heads=2, dtype='float32'
)
KEY = jax.random.key(0)


def abstract(model, image_size=(224, 224)):
  """Returns the shapes of the parameters for images of this size."""
  shape = (1, *image_size, model.channels)
  images = jax.ShapeDtypeStruct(shape, jnp.float32)
  return jax.eval_shape(model.init, KEY, images)['params']


def images_of(*shape, seed=0):
  """Returns random images in [-1, 1], `[*shape, 3]`."""
  return jax.random.uniform(jax.random.key(seed), (*shape, 3), minval=-1.0)


def noise_params(model, image_size, scale=0.3):
  """Returns random numbers for every parameter, so that none is zero."""
  shapes = abstract(model, image_size)
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda s: jnp.array(rng.normal(0, scale, s.shape), s.dtype), shapes
  )


def save_classifier(path):
  """Writes weights of three classes for images of 32 pixels; returns them."""
  sizes = dict(patch_size=16, width=16, depth=1, mlp_dim=8, num_heads=2)
  description = Description(
    model=dict(name='vit', dtype='float32', **sizes),
    preprocess=dict(resize='squash'),
    num_classes=3,
    image_size=(32, 32),
  )
  model = Model(3, dtype='float32', **sizes)
  params = noise_params(model, (32, 32))
  pretrained.save(path, params, description)
  return params
