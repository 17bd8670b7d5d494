"""A source outside the package: noise around the colour of its class."""

import numpy as np

from vit_jax.data import contract

COLOURS = {'red': (160, 90, 90), 'green': (90, 160, 90), 'blue': (90, 90, 160)}


class Source(contract.Source):
  """Generates any number of images; the split selects the seed."""

  def __init__(self, split, /, *, num_examples: int = 32):
    self.name = f'lab/{split}'
    self.class_names = list(COLOURS)
    self.num_classes = len(COLOURS)
    self._num_examples = num_examples
    self._split = list(split.encode())

  def __len__(self):
    return self._num_examples

  def __getitem__(self, index):
    if not 0 <= index < len(self):
      raise IndexError(f'{self.name} has no example {index}')
    rng = np.random.default_rng([*self._split, index])
    label = int(rng.integers(self.num_classes))
    noise = rng.integers(-80, 80, (12, 10, 3))
    image = np.array(COLOURS[self.class_names[label]]) + noise
    return {'image': image.astype(np.uint8), 'label': label}
