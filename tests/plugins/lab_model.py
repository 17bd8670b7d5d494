"""A model outside the package: a convolution and a dense layer."""

import jax
import jax.numpy as jnp

from vit_jax.errors import UserError
from vit_jax.models import contract


class Model(contract.Model):
  """A convolution, the mean over the image, a dense layer and a linear head."""

  def __init__(self, num_classes, /, *, width: int = 16):
    self.num_classes = num_classes
    self.width = width

  def init(self, key, images):
    del images  # of any size
    keys = jax.random.split(key, 3)

    def layer(key, *shape):
      kernel = jax.nn.initializers.he_normal()(key, shape)
      return {'kernel': kernel, 'bias': jnp.zeros(shape[-1])}

    params = {
      'stem': layer(keys[0], 3, 3, 3, self.width),
      'body': layer(keys[1], self.width, self.width),
    }
    if self.num_classes:
      params['head'] = layer(keys[2], self.width, self.num_classes)
    return {'params': params}

  def apply(self, variables, *args, method=None, **kwargs):
    if method not in (None, 'predict'):
      raise UserError(f'this model has no {method}; allowed: predict.')
    found = self.predict(variables['params'], *args, **kwargs)
    return found if method else found['logits']

  def predict(self, params, images, key=None, want=()):
    del key  # the model has no dropout
    if want:
      raise UserError(f'this model has no {", ".join(want)}.')
    stem, body = params['stem'], params['body']
    x = jax.lax.conv_general_dilated(
      images,
      stem['kernel'],
      (2, 2),
      'SAME',
      dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
    )
    x = jax.nn.relu(x + stem['bias']).mean((1, 2))
    features = jax.nn.relu(x @ body['kernel'] + body['bias'])
    if not self.num_classes:
      return {'features': features, 'logits': features}
    logits = features @ params['head']['kernel'] + params['head']['bias']
    return {'features': features, 'logits': logits}
