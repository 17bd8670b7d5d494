"""Images with masks of classes, of different sizes, in memory."""

import io

import numpy as np
import PIL.Image

from vit_jax.data.contract import Source


def png(pixels):
  """Returns integers as a PNG file, of 8 or 16 bits."""
  file = io.BytesIO()
  PIL.Image.fromarray(pixels).save(file, 'png')
  return file.getvalue()


class Masked(Source):
  """Random blocks; the brightness of a block depends on its class."""

  name, num_classes, class_names = 'masked', 1, ['unlabelled']

  def __init__(self, sizes, classes, seed=0, ignored=255):
    self.sizes, self.classes, self.seed = sizes, classes, seed
    self.ignored = ignored

  def __len__(self):
    return len(self.sizes)

  def mask(self, index):
    """Returns the classes of an image; some pixels are ignored."""
    rng = np.random.default_rng([self.seed, index])
    height, width = self.sizes[index]
    mask = rng.integers(0, self.classes, (-(-height // 9), -(-width // 9)))
    mask = np.kron(mask, np.ones((9, 9), int))[:height, :width]
    mask[rng.random(mask.shape) < 0.1] = self.ignored
    return mask.astype(np.uint8)

  def __getitem__(self, index):
    rng = np.random.default_rng([self.seed, index, 1])
    mask = self.mask(index)
    level = np.where(mask == self.ignored, 90, 60 * mask)
    image = level[..., None] + rng.integers(0, 40, (*mask.shape, 3))
    image = image.clip(0, 255).astype(np.uint8)
    return {'image': image, 'label': 0, 'mask': png(mask)}
