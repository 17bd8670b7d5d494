"""One folder per class: `cat/1.jpg`, or `train/cat/1.jpg`, `val/cat/2.jpg`.

Folders with the name of a split are splits if they contain folders; otherwise,
everything is one split, 'train'. The first level below is the class, at any
depth. `data/storage/class_folders.py` decides which files are images.
"""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.config import plugins
from vit_jax.data import fingerprint
from vit_jax.data.storage import (
  class_folders,
  classes,
  files,
  hash_order,
  splits,
)
from vit_jax.errors import UserError


@plugins.operational('path')
class Source(splits.Selected):
  """One split of a folder of classes; a local path.

  Attributes:
    name: name for messages, 'pets/train'.
    num_classes: number of class folders, or lines of `class_map`.
    class_names: names of the folders in order, or those of `class_map`.
  """

  def __init__(
    self,
    split: str,
    /,
    *,
    path: str,
    class_map: str | None = None,
    allow_empty: bool = False,
  ):
    """Lists the files; nothing is read until an example is asked for.

    Examples stand in the order of their classes' folders, then of their paths.
    Parts of a split ('train[:90%]') have their share of each class.

    Args:
      split: in the TFDS way: 'train', 'train[:99%]', 'train+validation'.
      path: path of the folder.
      class_map: a text file with a class folder on each line, in the order of
        the labels, and after a tab its name for people if there is one. By
        default labels follow the sorted names of the folders of 'train'.
      allow_empty: take class folders without images, and lines of `class_map`
        without a folder in 'train'.

    Raises:
      UserError: no such folder or split, no classes, or empty ones.
    """
    path = files.local(path, 'the source folder').rstrip('/') or '/'
    roots = class_folders.roots(path, 'source.path')
    first = next(iter(roots.values()))  # that of 'train' if there is one
    self._classes = (
      classes.load(class_map)
      if class_map
      else classes.Classes(class_folders.names(first))
    )
    self.name = f'{path}/{split}'
    self.num_classes = len(self._classes.keys)
    self.class_names = self._classes.names
    there = splits.with_alias(roots, split)
    self._listings = {
      name: self._list(there[name], allow_empty)
      for name in splits.named(split, there)
    }
    for name, found in self._listings.items():
      if class_map and not allow_empty and splits.kind(name) == 'train':
        self._refuse_absent(found, class_map)
    lengths = {name: len(each.paths) for name, each in self._listings.items()}
    self._selection = splits.Selection(split, lengths, self._cut_order)

  def __getitem__(self, index: int) -> dict[str, Any]:
    root, path = self._find(index)
    place = f'{root}/{path}'
    label = self._classes.label(path.partition('/')[0], place)
    return {'image': files.read_image(place), 'label': label}

  @property
  def fingerprint(self) -> dict[str, Any]:
    """Dataset fingerprint, compared when a run is resumed.

    See `data.fingerprint`.
    """
    return fingerprint.sampled(
      self,
      *(self._listings[s].paths[rows] for s, rows in self._selection.rows()),
    )

  def where(self, index: int) -> str:
    """Returns the file of an example."""
    return '/'.join(self._find(index))

  def ignored(self) -> list[str]:
    """Returns the files below the directory that are not examples."""
    return [
      path
      for found in self._listings.values()
      for path in class_folders.ignored(found)
    ]

  def _find(self, index: int) -> tuple[str, str]:
    """Returns the split's directory, and the path in it."""
    split, position = self._selection[index]
    found = self._listings[split]
    return found.root, os.fsdecode(found.paths[position])

  def _list(self, root: str, allow_empty: bool) -> class_folders.Listing:
    found = class_folders.listing(
      root,
      allow_empty=allow_empty,
      option=', or set --config.source.allow_empty',
    )
    for name in found.classes:
      self._classes.label(name, f'the folder {root}/{name}')
    class_folders.report(found)
    return found

  def _cut_order(self, split: str) -> np.ndarray:
    found = self._listings[split]
    numbers = np.repeat(np.arange(len(found.counts)), found.counts)
    return hash_order.by_class(found.paths, numbers)

  def _refuse_absent(
    self, found: class_folders.Listing, class_map: str
  ) -> None:
    absent = sorted(set(self._classes.keys) - set(found.classes))
    if absent:
      raise UserError(
        f'{class_map} lists the class {absent[0]!r} and {len(absent) - 1} '
        f'others without a folder in {found.root}: correct the list, or set '
        '--config.source.allow_empty.'
      )


def check_classes(class_names: Sequence[str], where: str) -> None:
  """Checks that a classifier can be trained on a folder.

  Args:
    class_names: names of the classes.
    where: folder or split, for the message.

  Raises:
    UserError: there is only one class.
  """
  if len(class_names) == 1:
    raise UserError(
      f'{where} holds one class, {class_names[0]!r}: a classifier needs two or '
      'more. Give each class a folder of its own, next to this one.'
    )


class Division(NamedTuple):
  """Splits of a folder for training and for evaluation.

  Attributes:
    train: split to train on.
    held_out: split to evaluate on.
    num_examples: number of examples of `train`.
    num_classes: number of classes of both.
  """

  train: str
  held_out: str
  num_examples: int
  num_classes: int


def divide(path: str) -> Division:
  """Takes train and val where both are there; else holds out a tenth of train.

  Raises:
    UserError: as `Source`, or fewer images than can be divided.
  """
  roots = class_folders.roots(path, 'the argument path')
  there = splits.with_alias(roots, 'train+val')
  splits.named('train', there)
  found = class_folders.listing(there['train'])
  images, num_classes = len(found.paths), len(found.classes)
  check_classes(found.classes, found.root)
  if 'val' in there:
    return Division('train', 'val', images, num_classes)
  # Not 'train[:90%]': so wrote workdirs of the time when parts were cut from
  # the sorted list. Their examples were others, and by this they are refused.
  train, held_out = 'train[0%:90%]', 'train[90%:]'
  num_examples = len(splits.Selection(train, {'train': images}))
  if not num_classes <= num_examples < images:
    raise UserError(
      f'{found.root} holds {images} images of {num_classes} classes: too few '
      'to hold out a tenth and still train on every class. Add images, or put '
      'them into train/ and val/ yourself.'
    )
  return Division(train, held_out, num_examples, num_classes)
