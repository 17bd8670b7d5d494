"""A transform outside the package: two crops of each image, without a label."""

import dataclasses

import numpy as np

from vit_jax.data.augment import transforms


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
