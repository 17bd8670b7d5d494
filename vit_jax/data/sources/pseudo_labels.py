"""Images with the labels of a teacher, which `vit_jax.pseudo_label` wrote.

The file of labels does not contain images. For each selected image it contains
the index in the images' source, the number of copies by which classes are
balanced, and the probabilities of the teacher. The source of the images is
opened as described in the file; its content must not have changed.
"""

import json
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import numpy as np
from jaxtyping import Int

from vit_jax.config import schema
from vit_jax.config.schema import SECTIONS, Nested, Section
from vit_jax.data import fingerprint
from vit_jax.data.storage import files, npz, splits
from vit_jax.errors import UserError

_IMAGES = Nested(SECTIONS['source'])
SOFT = 'soft'  # key of an example: the teacher's probabilities


class Labels(NamedTuple):
  """What a file of labels is from, and what it contains.

  Attributes:
    count: number of examples, including copies.
    class_names: class names of the teacher.
    source: config section of the source of the images.
    split: split of that source.
    fingerprint: fingerprint of the images, see `data.fingerprint`.
    digest: digest of the teacher's parameters.
  """

  count: int
  class_names: list[str]
  source: Section
  split: str
  fingerprint: dict[str, Any]
  digest: str

  @classmethod
  def of_file(cls, path: str) -> 'Labels':
    """Reads the description in a file.

    Args:
      path: local path of the file.

    Raises:
      UserError: the file was not written by `vit_jax.pseudo_label`.
    """
    try:
      values, columns = npz.about(path)
      if not {'soft', 'copies', 'index'} <= {*columns}:
        raise ValueError('it contains other columns')
      return cls(**{key: values[key] for key in cls._fields})
    except (OSError, ValueError, KeyError) as error:
      raise _unreadable(path, error) from error


@schema.operational('path')
class Source(splits.Selected):
  """The selected images, each with the number of copies given in the file.

  An example has `image`, `label` (the most likely class according to the
  teacher) and `soft` (the teacher's probabilities, float32 `[classes]`). A
  transform uses one of the labels (`augment.name='soft_labels'`).

  Attributes:
    name: name for messages, such as 'labels.npz/train'.
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
    """Opens the file, and the source of its images.

    Args:
      split: 'train', the only split, or a part of it ('train[:1000]').
      path: local path of the file.
      images: config section of the images' source, if the images were moved;
        by default the section that is stored in the file.

    Raises:
      UserError: the file or the split does not exist, the file cannot be
        read, or the images are not those that were labelled.
    """
    path = files.local(path, 'the source pseudo_labels')
    self._labels = Labels.of_file(path)
    copies, self._indices, self._soft = _columns(path)
    section = images if images is not None else self._labels.source
    self._images = schema.build('source', section, self._labels.split)
    self._check_images(path)
    self._rows = np.repeat(np.arange(len(copies)), copies)
    self.class_names = self._labels.class_names
    self.num_classes = len(self.class_names)
    self.name = f'{path}/{split}'
    lengths = {'train': len(self._rows)}
    self._selection = splits.Selection(split, lengths, self._cut_order)

  def rows(self) -> Iterator[tuple[str, Int[np.ndarray, ' n']]]:
    """Yields the examples as (split, positions in it); see `data.contract`."""
    for _, chosen in self._selection.rows():
      # Copies of an image have the same position.
      yield self._labels.split, self._indices[self._rows[chosen]]

  def __getitem__(self, index: int) -> dict[str, Any]:
    row = self._row(index)
    soft = self._soft[row]
    image = self._images[int(self._indices[row])]['image']
    return {'image': image, 'label': int(soft.argmax()), SOFT: soft}

  @property
  def fingerprint(self) -> dict[str, Any]:
    """Dataset fingerprint, compared when a run is resumed.

    See `data.fingerprint`.
    """
    parts = self._selection.rows()
    return fingerprint.sampled(
      self,
      *(self._indices[self._rows[chosen]] for _, chosen in parts),
      images=self._labels.fingerprint,
      teacher=self._labels.digest,
    )

  def where(self, index: int) -> str:
    """Returns the location of an image, if its source provides it."""
    return self._images.where(int(self._indices[self._row(index)]))

  def _row(self, index: int) -> int:
    _, position = self._selection[index]
    return int(self._rows[position])

  def _cut_order(self, split: str) -> np.ndarray:
    """Returns an order in which copies of an image are adjacent.

    A part of the split then has all copies of an image, except at its ends.
    """
    del split
    indices = self._indices
    order = files.by_place([''], np.zeros_like(indices), indices)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return np.argsort(rank[self._rows], kind='stable')

  def _check_images(self, path: str) -> None:
    """Checks that the images are those that were labelled."""
    labelled = self._labels.fingerprint
    current = json.loads(json.dumps(self._images.fingerprint))
    if fingerprint.comparable(current, labelled) != labelled:
      raise UserError(
        f'{path} contains labels of other images than {self._images.name}: set '
        'source.images, or label these with python -m vit_jax.pseudo_label.'
      )


def _columns(path: str) -> tuple[np.ndarray, np.ndarray, npz.Mapped]:
  """Reads the columns `copies` and `index`, and maps `soft` into memory.

  Raises:
    UserError: the file cannot be read.
  """
  try:
    npz.check(path)
    with npz.opened(path) as columns:
      copies, indices = columns['copies'], columns['index']
      soft = npz.Mapped(path, 'soft')
  except (OSError, ValueError) as error:
    raise _unreadable(path, error) from error
  return copies, indices, soft


def _unreadable(path: str, error: Exception) -> UserError:
  return UserError(
    f'{path} cannot be read as pseudo-labels ({error}): copy it again, or '
    'write it again with python -m vit_jax.pseudo_label.'
  )
