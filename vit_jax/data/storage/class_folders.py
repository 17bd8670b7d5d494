"""Lists the images of a directory with one folder per class.

The source `folder` and the command `prepare folder` both use this module, so
that both find the same examples in a directory. `Classes` contains the label
and the display name of each class, from a list or from the names of folders;
the sources `manifest`, `tar` and `huggingface` use it too.
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

_MOST = 1_000_000  # maximum number of classes without a list of classes
_NUMBER = re.compile(r'[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?', re.IGNORECASE)
# Name of the only class of images without labels.
UNLABELLED = 'unlabelled'
# Names of the classes of boolean labels.
BOOLEANS = ['False', 'True']
_DIGITS = 18  # all integers of up to 18 digits fit into int64
_REMEDY = (
  'Number them like this, or list them in --config.source.class_map, one per '
  'line: the label, a tab, a name.'
)
log = logging.getLogger('vit_jax')
_SHOWN_CHARACTERS = 50  # maximum number of characters of a label in a message
_SHOWN = 8  # maximum number of folders or kinds of files in a message
# The root itself, as the only class of a directory of images without folders.
WHOLE = '.'
_FOLDER, _FILE, _HIDDEN, _NOTHING = 'folder', 'file', 'hidden', 'no file'


class Classes:
  """The classes of a dataset, in the order of their labels.

  Attributes:
    keys: names as in the dataset (of folders, or of labels in a file).
    names: display names.
  """

  def __init__(self, keys: Iterable[str], names: Iterable[str] | None = None):
    self.keys = list(keys)
    self.names = list(self.keys if names is None else names)
    # macOS may store names in another normal form of Unicode than Linux.
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


def of_unlabelled(key: str) -> Classes:
  """Returns the class of images without labels.

  Args:
    key: name of the class in the dataset.
  """
  return Classes([key], [UNLABELLED])


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
  remedy: str = _REMEDY,
) -> tuple[Classes, dict[str, int]]:
  """Numbers the classes of a dataset, given its distinct labels.

  With a list of classes, labels are keys of the list or, if all labels and none
  of the keys are integers, positions in the list, from 0. Without a list, the
  classes are 0 to the largest label if labels are integers, and the sorted
  labels if they are names.

  Args:
    texts: distinct labels.
    where: function from a label to its file, and line if there is one, for
      messages.
    known: list of classes, if there is one.
    whole: whether `texts` contains all labels of the dataset, so that names can
      be numbered.
    remedy: advice about labels that are not 0 to (number of classes - 1), for
      messages.

  Returns:
    Classes, and {label: index of its class}.

  Raises:
    UserError: a label is not in the list; or there is no list, and the labels
      do not determine the classes.
  """
  texts = sorted(texts)
  names = [text for text in texts if not text.isdecimal()]
  # More than 18 digits give 10^18, to fit into int64.
  values = {
    text: int(text) if len(text) <= _DIGITS else 10**_DIGITS
    for text in texts
    if text.isdecimal()
  }
  if known and (names or any(key.isdecimal() for key in known.keys)):
    return known, {text: known.label(text, where(text)) for text in texts}
  if whole and not values and not any(map(_NUMBER.fullmatch, names)):
    return Classes(names), {name: i for i, name in enumerate(names)}
  count = len(known.keys) if known else _MOST
  largest = max(values, key=values.__getitem__, default='')
  if names or values[largest] >= count:
    numeric = next(filter(_NUMBER.fullmatch, names), largest)
    found = dict.fromkeys(text for text in (*names[:1], numeric) if text)
    listed = ' and '.join(
      f'{where(text)} has the label {text[:_SHOWN_CHARACTERS]!r}'
      for text in found
    )
    raise UserError(
      f'{listed}; labels must be integers, 0 to {count - 1:,}, or names in a '
      f'list of classes or of all images. {remedy}'
    )
  return known or Classes(map(str, range(values[largest] + 1))), values


class Listing(NamedTuple):
  """The images of a split.

  Attributes:
    root: directory of the class folders.
    classes: names of the folders, sorted, including those without images.
    paths: paths relative to the root, bytes `[n]`, sorted by class and then by
      path. An array of fixed width is smaller than a list of str, and is passed
      to worker processes quickly.
    counts: number of images of each class.
    left_out: number of ignored files of each kind.
  """

  root: str
  classes: list[str]
  paths: np.ndarray
  counts: Int[np.ndarray, ' classes']
  left_out: collections.Counter[str]


def roots(path: str, key: str) -> dict[str, str]:
  """Returns the directory of each split: {'train': 'photos/train', …}.

  Folders named for a split (train or training, val, validation, valid or dev,
  test or testing, in any case) are splits if they contain folders; all other
  folders are then left out. Without such folders, the path itself is the split
  'train'.

  Args:
    path: path of the directory.
    key: config key that contains the path, for the message: 'source.path'.

  Raises:
    UserError: the directory does not exist, or it cannot be read.
  """
  if not os.path.isdir(path):  # also if it is too long or contains NUL
    raise UserError(
      f'{key} is {path!r}, which is not a directory: give one with a folder '
      'for each class, or with such folders in train/ and val/.'
    )
  folders = _folders(path)
  names = [n for n in folders if splits.kind(n) and _folders(f'{path}/{n}')]
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
    log.warning(
      '%s contains the splits %s; its other folders are left out: %s',
      path,
      ', '.join(names),
      ', '.join(others[:_SHOWN]),
    )
  ranks = list(splits.KINDS)
  names.sort(key=lambda name: ranks.index(splits.kind(name) or ''))
  return {name: f'{path}/{name}' for name in names}


def names(root: str, endings: tuple[str, ...] = files.IMAGES) -> list[str]:
  """Returns the class folders of a directory, sorted.

  Args:
    root: directory of the class folders.
    endings: endings of the image files, in lower case.

  Returns:
    Names of the folders; [`WHOLE`] for a directory that contains images, but no
    folders.

  Raises:
    UserError: there are neither folders nor images, or the directory cannot be
      read.
  """
  folders = _folders(root)
  if folders:
    return folders
  if any(
    kind == _FILE and name.lower().endswith(endings)
    for name, kind in _entries(root)
  ):
    return [WHOLE]
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
    UserError: there is no class folder, or one without images; an image or a
      class is a broken link; or a folder cannot be read.
  """
  left_out: collections.Counter[str] = collections.Counter()
  classes, paths, counts = names(root, endings), [], []
  entries = _entries(root)
  if classes == [WHOLE]:
    entries = [(WHOLE, _FOLDER)]
  for name, kind in entries:
    if kind == _FOLDER:
      own: collections.Counter[str] = collections.Counter()
      above = () if name == WHOLE else (_identity(root),)
      images = sorted(_images(root, name, endings, above, own))
      if not images and not allow_empty:
        raise UserError(
          f'the class folder {root}/{name} contains no image '
          f'({" ".join(endings)}), but {_kinds(own) or "nothing"}: fill or '
          'remove it, or train with --config.source.allow_empty.'
        )
      paths += map(os.fsencode, images)
      counts.append(len(images))
      left_out += own
    elif kind == _NOTHING:
      raise _unreadable(f'{root}/{name}', 'a broken link')
    else:
      left_out[_ignored_kind(name, kind)] += 1
  return Listing(
    root,
    classes,
    np.array(paths, np.bytes_),
    np.array(counts, np.int64),
    left_out,
  )


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
  for path in _images(folder, WHOLE, endings, (), collections.Counter()):
    yield os.path.join(folder, os.path.normpath(path))


