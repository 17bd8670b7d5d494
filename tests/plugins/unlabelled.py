"""A source outside the package: images without labels."""

from vit_jax.data import contract
from vit_jax.data.sources import synthetic


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
