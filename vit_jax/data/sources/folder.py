"""One folder per class: `cat/1.jpg`, or `train/cat/1.jpg`, `val/cat/2.jpg`.

Folders with the name of a split are splits if they contain folders; otherwise,
everything is one split, 'train'. The class of an image is the first folder
below that of its split. `data/storage/class_folders.py` defines which files are
images.
"""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from vit_jax.config import schema
from vit_jax.data import fingerprint
from vit_jax.data.storage import class_folders, files, splits
from vit_jax.errors import UserError


@schema.operational('path')
class Source(splits.Selected):
  """One split of a local directory with a folder for each class.

  Attributes:
    name: name for messages, such as 'pets/train'.
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
    endings: tuple[str, ...] = files.IMAGES,
    allow_empty: bool = False,
  ):
    """Lists the files; images are read when they are needed.

    Examples are sorted by class folder, then by path. Parts of a split
    ('train[:90%]') contain the same fraction of each class.

    Args:
      split: split as in TFDS: 'train', 'train[:99%]', 'train+validation'.
      path: path of the directory. If it contains images, but no folders, these
        have no labels.
      class_map: text file with a class folder on each line, in the order of the
        labels; a display name may follow after a tab. By default, labels are
        the indices of the sorted folders of 'train'.
      endings: endings of the image files, in lower case; other files are left
        out. The content of a file determines its format.
      allow_empty: whether class folders may have no images, and lines of
        `class_map` no folder in 'train'.

    Raises:
      UserError: the directory or the split does not exist, there are no
        classes, or a class has no images.
    """
    path = files.local(path, 'the source folder').rstrip('/') or '/'
    roots = class_folders.roots(path, 'source.path')
    first = next(iter(roots.values()))  # directory of 'train' if there is one
    self._classes = _classes(first, class_map, endings)
    self.name = f'{path}/{split}'
    self.num_classes = len(self._classes.keys)
    self.class_names = self._classes.names
    roots = splits.with_alias(roots, split)
    self._listings = {
      name: self._list(roots[name], endings, allow_empty)
      for name in splits.named(split, roots)
    }
    for name, listing in self._listings.items():
      if class_map and not allow_empty and splits.kind(name) == 'train':
        self._check_all_present(listing, class_map)
    lengths = {name: len(each.paths) for name, each in self._listings.items()}
    self._selection = splits.Selection(split, lengths, self._cut_order)

  def __getitem__(self, index: int) -> dict[str, Any]:
    root, path = self._find(index)
    full_path = f'{root}/{path}'
    label = self._classes.label(path.partition('/')[0], full_path)
    return {'image': files.read_image(full_path), 'label': label}

  @property
  def fingerprint(self) -> dict[str, Any]:
    """Dataset fingerprint, compared when a run is resumed.

    See `data.fingerprint`.
    """
    return fingerprint.sampled(
      self,
      *(self._listings[s].paths[rows] for s, rows in self._selection.rows()),
      file_sizes=fingerprint.file_sizes(len(self), self.where),
    )

  def where(self, index: int) -> str:
    """Returns the file of an example."""
    return '/'.join(self._find(index))

  def labels(self) -> Int[np.ndarray, ' n']:
    """Returns the labels of all examples."""
    found = []
    for split, rows in self._selection.rows():
      listing = self._listings[split]
      own = [
        self._classes.label(name, listing.root) for name in listing.classes
      ]
      found.append(np.repeat(np.array(own, np.int64), listing.counts)[rows])
    return np.concatenate(found)

  def ignored(self) -> list[str]:
    """Returns the files below the directory that are not examples."""
    return [
      path
      for listing in self._listings.values()
      for path in class_folders.ignored(listing)
    ]

  def _find(self, index: int) -> tuple[str, str]:
    """Returns (directory of the split, path in it) of an example."""
    split, position = self._selection[index]
    listing = self._listings[split]
    return listing.root, os.fsdecode(listing.paths[position])

  def _list(
    self, root: str, endings: tuple[str, ...], allow_empty: bool
  ) -> class_folders.Listing:
    """Lists the images of a split, and checks the names of its classes."""
    listing = class_folders.listing(
      root,
      endings=endings,
      allow_empty=allow_empty,
      option=', or set --config.source.allow_empty',
    )
    for name in listing.classes:
      self._classes.label(name, f'the folder {root}/{name}')
    class_folders.report(listing)
    return listing

  def _cut_order(self, split: str) -> np.ndarray:
    listing = self._listings[split]
    labels = np.repeat(np.arange(len(listing.counts)), listing.counts)
    return files.by_class(listing.paths, labels)

  def _check_all_present(
    self, listing: class_folders.Listing, class_map: str
  ) -> None:
    """Checks that each class of the list has a folder."""
    where = f'the folder {listing.root}'
    present = {self._classes.label(name, where) for name in listing.classes}
    keys = enumerate(self._classes.keys)
    absent = sorted(key for label, key in keys if label not in present)
    if absent:
      raise UserError(
        f'{class_map} lists the class {absent[0]!r} and {len(absent) - 1} '
        f'others without a folder in {listing.root}: correct the list, or set '
        '--config.source.allow_empty.'
      )


def _classes(
  root: str, class_map: str | None, endings: tuple[str, ...]
) -> class_folders.Classes:
  """Returns the classes of a list or, without one, of the folders."""
  if class_map:
    return class_folders.load(class_map)
  names = class_folders.names(root, endings)
  if names == [class_folders.WHOLE]:
    return class_folders.of_unlabelled(class_folders.WHOLE)
  return class_folders.Classes(names)


def check_classes(class_names: Sequence[str], where: str) -> None:
  """Checks that a classifier can be trained on a folder.

  Args:
    class_names: names of the classes.
    where: path of the folder or the split, for the message.

  Raises:
    UserError: there is only one class.
  """
  if len(class_names) == 1:
    unlabelled = class_names[0] in (
      class_folders.UNLABELLED,
      class_folders.WHOLE,
    )
    actual = 'no labels' if unlabelled else f'one class, {class_names[0]!r}'
    raise UserError(
      f'{where} has {actual}, but a classifier needs at least two classes: put '
      'the images of each class into a separate folder, use data with labels, '
      'or train without labels (configs/mae.py, dino.py or masked_patch.py).'
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


def divide(path: str, endings: tuple[str, ...] = files.IMAGES) -> Division:
  """Returns 'train' and 'val', or divides 'train' if 'val' does not exist.

  In this case, a tenth of 'train' is held out.

  Args:
    path: path of the directory.
    endings: endings of the image files, see `Source`.

  Raises:
    UserError: see `Source`; or there is only one class, or there are too few
      images to hold out a tenth.
  """
  roots = class_folders.roots(path, 'the argument path')
  roots = splits.with_alias(roots, 'train+val')
  splits.named('train', roots)
  listing = class_folders.listing(roots['train'], endings=endings)
  images, num_classes = len(listing.paths), len(listing.classes)
  check_classes(listing.classes, listing.root)
  if 'val' in roots:
    return Division('train', 'val', images, num_classes)
  # Earlier versions used 'train[:90%]' and cut parts from the sorted list. The
  # different spelling prevents resuming such runs with other examples.
  train, held_out = 'train[0%:90%]', 'train[90%:]'
  num_examples = len(splits.Selection(train, {'train': images}))
  if not num_classes <= num_examples < images:
    raise UserError(
      f'{listing.root} contains {images} images of {num_classes} classes: too '
      'few to hold out a tenth and still train on every class. Add images, or '
      'put them into train/ and val/ yourself.'
    )
  return Division(train, held_out, num_examples, num_classes)
