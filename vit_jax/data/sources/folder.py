"""A folder for each class: `cat/1.jpg`, or `train/cat/1.jpg`, `val/cat/2.jpg`.

Folders named train, val, validation or test directly under the path are splits
('val' and 'validation' stand for each other); without any, everything is one
split, 'train'. The first level below is the class; what lies deeper belongs to
it. Files that are no images by their ending, and hidden ones, are left out.
"""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from vit_jax.data import classes, files, fingerprint, splits
from vit_jax.errors import UserError


class Source:
  """One split of a folder of classes; a local path.

  Attributes:
    name: for messages, 'pets/train'.
    num_classes: folders at the class level, or lines of `class_map`.
    class_names: folders' names in order, or as `class_map` has them.
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

    Args:
      split: in the TFDS way: 'train', 'train[:99%]', 'train+validation'.
      path: of the folder.
      class_map: a text file with a class folder on each line, in the order of
        the labels, and after a tab its name for people if there is one. By
        default labels follow the sorted names of the folders of 'train'.
      allow_empty: take class folders without images, and lines of `class_map`
        without a folder in 'train'.

    Raises:
      UserError: no such folder or split, no classes, or empty ones.
    """
    path = files.local(path, 'the source folder').rstrip('/') or '/'
    roots = _roots(path, split)
    self._classes = _classes(roots, class_map)
    self.name = f'{path}/{split}'
    self.num_classes = len(self._classes.keys)
    self.class_names = self._classes.names
    self._listings = {
      name: _listing(roots[name], self._classes, allow_empty)
      for name in splits.named(split, roots)
    }
    if class_map and not allow_empty and 'train' in self._listings:
      self._refuse_absent(roots['train'], class_map)
    self._roots = roots
    lengths = {name: len(each) for name, each in self._listings.items()}
    self._selection = splits.Selection(split, splits.resolve(split, lengths))

  def __len__(self) -> int:
    return len(self._selection)

  def __getitem__(self, index: int) -> dict[str, Any]:
    path = self.where(index)
    split, _ = self._selection[index]
    key = path[len(self._roots[split]) + 1 :].partition('/')[0]
    return {
      'image': files.read_image(path),
      'label': self._classes.label(key, path),
    }

  @property
  def fingerprint(self) -> dict[str, Any]:
    """By what the data set is known again; see `data.fingerprint`."""
    chosen = [self._listings[s][rows] for s, rows in self._selection.rows()]
    return fingerprint.sampled(self, *chosen)

  def where(self, index: int) -> str:
    """The file of an example."""
    split, position = self._selection[index]
    return (
      f'{self._roots[split]}/{os.fsdecode(self._listings[split][position])}'
    )

  def _refuse_absent(self, root: str, class_map: str) -> None:
    absent = [k for k in self._classes.keys if not os.path.isdir(f'{root}/{k}')]
    if absent:
      raise UserError(
        f'{class_map} lists the class {absent[0]!r} and {len(absent) - 1} '
        f'others without a folder in {root}: mend the list, or set '
        '--config.source.allow_empty.'
      )


def _roots(path: str, spec: str) -> dict[str, str]:
  """The folder of each split, {'train': …}, by the names that spec uses."""
  if not os.path.isdir(path):
    raise UserError(
      f'source.path is {path!r}, and there is no such directory: give one with '
      'a folder for each class, or with train/ and val/ of such folders.'
    )
  found = {
    name: f'{path}/{name}'
    for name in splits.NAMES
    if os.path.isdir(f'{path}/{name}')
  }
  return splits.with_alias(found, spec) or {'train': path}


def _classes(roots: dict[str, str], class_map: str | None) -> classes.Classes:
  if class_map:
    return classes.load(class_map)
  first = roots.get('train') or next(iter(roots.values()))
  found = classes.Classes(_folders(first))
  if not found.keys:
    raise UserError(
      f'{first} holds no folder: each class needs one with its images. For '
      'images with a list of labels, take the source manifest.'
    )
  return found


def _folders(root: str) -> list[str]:
  with os.scandir(root) as entries:
    return sorted(
      entry.name
      for entry in entries
      if _is_dir(entry) and not entry.name.startswith('.')
    )


def _is_dir(entry: os.DirEntry) -> bool:
  try:
    return entry.is_dir()
  except OSError:  # a link to itself
    return False


def _listing(
  root: str, known: classes.Classes, allow_empty: bool
) -> np.ndarray:
  """Sorted paths of images relative to the root, as bytes.

  An array of fixed length is smaller than a list of str, and worker processes
  get it at once.
  """
  paths: list[bytes] = []
  for name in _folders(root):
    known.label(name, f'the folder {root}/{name}')
    found = sorted(_images(root, name, (_identity(root),)))
    if not found and not allow_empty:
      raise UserError(
        f'the class folder {root}/{name} holds no image (endings: '
        f'{" ".join(files.IMAGES)}): fill or remove it, or set '
        '--config.source.allow_empty.'
      )
    paths += map(os.fsencode, found)
  return np.array(paths, dtype=np.bytes_)


def _images(
  root: str, folder: str, above: tuple[tuple[int, int], ...]
) -> Iterator[str]:
  """Images below a folder; a link to a folder above is not followed again."""
  here = _identity(f'{root}/{folder}')
  if here in above:
    return
  with os.scandir(f'{root}/{folder}') as entries:
    for entry in entries:
      if entry.name.startswith('.'):
        continue
      path = f'{folder}/{entry.name}'
      if _is_dir(entry):
        yield from _images(root, path, (*above, here))
      elif entry.name.lower().endswith(files.IMAGES):
        if not entry.is_file():
          raise UserError(
            f'{root}/{path} is a link to nothing, or no file: mend or remove '
            'it.'
          )
        yield path


def _identity(folder: str) -> tuple[int, int]:
  status = os.stat(folder)
  return status.st_dev, status.st_ino