def report(found: Listing) -> None:
  """Logs which files were left out, and whether there is only one class."""
  if found.left_out:
    log.info('%s: left out: %s', found.root, _kinds(found.left_out))
  if found.classes == [WHOLE]:
    log.info('%s contains no folders: its images have no labels', found.root)
  elif len(found.classes) == 1:
    log.info(
      '%s contains a single class, %r, so that there is nothing to learn. Each '
      'class needs its own folder in it.',
      found.root,
      found.classes[0],
    )


def ignored(found: Listing) -> Iterator[str]:
  """Yields the full paths of files below the root that a listing leaves out."""
  listed = {os.path.normpath(path) for path in found.paths.tolist()}
  for folder, subfolders, names in os.walk(found.root):
    subfolders.sort()
    for name in sorted(names):
      path = os.path.join(folder, name)
      if os.fsencode(os.path.relpath(path, found.root)) not in listed:
        yield path


def _entries(folder: str) -> list[tuple[str, str]]:
  """Returns (name, kind) of each entry of a folder, sorted."""
  try:
    with os.scandir(folder) as entries:
      return sorted((entry.name, _kind(entry)) for entry in entries)
  except OSError as error:
    raise _unreadable(folder, error.strerror) from error


def _kind(entry: os.DirEntry) -> str:
  """Returns the kind of an entry: a folder, a file, hidden, or neither."""
  if entry.name.startswith('.'):
    return _HIDDEN
  try:
    if entry.is_dir():
      return _FOLDER
    return _FILE if entry.is_file() else _NOTHING
  except OSError:  # a link to itself, or into a folder that cannot be read
    return _NOTHING


def _folders(folder: str) -> list[str]:
  return [name for name, kind in _entries(folder) if kind == _FOLDER]


def _images(
  root: str,
  folder: str,
  endings: tuple[str, ...],
  above: tuple[tuple[int, int], ...],
  left_out: collections.Counter[str],
) -> Iterator[str]:
  """Yields the images below a folder.

  Args:
    root: directory of the class folders.
    folder: path of the folder relative to the root.
    endings: endings of the image files, in lower case.
    above: identities (see `_identity`) of the folders that contain this folder;
      links to them are not followed.
    left_out: number of ignored files of each kind, which is updated.
  """
  own = _identity(f'{root}/{folder}')
  if own in above:
    return
  progress.made()
  for name, kind in _entries(f'{root}/{folder}'):
    path = f'{folder}/{name}'
    if kind == _FOLDER:
      yield from _images(root, path, endings, (*above, own), left_out)
    elif kind == _HIDDEN or not name.lower().endswith(endings):
      left_out[_ignored_kind(name, kind)] += 1
    elif kind == _NOTHING:
      raise _unreadable(f'{root}/{path}', 'a broken link')
    else:
      yield path


def _identity(folder: str) -> tuple[int, int]:
  status = os.stat(folder)
  return status.st_dev, status.st_ino


def _ignored_kind(name: str, kind: str) -> str:
  """Returns the kind under which an ignored entry is counted: '.txt'."""
  if kind != _FILE:
    return kind
  return os.path.splitext(name)[1].lower() or 'without ending'


def _kinds(left_out: collections.Counter[str]) -> str:
  """Describes ignored files: '3 .txt, 2 hidden', with advice about HEIC."""
  ranked = left_out.most_common(_SHOWN)
  text = ', '.join(f'{count} {name}' for name, count in ranked)
  if '.heic' in left_out or '.heif' in left_out:
    text += ' (HEIC is not decoded: `magick mogrify -format jpg *.heic`)'
  return text


def _unreadable(path: str, reason: str | None) -> UserError:
  return UserError(
    f'{path} cannot be read ({reason}): repair it or its permissions, or move '
    'it elsewhere.'
  )
