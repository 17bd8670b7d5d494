"""Images with the labels of a teacher, which `vit_jax.pseudo_label` wrote.

The directory of labels does not contain images. Its parts contain the index of
each image in the images' source and the probabilities of the teacher, and
selection.npz the number of copies of each, by which classes are balanced. The
description of the labels contains the config section of the images' source,
whose content must not have changed.
"""

import json
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
from jaxtyping import Int

from vit_jax.config import schema
from vit_jax.config.schema import SECTIONS, Nested, Section
from vit_jax.data import fingerprint
from vit_jax.data.storage import files, parts, splits
from vit_jax.errors import UserError
from vit_jax.files import paths

_IMAGES = Nested(SECTIONS['source'])
SOFT = 'soft'  # key of an example: the teacher's probabilities
SELECTION = 'selection.npz'  # its array `copies` has a value per row of labels


def copies(path: str) -> Int[np.ndarray, ' n']:
  """Returns the number of copies of each row of labels.

  Args:
    path: local directory of the labels.

  Raises:
    UserError: the directory was not written by `vit_jax.pseudo_label`.
  """
  folder = paths.locate(files.local(path, 'the source pseudo_labels'))
  if not (folder / SELECTION).exists():
    raise UserError(
      f'{path} contains no {SELECTION}, so it is not a complete result of '
      f'python -m vit_jax.pseudo_label.{paths.nearest(path)}'
    )
  return parts.load(folder / SELECTION)['copies']


@schema.operational('path')
class Source(splits.Selected):
  """The selected images, each with its number of copies.

  An example has `image`, `label` (the most likely class according to the
  teacher) and `soft` (the teacher's probabilities, float32 `[classes]`). A
  transform uses one of the labels (`augment.name='soft_labels'`).

  Attributes:
    name: name for messages, such as 'labels/train'.
    num_classes: number of classes of the teacher.
    class_names: class names of the teacher.
  """

  def __init__(
    self,
    split: str,
    /,
    *,
    path: str,
    images: Annotated[Section | None, _IMAGES] = None,
  ):
    """Opens the labels, and the source of their images.

    Args:
      split: 'train', the only split, or a part of it ('train[:1000]').
      path: local directory of the labels.
      images: config section of the images' source, if the images were moved;
        by default the section that is stored with the labels.

    Raises:
      UserError: the directory or the split does not exist, a file cannot be
        read, or the images are not the labelled ones.
    """
    counts, labels = copies(path), parts.Parts.open(path)
    self._computation = labels.computation
    # Each part has rows of labels: the index of an image, and probabilities,
    # which stay on disk.
    indices, self._soft = [], []
    for number in range(len(labels)):
      columns = labels.read(number)
      indices.append(columns['index'])
      rows = parts.Rows.of(labels.path(number), SOFT, columns[SOFT])
      self._soft.append(rows)
    self._indices = np.concatenate(indices)
    self._rows_of_parts = splits.Concatenation(map(len, indices))
    section = images if images is not None else self._computation.source
    self._images = schema.build('source', section, self._computation.split)
    self._check_images(path)
    # The row of labels of each example; a row occurs once for each copy.
    self._rows = np.repeat(np.arange(len(counts)), counts)
    self.class_names = self._computation.class_names
    self.num_classes = len(self.class_names)
    self.name = f'{path}/{split}'
    lengths = {'train': len(self._rows)}
    self._selection = splits.Selection(split, lengths, self._cut_order)

  def rows(self) -> Iterator[tuple[str, Int[np.ndarray, ' n']]]:
    """Yields the examples as (split, positions in it); see `data.contract`."""
    for _, chosen in self._selection.rows():
      # Copies of an image have the same position.
      yield self._computation.split, self._indices[self._rows[chosen]]

  def __getitem__(self, index: int) -> dict[str, Any]:
    row = self._row(index)
    number, row_of_part = self._rows_of_parts.find(row)
    soft = self._soft[number].read(row_of_part)
    image = self._images[int(self._indices[row])]['image']
    return {'image': image, 'label': int(soft.argmax()), SOFT: soft}

  @property
  def fingerprint(self) -> dict[str, Any]:
    """Dataset fingerprint, compared when a run is resumed.

    See `data.fingerprint`.
    """
    return fingerprint.sampled(
      self,
      *(indices for _, indices in self.rows()),
      images=self._computation.fingerprint,
      teacher=self._computation.digest,
    )

  def where(self, index: int) -> str:
    """Returns the location of an image, if its source provides it."""
    return self._images.where(int(self._indices[self._row(index)]))

  def _row(self, index: int) -> int:
    """Returns the row of labels of an example."""
    _, position = self._selection[index]
    return int(self._rows[position])

  def _cut_order(self, split: str) -> np.ndarray:
    """Returns an order in which copies of an image are adjacent.

    A part of the split then has all copies of an image, except at its ends.
    """
    del split  # 'train' is the only one
    indices = self._indices
    # As if all images were in one file without a name.
    order = splits.by_place([''], np.zeros_like(indices), indices)
    rank = np.empty_like(order)  # of each row in this order
    rank[order] = np.arange(len(order))
    return np.argsort(rank[self._rows], kind='stable')

  def _check_images(self, path: str) -> None:
    """Checks that the images are the labelled ones.

    Raises:
      UserError: their fingerprint differs from the stored one.
    """
    labelled = self._computation.fingerprint
    # The stored fingerprint has passed through JSON.
    current = json.loads(json.dumps(self._images.fingerprint))
    if fingerprint.comparable(current, labelled) != labelled:
      raise UserError(
        f'{path} contains labels of other images than {self._images.name}: set '
        'source.images, or label these with python -m vit_jax.pseudo_label.'
      )
