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


@schema.operational('path', 'class_map', 'masks')
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
    masks: str | None = None,
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
      masks: path of a directory with a PNG file for each image, at the same
        path relative to it: images/train/1.jpg and masks/train/1.png. Its bytes
        become `mask` of the example. Folders named for a split are then splits
        even if they contain images only.

    Raises:
      UserError: the directory or the split does not exist, there are no
        classes, or a class has no images.
    """
    path = files.local(path, 'the source folder').rstrip('/') or '/'
    roots = class_folders.roots(path, 'source.path', flat=bool(masks))
    self._path = path
    self._masks = masks and files.local(masks, 'the masks of a folder')
    if class_map:
      classes = class_folders.load(class_map)
    else:
      # The first directory is that of 'train' if there is one.
      names = class_folders.names(next(iter(roots.values())), endings)
      unlabelled = names == [class_folders.ITSELF]
      classes = class_folders.Classes(
        names, [class_folders.UNLABELLED] if unlabelled else None
      )
    roots = splits.with_alias(roots, split)
    self._endings = endings
    # Of each split: its listing, and the label of each image in it.
    self._listings, self._labels = {}, {}
    for name in splits.named(split, roots):
      listing = class_folders.listing(
        roots[name], endings=endings, allow_empty=allow_empty
      )
      labels = [
        classes.label(folder, f'the folder {listing.root}/{folder}')
        for folder in listing.classes
      ]
      present = set(labels)
      absent = [key for i, key in enumerate(classes.keys) if i not in present]
      is_train = splits.kind(name) == 'train'
      if class_map and absent and is_train and not allow_empty:
        raise UserError(
          f'{class_map} lists {len(absent)} classes that {listing.root} lacks '
          f'({min(absent)!r}): correct it, or set --config.source.allow_empty.'
        )
      self._listings[name] = listing
      self._labels[name] = np.array(labels, np.int64)[listing.folders]
    lengths = {name: len(each) for name, each in self._labels.items()}
    self.name = f'{path}/{split}'
    self.num_classes, self.class_names = len(classes.keys), classes.names
    self._selection = splits.Selection(split, lengths, self._cut_order)

  def __getitem__(self, index: int) -> dict[str, Any]:
    split, position = self._selection[index]
    label = int(self._labels[split][position])
    example = {'image': files.read_image(self.where(index)), 'label': label}
    if self._masks:
      example['mask'] = files.read_other(self._mask_of(index))
    return example

  def _mask_of(self, index: int) -> str:
    """Returns the path of the mask of an example."""
    name = os.path.relpath(self.where(index), self._path)
    return f'{self._masks}/{os.path.splitext(name)[0]}.png'

  @property
  def fingerprint(self) -> dict[str, Any]:
    """Dataset fingerprint, compared when a run is resumed.

    See `data.fingerprint`.
    """
    parts = list(self._selection.rows())
    labels = (self._labels[split][rows] for split, rows in parts)
    of_masks = {}
    if self._masks:
      of_masks['mask_sizes'] = fingerprint.file_sizes(len(self), self._mask_of)
    return fingerprint.sampled(
      self,
      *(self._listings[split].paths[rows] for split, rows in parts),
      labels=fingerprint.checksum(*labels),  # those of another `class_map`
      file_sizes=fingerprint.file_sizes(len(self), self.where),
      **of_masks,
    )

  def where(self, index: int) -> str:
    """Returns the file of an example."""
    split, position = self._selection[index]
    listing = self._listings[split]
    return f'{listing.root}/{os.fsdecode(listing.paths[position])}'

  def labels(self) -> Int[np.ndarray, ' n']:
    """Returns the labels of all examples; -1 for those without a label."""
    return self._selection.gather(self._labels)

  def ignored(self) -> list[str]:
    """Returns the files below the directory that are not examples."""
    roots = (listing.root for listing in self._listings.values())
    return [
      path
      for root in roots
      for path in class_folders.ignored(root, self._endings)
    ]

  def _cut_order(self, split: str) -> np.ndarray:
    # By folder, not by label: folders may have the same label.
    listing = self._listings[split]
    return splits.by_class(listing.paths, listing.folders)


def check_classes(class_names: Sequence[str], where: str) -> None:
  """Checks that a classifier can be trained on a folder.

  Args:
    class_names: names of the classes.
    where: path of the folder or the split, for the message.

  Raises:
    UserError: there is only one class.
  """
  if len(class_names) == 1:
    [name] = class_names
    no_labels = name in (class_folders.UNLABELLED, class_folders.ITSELF)
    actual = 'no labels' if no_labels else f'one class, {name!r}'
    raise UserError(
      f'{where} has {actual}, but a classifier needs two or more: use one '
      'folder per class, other data, or train without labels '
      '(configs/folder.py:path=DIR,objective=mae).'
    )


class Division(NamedTuple):
  """Splits of a folder for training and for evaluation.

  Attributes:
    train: split to train on.
    held_out: split to evaluate on.
    num_examples: number of examples of the split `train`.
    num_classes: number of classes of both splits.
  """

  train: str
  held_out: str
  num_examples: int
  num_classes: int


def divide(
  path: str,
  endings: tuple[str, ...] = files.IMAGES,
  labelled: bool = True,
  flat: bool = False,
) -> Division:
  """Returns 'train' and 'val', or divides 'train' if 'val' does not exist.

  In this case, a tenth of 'train' is held out.

  Args:
    path: path of the directory.
    endings: endings of the image files, see `Source`.
    labelled: whether there must be labels, for a classifier.
    flat: whether splits may contain images only, see `class_folders.roots`.

  Raises:
    UserError: see `Source`; or there is only one class for a classifier, or
      there are too few images to hold out a tenth.
  """
  roots = class_folders.roots(path, 'the argument path', flat)
  roots = splits.with_alias(roots, 'train+val')
  splits.named('train', roots)
  # The source of a run reads the flag `allow_empty`, which is not known here.
  listing = class_folders.listing(
    roots['train'], endings=endings, allow_empty=True
  )
  images, num_classes = len(listing.paths), len(listing.classes)
  if labelled:
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
      'few to hold out a tenth. Add images, or use folders train/ and val/.'
    )
  return Division(train, held_out, num_examples, num_classes)
