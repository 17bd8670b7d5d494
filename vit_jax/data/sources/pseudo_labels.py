"""Images with the labels of a teacher, from a file of `vit_jax.pseudo_label`.

The file contains no images. For each selected image it has the index in the
source, the number of copies that balancing requires, and the probabilities of
the teacher. The source is opened again as the file describes it; its contents
must be unchanged.
"""

import json
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
from jaxtyping import Int

from vit_jax.config import plugins, sections
from vit_jax.config.plugins import Nested, Section
from vit_jax.config.sections import SECTIONS
from vit_jax.data import fingerprint
from vit_jax.data.storage import files, hash_order, npz, splits
from vit_jax.errors import UserError

_IMAGES = Nested(SECTIONS['source'])
SOFT = 'soft'  # key of an example: the teacher's probabilities


@plugins.operational('path')
class Source(splits.Selected):
  """The selected images, each as often as the file states.

  An example has `image`, `label`, the teacher's most likely class, and `soft`,
  float32 `[classes]`, its probabilities. A transform uses one of the two
  (`augment.name='soft_labels'`).

  Attributes:
    name: name for messages, 'labels.npz/train'.
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
      split: 'train', the only one, or a part of it ('train[:1000]').
      path: path of the file, local.
      images: a section of the source of the images, if they have moved since;
        by default as the file has it.

    Raises:
      UserError: no such file or split, or the images are others than those
        that were labelled.
    """
    path = files.local(path, 'the source pseudo_labels')
    self._about = about_of(path)
    section = images if images is not None else self._about['source']
    self._images = sections.build('source', section, self._about['split'])
    self._refuse_others(path)
    with np.load(path) as held:
      copies, places = held['copies'], held['index']
    self._rows = np.repeat(np.arange(len(copies)), copies)
    self._places = places
    self._soft = npz.Mapped(path, 'soft')
    self.class_names = self._about['class_names']
    self.num_classes = len(self.class_names)
    self.name = f'{path}/{split}'
    lengths = {'train': len(self._rows)}
    self._selection = splits.Selection(split, lengths, self._cut_order)

  def rows(self) -> Iterator[tuple[str, Int[np.ndarray, ' n']]]:
    """Yields the examples as (split, positions in it); see `data.contract`."""
    [[_, chosen]] = self._selection.rows()
    # Copies of an image are one example.
    yield self._about['split'], np.unique(self._places[self._rows[chosen]])

  def __getitem__(self, index: int) -> dict[str, Any]:
    row = self._row(index)
    soft = self._soft[row]
    image = self._images[int(self._places[row])]['image']
    return {'image': image, 'label': int(soft.argmax()), SOFT: soft}

  @property
  def fingerprint(self) -> dict[str, Any]:
    """Dataset fingerprint, compared when a run is resumed.

    See `data.fingerprint`.
    """
    [[_, chosen]] = self._selection.rows()
    return fingerprint.sampled(
      self,
      self._places[self._rows[chosen]],
      images=self._about['fingerprint'],
      teacher=self._about['digest'],
    )

  def where(self, index: int) -> str:
    """Returns the location of an image, if its source provides it."""
    place = int(self._places[self._row(index)])
    return getattr(self._images, 'where', lambda _: '')(place)

  def _row(self, index: int) -> int:
    _, position = self._selection[index]
    return int(self._rows[position])

  def _cut_order(self, split: str) -> np.ndarray:
    """Copies of an image go to the same part, as far as the sizes allow."""
    del split
    order = hash_order.by_place([''], np.zeros_like(self._places), self._places)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return np.argsort(rank[self._rows], kind='stable')

  def _refuse_others(self, path: str) -> None:
    found = json.loads(json.dumps(fingerprint.of(self._images)))
    if found != self._about['fingerprint']:
      other = [
        key
        for key in {**found, **self._about['fingerprint']}
        if found.get(key) != self._about['fingerprint'].get(key)
      ]
      raise UserError(
        f'{path} contains labels of other images than {self._images.name}: '
        f'{", ".join(other)} differ. Give their source '
        'as source.images, or label these with python -m '
        'vit_jax.pseudo_label.'
      )


def about_of(path: str) -> dict[str, Any]:
  """Returns a file's description: `count`, `class_names`, `source`, ….

  Raises:
    UserError: the file was not written by `vit_jax.pseudo_label`.
  """
  try:
    with np.load(path) as held:
      about = json.loads(str(held['about']))
      if {'soft', 'copies', 'index'} <= {*held.files}:
        return about
      problem = 'it holds other columns'
  except (OSError, ValueError, KeyError, EOFError) as error:
    problem = str(error)
  raise UserError(
    f'{path} is not a file of pseudo-labels ({problem}): python -m '
    'vit_jax.pseudo_label writes one.'
  )
