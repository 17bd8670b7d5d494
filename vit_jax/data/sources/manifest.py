"""A list of images and labels: CSV or JSON lines.

CSV has the header `image,label` and optionally the column `split`; other
columns are ignored. Each line of JSONL is an object with the same keys. Without
splits, everything is 'train'. Labels are integers or class names. Blanks around
fields are ignored; any other difference is an error
(`data/storage/listing.py`).
"""

import os
from typing import Any

import numpy as np
from jaxtyping import Int

from vit_jax.config import plugins
from vit_jax.data import fingerprint
from vit_jax.data.storage import classes, files, hash_order, listing, splits


@plugins.operational('path')
class Source(splits.Selected):
  """One split of a manifest; images may be local or on gs://.

  Attributes:
    name: name for messages, such as 'pets.csv/train'.
    num_classes: number of classes in `class_map`; without it, in the whole
      manifest, not only in the split.
    class_names: names of the classes, in the order of the labels.
  """

  def __init__(self, split: str, /, *, path: str, class_map: str | None = None):
    """Reads the list; images are read when they are needed.

    Args:
      split: split as in TFDS: 'train', 'train[:99%]', 'train+validation'.
      path: path of the manifest, ending in .csv or .jsonl. Paths of images are
        relative to its folder, absolute, or gs:// addresses. Without the column
        label, the images have no labels.
      class_map: text file with one class per line, written like the labels in
        the manifest (a name or a number), in the order of the classes; a
        display name may follow after a tab. If it contains only names, numbers
        in the manifest are positions in it, from 0. By default, classes are the
        sorted names in the manifest, or the numbers from 0 to the largest.

    Raises:
      UserError: the file or split does not exist, a line does not have an image
        and a label, or the labels do not determine the classes (see
        `classes.number`).
    """
    path = files.place(path, 'source.path')
    rows = listing.read(path)
    all_classes, labels = _number(path, rows, class_map)
    self.name = f'{path}/{split}'
    self.num_classes = len(all_classes.keys)
    self.class_names = all_classes.names
    self._path = path
    images = np.array([row.image.encode() for row in rows], np.bytes_)
    lines = np.array([row.line for row in rows], np.int64)
    aliases = splits.with_alias({row.split: row.split for row in rows}, split)
    self._columns = {}
    for name in splits.named(split, aliases):
      chosen = np.array([row.split == aliases[name] for row in rows])
      self._columns[name] = (images[chosen], labels[chosen], lines[chosen])
    lengths = {name: len(each[0]) for name, each in self._columns.items()}
    self._selection = splits.Selection(
      split, lengths, lambda name: hash_order.by_name(self._columns[name][0])
    )

  def __getitem__(self, index: int) -> dict[str, Any]:
    image, label, _ = self._row(index)
    return {'image': files.read_image(image), 'label': label}

  @property
  def fingerprint(self) -> dict[str, Any]:
    """Dataset fingerprint, compared when a run is resumed.

    See `data.fingerprint`.
    """
    chosen = []
    for split, rows in self._selection.rows():
      images, labels, _ = self._columns[split]
      chosen += [images[rows], labels[rows]]
    sizes = fingerprint.file_sizes(len(self), lambda row: self._row(row)[0])
    return fingerprint.sampled(self, *chosen, file_sizes=sizes)

  def where(self, index: int) -> str:
    """Returns the file of an example, and its line in the list."""
    image, _, line = self._row(index)
    return f'{image} ({self._path}, line {line})'

  def labels(self) -> Int[np.ndarray, ' n']:
    """Returns the labels of all examples."""
    parts = self._selection.rows()
    return np.concatenate(
      [self._columns[split][1][rows] for split, rows in parts]
    )

  def _row(self, index: int) -> tuple[str, int, int]:
    split, position = self._selection[index]
    images, labels, lines = self._columns[split]
    image = files.join(os.path.dirname(self._path), images[position].decode())
    return image, int(labels[position]), int(lines[position])


def _number(
  path: str, rows: list[listing.Row], class_map: str | None
) -> tuple[classes.Classes, np.ndarray]:
  """Returns the classes, and the label of each row, int64 `[n]`."""
  listed = classes.load(class_map) if class_map else None

  def where(label: str) -> str:
    line = next(row.line for row in rows if row.label == label)
    return f'{path}, line {line},'

  texts = {row.label for row in rows}
  if texts == {''}:
    return classes.of_unlabelled(''), np.zeros(len(rows), np.int64)
  all_classes, numbers = classes.number(texts, where, listed, whole=True)
  return all_classes, np.array([numbers[row.label] for row in rows], np.int64)
