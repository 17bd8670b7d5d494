"""A source of coloured noise, and features of it that need no model."""

import jax.numpy as jnp
import numpy as np
from indexed_source import eval_setting

from vit_jax.data.contract import Source

CLASSES, WIDTH = 5, 12


class Colours(Source):
  """Noise around a colour per class; some images may be damaged."""

  num_classes, class_names = CLASSES, list('abcde')

  def __init__(self, size, seed, bad=()):
    self.name, self.size, self.bad = f'colours/{seed}', size, set(bad)
    rng = np.random.default_rng(seed)
    self.given = rng.integers(0, CLASSES, size)
    centres = np.random.default_rng(0).integers(60, 190, (CLASSES, 1, 1, 3))
    noise = rng.integers(-50, 50, (size, 4, 4, 3))
    self.images = (centres[self.given] + noise).astype(np.uint8)

  def __len__(self):
    return self.size

  def __getitem__(self, index):
    image = b'broken' if index in self.bad else self.images[index]
    return {'image': image, 'label': int(self.given[index])}


TRAIN, TEST = Colours(203, 1), Colours(61, 2)
WEIGHTS = np.random.default_rng(3).normal(size=(48, WIDTH)).astype(np.float32)


def features_of(source, kept=slice(None)):
  """Computes the features of `predict` in NumPy."""
  pixels = source.images[kept].reshape(-1, 48) / np.float32(255)
  return np.tanh(pixels @ WEIGHTS), source.given[kept]


def predict(weights, batch):
  pixels = batch['image'].reshape(len(batch['image']), -1) / 255.0
  features = jnp.tanh(pixels @ weights)
  return {'features': features, 'logits': features}


def setting(train=TRAIN, test=TEST, batch_size=16, **more):
  made = eval_setting(test, predict, batch_size=batch_size, **more)
  return made._replace(
    open_source=lambda split: train if split == 'train' else test
  )
