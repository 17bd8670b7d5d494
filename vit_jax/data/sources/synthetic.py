"""Random images with a mean colour per class, for benchmarks and dry runs."""

from typing import Any

import numpy as np

from vit_jax.data import contract
from vit_jax.errors import check_range


class Source(contract.Source):
  """Examples of random pixels, which depend only on index and split.

  Each class has its own mean colour, so that the loss of a model can decrease.

  Attributes:
    name: name for messages, such as 'synthetic/train'.
    num_classes: number of classes.
    class_names: 'class 0' and so on.
  """

  def __init__(
    self,
    split: str,
    /,
    *,
    num_examples: int = 1024,
    num_classes: int = 10,
    height: int = 32,
    width: int = 32,
  ):
    """Checks the sizes, which must be at least 1.

    Args:
      split: any text; different splits have different pixels.
      num_examples: number of examples.
      num_classes: number of classes.
      height: height of the images, pixels.
      width: width of the images, pixels.

    Raises:
      UserError: a size is out of range.
    """
    sizes = dict(num_examples=num_examples, num_classes=num_classes)
    for key, size in (sizes | dict(height=height, width=width)).items():
      check_range(f'source.{key}', size, at_least=1, at_most=2**31 - 1)
    self.name = f'synthetic/{split}'
    self.num_classes = num_classes
    self.class_names = [f'class {i}' for i in range(num_classes)]
    self._num_examples = num_examples
    self._shape = (height, width, 3)
    self._split = list(split.encode())  # a part of the seed of each example

  def __len__(self) -> int:
    return self._num_examples

  def __getitem__(self, index: int) -> dict[str, Any]:
    if not 0 <= index < len(self):
      raise IndexError(f'{self.name} has no example {index}')
    rng = np.random.default_rng([*self._split, index])
    label = int(rng.integers(self.num_classes))
    # The mean colour of the class; with the noise, values are 0 to 254.
    colour = np.random.default_rng(label).integers(64, 192, 3)
    noise = rng.integers(-64, 64, self._shape)
    return {'image': (colour + noise).astype(np.uint8), 'label': label}

  @property
  def fingerprint(self) -> dict[str, Any]:
    """Dataset fingerprint, compared when a run is resumed.

    See `data.fingerprint`.
    """
    return {
      'size': len(self),
      'class_names': list(self.class_names),
      'split': bytes(self._split).decode(),
      'shape': list(self._shape),
    }

  def where(self, index: int) -> str:
    """Returns split and index, because there is no file."""
    return f'{self.name}, example {index}'
