"""A list of images and labels: CSV or JSON lines.

CSV has the header `image,label` and may have the column `split`; each line of
JSONL is an object with the same keys. Without splits everything is 'train'.
Labels are whole numbers, or names of classes.
"""

import csv
import io
import json
import os
from typing import Any

import numpy as np

from vit_jax.data import classes, cuts, files, fingerprint, splits
from vit_jax.errors import UserError

_COLUMNS = ('image', 'label', 'split')


class Source:
  """One split of a manifest; images may be local or on gs://.

  Attributes:
    name: for messages, 'pets.csv/train'.
    num_classes: of the whole manifest, whatever the split, or of `class_map`.
    class_names: in the order of the labels.
  """

  def __init__(self, split: str, /, *, path: str, class_map: str | None = None):
    """Reads the list; images are read when they are asked for.

    Args:
      split: in the TFDS way: 'train', 'train[:99%]', 'train+validation'.
      path: of the manifest, ending in .csv or .jsonl. Images' paths are
        relative to its folder, absolute, or gs:// addresses.
      class_map: a text file with a class on each line, in the order of the
        labels, and after a tab its name for people if there is one. By default
        classes are the sorted names in the manifest, or the numbers up to the
        largest.

    Raises:
      UserError: no such file or split, a line that is no image with a label, or
        a class that is not in `class_map`.
    """
    path = path if files.is_remote(path) else os.path.expanduser(path)
    rows = _rows(path)
    known, labels = _labels(path, [row[1] for row in rows], class_map)
    self.name = f'{path}/{split}'
    self.num_classes = len(known.keys)
    self.class_names = known.names
    self._path = path
    images = np.array([row[0].encode() for row in rows], np.bytes_)
    lines = np.array([row[3] for row in rows], np.int64)
    there = {row[2]: row[2] for row in rows}
    there = splits.with_alias(there, split)
    self._columns = {}
    for name in splits.named(split, there):
      chosen = np.array([row[2] == there[name] for row in rows])
      self._columns[name] = (images[chosen], labels[chosen], lines[chosen])
    lengths = {name: len(each[0]) for name, each in self._columns.items()}
    self._selection = splits.Selection(
      split, lengths, lambda name: cuts.by_name(self._columns[name][0])
    )

  def __len__(self) -> int:
    return len(self._selection)

  def __getitem__(self, index: int) -> dict[str, Any]:
    image, label, _ = self._row(index)
    return {'image': files.read_image(image), 'label': label}

  @property
  def fingerprint(self) -> dict[str, Any]:
    """By what the data set is known again; see `data.fingerprint`."""
    chosen = []
    for split, rows in self._selection.rows():
      images, labels, _ = self._columns[split]
      chosen += [images[rows], labels[rows]]
    return fingerprint.sampled(self, *chosen)

  def where(self, index: int) -> str:
    """The file of an example, and the line that names it."""
    image, _, line = self._row(index)
    return f'{image} ({self._path}, line {line})'

  def _row(self, index: int) -> tuple[str, int, int]:
    split, position = self._selection[index]
    images, labels, lines = self._columns[split]
    image = files.join(os.path.dirname(self._path), images[position].decode())
    return image, int(labels[position]), int(lines[position])


def _rows(path: str) -> list[tuple[str, str, str, int]]:
  """(image, label, split, line number) of each line."""
  readers = {'.csv': _csv, '.jsonl': _jsonl}
  reader = readers.get(os.path.splitext(path)[1].lower())
  if reader is None:
    raise UserError(
      f'source.path is {path!r}; a manifest ends in {" or ".join(readers)}.'
    )
  rows = []
  for line, row in reader(path, files.read_text(path, 'source.path')):
    image, label, split = (row.get(key) for key in _COLUMNS)
    if not isinstance(image, str) or not image or not _is_label(label):
      raise UserError(
        f'{path}, line {line}, has image {image!r} and label {label!r}: give '
        'both, a path and a whole number or a name.'
      )
    rows.append((image, str(label), str(split or 'train'), line))
  if not rows:
    raise UserError(f'{path} lists no image: give one a line.')
  return rows


def _is_label(value: Any) -> bool:
  whole = isinstance(value, int) and not isinstance(value, bool)
  return whole or (isinstance(value, str) and bool(value))


def _csv(path: str, text: str):
  reader = csv.DictReader(io.StringIO(text, newline=''))
  missing = {'image', 'label'} - set(reader.fieldnames or ())
  if missing:
    raise UserError(
      f'{path} begins with the columns {reader.fieldnames}; it must have image '
      'and label, and may have split.'
    )
  for row in reader:
    yield reader.line_num, row


def _jsonl(path: str, text: str):
  for number, line in enumerate(text.splitlines(), 1):
    if line.strip():
      try:
        row = json.loads(line)
      except json.JSONDecodeError as error:
        raise UserError(
          f'{path}, line {number}, is no JSON: {error}.'
        ) from error
      if not isinstance(row, dict):
        raise UserError(
          f'{path}, line {number}, is a JSON {type(row).__name__}; it must be '
          'an object with image and label.'
        )
      yield number, row


def _labels(
  path: str, texts: list[str], class_map: str | None
) -> tuple[classes.Classes, np.ndarray]:
  """The classes, and the label of each line."""
  known = classes.load(class_map) if class_map else None
  numbers = [text for text in texts if text.isdecimal()]
  if len(numbers) == len(texts):
    labels = np.array([int(text) for text in texts], np.int64)
    known = classes.numbered(int(labels.max()), known, path)
    return known, labels
  if numbers and known is None:
    name = next(text for text in texts if not text.isdecimal())
    raise UserError(
      f'{path} has labels that are numbers ({numbers[0]!r}) and names '
      f'({name!r}): take one kind, or list all names in '
      '--config.source.class_map.'
    )
  known = known or classes.Classes(sorted(set(texts)))
  labels = [known.label(text, f'an image of {path}') for text in texts]
  return known, np.array(labels, np.int64)
