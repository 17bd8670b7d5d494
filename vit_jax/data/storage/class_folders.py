"""Lists the images of a directory with one folder per class.

`Classes` contains the label and the display name of each class, from a list or
from the names of folders; the sources `manifest`, `tar` and `huggingface` use
it too.
"""

import collections
import io
import logging
import os
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from vit_jax.data import progress
from vit_jax.data.storage import files, splits
from vit_jax.errors import UserError, closest

log = logging.getLogger('vit_jax')
# Name of the only class of images without labels.
UNLABELLED = 'unlabelled'
# Names of the classes of boolean labels.
BOOLEANS = ['False', 'True']
# The directory itself, as the only class folder, if it has images but no
# folders.
ITSELF = '.'
_MAX_CLASSES = 1_000_000  # maximum number of classes without a list of classes
# Numbers, including some that cannot be labels, such as '-1' and '1.5'.
_NUMBER = re.compile(r'[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?', re.IGNORECASE)
_SHOWN_CHARACTERS = 50  # maximum number of characters of a label in a message
_SHOWN = 8  # maximum number of folders in a message


class Classes:
  """The classes of a dataset, in the order of their labels.

  Attributes:
    keys: names as in the dataset (of folders, or of labels in a file).
    names: display names.
  """

  def __init__(self, keys: Iterable[str], names: Iterable[str] | None = None):
    self.keys = list(keys)
    self.names = list(self.keys if names is None else names)
    # macOS may store names in another normal form of Unicode than Linux. Equal
    # names precede names that are equal in their composed form.
    self._index = {_composed(key): i for i, key in enumerate(self.keys)}
    self._index |= {key: i for i, key in enumerate(self.keys)}

  def label(self, key: str, where: str) -> int:
    """Returns the label of a class.

    Args:
      key: name of the class in the dataset.
      where: file, and line if there is one, for the message.

    Raises:
      UserError: the class does not exist.
    """
    label = self._index.get(key, self._index.get(_composed(key)))
    if label is None:
      raise UserError(
        f'{where} has the class {key!r}, which is not one of the '
        f'{len(self.keys)} classes; {closest(key, self.keys)}.'
      )
    return label


def _composed(name: str) -> str:
  """Returns a name in Unicode's composed normal form (NFC)."""
  return unicodedata.normalize('NFC', name)


def load(path: str) -> Classes:
  """Reads a list of classes: one per line, in the order of their labels.

  A line contains the class as in the dataset, and optionally a tab and its
  display name: 'n01440764<TAB>tench'. Blank lines are ignored.

  Args:
    path: path of the text file, local or remote.

  Raises:
    UserError: the file cannot be read, is empty, or lists a class twice.
  """
  text = files.read_text(os.path.expanduser(path), 'source.class_map')
  rows = [
    [part.strip() for part in line.split('\t', 1)]
    for line in io.StringIO(text, newline=None)
    if line.strip()
  ]
  keys = [row[0] for row in rows]
  repeated = [key for key, n in collections.Counter(keys).items() if n > 1]
  if not keys or repeated:
    problem = f'{repeated[0]} more than once' if repeated else 'no class'
    raise UserError(f'{path} lists {problem}: give each class one line.')
  return Classes(keys, [row[-1] for row in rows])


def text_of(value: Any) -> str | None:
  """Converts a label in a list or a JSON file to text.

  Args:
    value: an integer, or a name, from which surrounding blanks are removed.

  Returns:
    Text of the label; None if the value has another type or is blank.
  """
  if isinstance(value, int) and not isinstance(value, bool):
    return str(value)
  return (value.strip() or None) if isinstance(value, str) else None


def number(
  texts: Collection[str],
  where: Callable[[str], str],
  known: Classes | None = None,
  *,
  whole: bool,
) -> tuple[Classes, dict[str, int]]:
  """Numbers the classes of a dataset, given its distinct labels.

  With a list of classes, labels are keys of the list or, if all labels and none
  of the keys are integers, positions in the list, from 0. Without a list, the
  classes are 0 to the largest label if labels are integers, and the sorted
  labels if they are names.

  Args:
    texts: distinct labels; only '' for images without labels.
    where: function from a label to its file, and line if there is one, for
      messages.
    known: list of classes, if there is one.
    whole: whether `texts` contains all labels of the dataset, so that names can
      be numbered.

  Returns:
    Classes, and {label: index of its class}.

  Raises:
    UserError: a label is not in the list; or there is no list, and the labels
      do not determine the classes.
  """
  texts = sorted(texts)
  if texts == ['']:  # images without labels
    return Classes([''], [UNLABELLED]), {'': 0}
  # '-1' and '1.5' are in both lists, and are refused below without a list.
  names = [text for text in texts if not text.isdecimal()]
  numbers = [text for text in texts if _NUMBER.fullmatch(text)]
  # 1. Labels are keys of the list.
  if known and (names or any(key.isdecimal() for key in known.keys)):
    return known, {text: known.label(text, where(text)) for text in texts}
  # 2. Labels are names, and all of them are given.
  if whole and not numbers:
    return Classes(names), {name: i for i, name in enumerate(names)}
  # 3. Labels must be integers: positions in the list, or classes.
  count = len(known.keys) if known else _MAX_CLASSES
  # Unlike int, float also accepts thousands of digits.
  largest = max(numbers, key=float, default='')
  if names or float(largest or 0) >= count:
    listed = ' and '.join(
      f'{where(text)} has the label {text[:_SHOWN_CHARACTERS]!r}'
      for text in dict.fromkeys((*names[:1], largest))
      if text
    )
    raise UserError(
      f'{listed}; labels must be integers, 0 to {count - 1:,}, or listed in '
      '--config.source.class_map, one per line: the label, a tab, a name (a '
      'Hugging Face data set: save them as a ClassLabel).'
    )
  known = known or Classes(map(str, range(int(largest) + 1)))
  return known, {text: int(text) for text in texts}


