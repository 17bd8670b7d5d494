"""A few examples of a source, spread evenly over it, for figures."""

import logging
import os
from typing import Any

import numpy as np
from jaxtyping import Integer

from vit_jax.data import contract
from vit_jax.data.contract import Preprocess, Source
from vit_jax.data.images.headers import DecodeError
from vit_jax.errors import UserError

log = logging.getLogger('vit_jax')
_TITLE = 60  # maximum number of characters


def own_splits(evals: Any) -> list[str]:
  """Returns the splits of the run's source that its evaluators use, in order.

  Args:
    evals: sections of `config.evals` by name.
  """
  own = (section for section in evals.values() if not section.get('source'))
  return [section['split'] for section in own if section.get('split')]


class Spread:
  """A source with a few examples of another source, spread evenly over it.

  Attributes:
    source: source that the examples are from.
    indices: index of each example in that source, ascending.
  """

  def __init__(self, source: Source, count: int):
    """Chooses the examples.

    Args:
      source: source that the examples are from.
      count: maximum number of examples.
    """
    indices = np.linspace(0, len(source) - 1, min(count, len(source)))
    self.indices = indices.round().astype(int).tolist()
    self.source = source
    self.name, self.num_classes = source.name, source.num_classes
    self.class_names = source.class_names

  def __len__(self) -> int:
    return len(self.indices)

  def __getitem__(self, index: int) -> dict[str, Any]:
    return self.source[self.indices[index]]

  def title(self, index: int) -> str:
    """Returns the name of an example's file, or 'example NUMBER'.

    The number is the index in the original source. It is used if there is no
    file, or if the file contains several examples.
    """
    number = self.indices[index]
    name = os.path.basename(str(contract.where(self.source, number)))
    # A location with ', ' or ' @ ' is a position in a file of many examples.
    if not name or ', ' in name or ' @ ' in name:
      return f'example {number}'
    return name[:_TITLE]

  def images(
    self, transform: Preprocess
  ) -> tuple[Integer[np.ndarray, 'n y x c'], list[bytes | np.ndarray]]:
    """Preprocesses all images; those that cannot be decoded are left out.

    Args:
      transform: preprocessing.

    Returns:
      The preprocessed images, and the images of the source.

    Raises:
      UserError: no image can be decoded.
    """
    images, originals = [], []
    for index in range(len(self)):
      original = self[index]['image']
      try:
        images.append(transform.pixels(original))
      except DecodeError as error:
        log.warning('%s is left out: %s', self.title(index), error)
      else:
        originals.append(original)
    if not images:
      raise UserError(f'{self.name} has no usable image.')
    return np.stack(images), originals
