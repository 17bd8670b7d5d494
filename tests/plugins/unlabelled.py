"""A source, transform and objective outside the package: without labels."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from vit_jax.data import contract
from vit_jax.data.augment import transforms
from vit_jax.data.sources import synthetic
from vit_jax.objectives.contract import Objective as Base
from vit_jax.objectives.contract import Setting
from vit_jax.objectives.mixing import normalize


class Source(contract.Source):
  """Returns only the pixels of `synthetic`."""

  num_classes = 0
  class_names = []

  def __init__(self, split, /, *, num_examples: int = 64, side: int = 12):
    self.name = f'unlabelled/{split}'
    self._images = synthetic.Source(
      split, num_examples=num_examples, height=side, width=side
    )

  def __len__(self):
    return len(self._images)

  def __getitem__(self, index):
    return {'image': self._images[index]['image']}


@dataclasses.dataclass(frozen=True)
class TrainTransform:
  """Returns `crops`, uint8 `[2, y, x, 3]`, of an image."""

  image_size: tuple[int, int]
  _: dataclasses.KW_ONLY
  min_area: float = 0.5

  @property
  def spec(self):
    return {'crops': ((2, *self.image_size, 3), np.dtype(np.uint8))}

  def __call__(self, example, rng):
    crop = transforms.TrainTransform(self.image_size, min_area=self.min_area)
    crops = [crop.pixels(example['image'], rng) for _ in range(2)]
    return {'crops': np.stack(crops)}


@dataclasses.dataclass(frozen=True)
class Objective(Base):
  """The squared distance between the features of two crops."""

  setting: Setting
  _: dataclasses.KW_ONLY
  scale: float = 1.0

  def loss(self, params, inputs):
    crops = inputs.batch['crops']
    first, second = (
      self.setting.predict(params, normalize(crops[:, i]))['features']
      for i in (0, 1)
    )
    return self.scale * jnp.square(first - second).mean(), ({}, {})