class Listing(NamedTuple):
  """The images of a split.

  Attributes:
    root: directory of the class folders.
    classes: names of the folders, sorted, including those without images.
    paths: paths relative to the root, bytes `[n]`, sorted by class and then by
      path. An array of fixed width is smaller than a list of str, and is passed
      to worker processes quickly.
    folders: index of the class folder of each image.
  """

  root: str
  classes: list[str]
  paths: np.ndarray
  folders: Int[np.ndarray, ' n']


def roots(path: str, key: str, flat: bool = False) -> dict[str, str]:
  """Returns the directory of each split: {'train': 'photos/train', …}.

  Folders named for a split (train or training, val, validation, valid or dev,
  test or testing, in any case) are splits if they contain folders; all other
  folders are then left out. Without such folders, the path itself is the split
  'train'.

  Args:
    path: path of the directory.
    key: config key that contains the path, for the message: 'source.path'.
    flat: whether folders named for a split are splits without folders, too.

  Raises:
    UserError: the directory does not exist, or it cannot be read.
  """
  if not os.path.isdir(path):  # also if it is too long or contains NUL
    raise UserError(
      f'{key} is {path!r}, which is not a directory: give one with a folder '
      'for each class, or with such folders in train/ and val/.'
    )
  folders = _folders(path)
  names = [
    n for n in folders if splits.kind(n) and (flat or _folders(f'{path}/{n}'))
  ]
  if not names:
    if len(folders) > 1 and all(map(splits.kind, folders)):
      log.warning(
        '%s contains %s without folders in them, which are taken as classes. '
        'If they are splits without labels, give one of them as the path.',
        path,
        ', '.join(folders),
      )
    return {'train': path}
  others = [name for name in folders if name not in names]
  if others:
    text = '%s contains the splits %s; its other folders are left out: %s'
    log.warning(text, path, ', '.join(names), ', '.join(others[:_SHOWN]))
  ranks = list(splits.KINDS)
  names.sort(key=lambda name: ranks.index(splits.kind(name) or ''))
  return {name: f'{path}/{name}' for name in names}


def names(root: str, endings: tuple[str, ...] = files.IMAGES) -> list[str]:
  """Returns the class folders of a directory, sorted.

  Args:
    root: directory of the class folders.
    endings: endings of the image files, in lower case.

  Returns:
    Names of the folders; [`ITSELF`] for a directory that contains images, but
    no folders.

  Raises:
    UserError: there are neither folders nor images, or the directory cannot be
      read.
  """
  folders, images, others = _entries(root, endings)
  for name in others:
    # Leaving out a class would shift the labels of all later classes.
    if name[0] != '.' and not os.path.exists(f'{root}/{name}'):
      raise _unreadable(f'{root}/{name}', 'a broken link')
  if folders or images:
    return folders or [ITSELF]
  raise UserError(
    f'{root} contains no folders: each class needs one with its images. For a '
    "list of images and labels, use config.source.name='manifest'."
  )


def listing(
  root: str,
  *,
  endings: tuple[str, ...] = files.IMAGES,
  allow_empty: bool = False,
) -> Listing:
  """Finds the images in the class folders of a directory.

  The class of an image is the folder in the root that contains it, at any
  depth. Links are followed, but not in circles. Hidden files and folders, and
  files with another ending, are left out.

  Args:
    root: directory of the class folders.
    endings: endings of the image files, in lower case.
    allow_empty: whether class folders may have no images.

  Raises:
    UserError: there is no class folder, no image, or a class without images;
      an image or a class is a broken link; or a folder cannot be read.
  """
  classes, paths, folders = [], [], []
  # What is left out is only counted, because it may be millions of files.
  num_left_out, example = 0, ''
  for name, images, not_images in _walk(root, endings):
    num_left_out += len(not_images)
    if not_images and not example:
      example = not_images[0]
    if name is None:
      continue
    if not images and not allow_empty:
      others, advice = '', ''
      if not_images:
        others = f', but {len(not_images)} other files {not_images[:3]}'
        advice = 'convert these, '
      raise UserError(
        f'the class folder {root}/{name} contains no image '
        f'({" ".join(endings)}){others}: {advice}fill or remove the folder, or '
        'set --config.source.allow_empty.'
      )
    paths += map(os.fsencode, images)
    folders += [len(classes)] * len(images)
    classes.append(name)
  if classes and not paths:
    raise UserError(
      f'the class folders of {root} contain no image ({" ".join(endings)}): '
      'fill them, or give another directory.'
    )
  if num_left_out:
    log.info('%d files are left out, such as %s', num_left_out, example)
  return Listing(
    root,
    classes,
    np.array(paths, np.bytes_),
    np.array(folders, np.int32),
  )


def ignored(root: str, endings: tuple[str, ...]) -> Iterator[str]:
  """Yields the full paths of what `listing` leaves out in a directory."""
  for _, _, not_images in _walk(root, endings):
    yield from not_images


def _walk(
  root: str, endings: tuple[str, ...]
) -> Iterator[tuple[str | None, list[str], list[str]]]:
  """Yields each class folder, its images, and what is left out in it.

  The first item has the files next to the class folders, and None as the name.
  Images are relative to the root and sorted; what is left out has full paths.
  """
  classes = names(root, endings)
  above = ()  # the root is not above itself
  if classes != [ITSELF]:
    above = (_identity(root),)
    _, images, others = _entries(root, endings)
    yield None, [], [f'{root}/{name}' for name in images + others]
  for name in classes:
    not_images: list[str] = []
    images = sorted(_images(root, name, endings, above, not_images))
    yield name, images, not_images


def images(
  folder: str, endings: tuple[str, ...] = files.IMAGES
) -> Iterator[str]:
  """Yields the paths of the images in a folder, at any depth.

  As in class folders, links are followed, and hidden files are left out.

  Args:
    folder: path of the folder.
    endings: endings of the image files, in lower case.

  Raises:
    UserError: an image is a broken link, or a folder cannot be read.
  """
  for path in _images(folder, ITSELF, endings, (), []):
    yield os.path.join(folder, os.path.normpath(path))


def _entries(
  folder: str, endings: tuple[str, ...] = ()
) -> tuple[list[str], list[str], list[str]]:
  """Returns the names of the folders, the images and the others in a folder.

  Raises:
    UserError: the folder cannot be read, or an image is a broken link.
  """
  folders, images, others = [], [], []
  try:
    with os.scandir(folder) as entries:
      for entry in entries:
        if entry.name.startswith('.'):
          others.append(entry.name)
        elif _is(entry.is_dir):
          folders.append(entry.name)
        elif not entry.name.lower().endswith(endings):
          others.append(entry.name)
        elif _is(entry.is_file):
          images.append(entry.name)
        else:
          raise _unreadable(entry.path, 'a broken link')
  except OSError as error:
    raise _unreadable(folder, error.strerror) from error
  return sorted(folders), images, sorted(others)


def _is(kind: Callable[[], bool]) -> bool:
  """Calls `DirEntry.is_dir` or `DirEntry.is_file`; returns False if it fails.

  They raise OSError for a link to itself or into a folder that cannot be read.
  """
  try:
    return kind()
  except OSError:
    return False


def _folders(folder: str) -> list[str]:
  """Returns the names of the folders in a folder, sorted."""
  return _entries(folder)[0]


def _images(
  root: str,
  folder: str,
  endings: tuple[str, ...],
  above: tuple[tuple[int, int], ...],
  left_out: list[str],
) -> Iterator[str]:
  """Yields the images below a folder.

  Args:
    root: directory of the class folders.
    folder: path of the folder relative to the root.
    endings: endings of the image files, in lower case.
    above: identities (see `_identity`) of the folders that contain this folder;
      links to them are not followed.
    left_out: paths of the files that are left out, to which more are added.
  """
  identity = _identity(f'{root}/{folder}')
  if identity in above:
    return
  progress.made()  # restarts the time limit of a run's watchdog
  path = f'{root}/{folder}'
  folders, images, others = _entries(path, endings)
  left_out += [f'{path}/{name}' for name in others]
  yield from (f'{folder}/{name}' for name in images)
  for name in folders:
    yield from _images(
      root, f'{folder}/{name}', endings, (*above, identity), left_out
    )


def _identity(folder: str) -> tuple[int, int]:
  """Returns values that are equal for all paths of the same folder."""
  status = os.stat(folder)
  return status.st_dev, status.st_ino


def _unreadable(path: str, reason: str | None) -> UserError:
  return UserError(
    f'{path} cannot be read ({reason}): repair it or its permissions, or move '
    'it elsewhere.'
  )
