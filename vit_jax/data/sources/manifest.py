"""A list of images and labels: CSV or JSON lines.

CSV has the header `image,label` and optionally the column `split`; other
columns are ignored. Each line of JSONL is an object with the same keys. Without
splits, everything is 'train'. Labels are integers or class names; with a
separator, an image has several of them ('cat|dog'). Numbers in other columns
can be predicted instead of labels. Blanks around fields are ignored. Every line
must have the same form: any other line is an error with the line's number,
because a wrong guess would lead to a wrong label.
"""

import csv
import io
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from vit_jax.config import schema
from vit_jax.data import fingerprint
from vit_jax.data.storage import class_folders, splits
from vit_jax.data.storage import files as storage
from vit_jax.errors import UserError

# Texts of further columns: any text, and finite numbers.
_TEXT = re.compile('.+', re.DOTALL)
NUMBER = re.compile(r'[-+]?(\d+\.?\d*|\.\d+)(e[-+]?[012]?\d)?', re.IGNORECASE)
_SHOWN = 160  # maximum number of characters of a line in a message


class Row(NamedTuple):
  """One image of a list.

  Attributes:
    image: path as written in the list.
    label: integer or name, or several of them, as text; '' if the list has no
      labels.
    split: name of the split; 'train' if the list has no splits.
    line: line number in the list, from 1.
    others: further columns that the source uses.
  """

  image: str
  label: str
  split: str
  line: int
  others: tuple[str, ...] = ()


# Description of the format, which ends each message about a line.
_FORM = (
  'All lines must have an image (a local path or gs:// address), a label (a '
  'name or an integer, the same for each line of an image) and, optionally, a '
  'split (a name); lists of images without labels have no other columns than '
  'image and split, or those that the config names. Columns in source.numbers '
  'have finite numbers, such as -3.5 or 1e-4; with source.separator, the names '
  'of classes do not contain any other of | ; and comma. The first line of a '
  'CSV file lists the columns in lower case; fields with commas need quotes.'
)


def read(path: str, others: Mapping[str, re.Pattern] = {}) -> list[Row]:
  """Reads a list; blanks around fields, blank lines and a BOM are ignored.

  Repeated images are allowed, so that they can have a higher weight.

  Args:
    path: path ending in .csv or .jsonl, local or remote.
    others: further columns that every line must have, with the pattern of their
      text. With them, a list without the column label has no labels.

  Raises:
    UserError: the file does not exist, has another format, or lists no image; a
      line does not have an image and a label; only some lines have a split; or
      a split lists an image with two labels.
  """
  readers = {'.csv': _csv, '.jsonl': _jsonl}
  reader = readers.get(os.path.splitext(path)[1].lower())
  if reader is None:
    raise UserError(
      f'source.path is {path!r}; a manifest ends in {" or ".join(readers)}.'
    )
  text = storage.read_text(path, 'source.path')
  rows: list[Row] = []
  by_image: dict[tuple[str, str], Row] = {}
  try:
    for line, fields in reader(text):
      row = _row(line, fields, others)
      rows.append(row)
      same = by_image.setdefault((row.split, row.image), row)
      expected = (not rows[0].split, not rows[0].label)
      if (not row.split, not row.label) != expected:
        raise ValueError(f'line {line} lacks a field, or others do')
      if row.label != same.label:
        raise ValueError(
          f'lines {same.line} and {line} have other labels of {row.image}'
        )
    if not rows:
      raise ValueError('it lists no image')
  except (ValueError, TypeError, RecursionError, csv.Error) as error:
    last = rows[-1].line if rows else 0
    raise UserError(
      f'{path} cannot be read after line {last}: {error}. {_FORM}'
    ) from error
  if not rows[0].split:
    rows = [row._replace(split='train') for row in rows]
  return rows


def _csv(text: str) -> Iterator[tuple[int, dict[str, Any]]]:
  """Yields (line number, fields) of a CSV file."""
  lines = io.StringIO(text, newline='')
  reader = csv.DictReader(lines, strict=True, skipinitialspace=True)
  reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
  for fields in reader:
    values = list(fields.values())
    if not any(each.strip() for each in values if isinstance(each, str)):
      continue  # a blank line
    if None in fields or None in values:
      raise ValueError(f'too few or too many fields: {str(values)[:_SHOWN]}')
    yield reader.line_num, fields


def _jsonl(text: str) -> Iterator[tuple[int, dict[str, Any]]]:
  """Yields (line number, object) of a file of JSON lines."""
  # Not splitlines(): JSON strings may contain U+2028 and other line separators.
  for number, line in enumerate(io.StringIO(text, newline=None), 1):
    if line.strip():
      yield number, dict(json.loads(line))


def _row(
  line: int, fields: dict[str, Any], others: Mapping[str, re.Pattern]
) -> Row:
  """Checks the fields of a line and returns them as a row.

  Raises:
    ValueError: a field is missing or invalid.
  """
  image, split = fields.get('image'), fields.get('split')
  texts = {name: str(fields.get(name, '')).strip() for name in others}
  if 'label' in others:  # several labels, which `others` checks
    label = texts['label']
  elif 'label' in fields:
    label = class_folders.text_of(fields['label'])
  else:  # allowed if the list has no unused columns
    no_more = others or fields.keys() <= {'image', 'split'}
    label = '' if no_more else None
  if (
    label is None
    or not all(map(re.fullmatch, others.values(), texts.values()))
    or not isinstance(split, str | None)
    or not (isinstance(image, str) and image.strip())
    or (storage.is_remote(image) and not image.strip().startswith('gs://'))
  ):
    raise ValueError(f'line {line} has {str(fields)[:_SHOWN]}')
  split = (split or '').strip()
  return Row(image.strip(), label, split, line, tuple(texts.values()))


def _labels(cell: str, separator: str) -> list[str]:
  """Returns the labels in a cell; [] if it contains only the separator.

  Without a separator (''), the whole cell is one label.
  """
  if not separator:
    return [cell]
  names = map(str.strip, cell.split(separator))
  return [name for name in names if name]


class _Columns(NamedTuple):
  """The examples of a split.

  Attributes:
    image: path of each image as in the list, bytes `[n]`.
    label: label of each image, int64 `[n]`; -1 if it does not have one label.
    line: line number in the list, `[n]`.
    others: further columns, str `[n, columns]`.
  """

  image: np.ndarray
  label: np.ndarray
  line: np.ndarray
  others: np.ndarray


@schema.operational('path', 'class_map')
class Source(splits.Selected):
  """One split of a manifest; images may be local or on gs://.

  Attributes:
    name: name for messages, such as 'pets.csv/train'.
    num_classes: number of classes in `class_map`; without it, in the whole
      manifest, not only in the split.
    class_names: names of the classes, in the order of the labels, or columns of
      the numbers.
  """

  def __init__(
    self,
    split: str,
    /,
    *,
    path: str,
    class_map: str | None = None,
    texts: tuple[str, ...] = (),
    files: tuple[str, ...] = (),
    separator: str = '',
    numbers: tuple[str, ...] = (),
  ):
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
      texts: further columns, whose text the examples contain.
      files: further columns with paths, whose content the examples contain.
      separator: character between the labels of an image, such as '|'. The
        examples then have `labels`, a list of integers, and no `label`; the
        list is empty if the column contains only the separator.
      numbers: columns with numbers, which the examples contain as floats, and
        no labels.

    Raises:
      UserError: the file or split does not exist, a line does not have an image
        and a label, labels are not separated, a number is not finite, or the
        labels do not determine the classes (see `class_folders.number`).
    """
    path = storage.expanded(path)
    self._files, self._numbers, self._separator = files, numbers, separator
    others = dict.fromkeys((*texts, *files), _TEXT)
    others |= dict.fromkeys(numbers, NUMBER)
    if separator and not numbers:  # another separator is a mistake
      others['label'] = re.compile(rf'({re.escape(separator)}|[^|;,])+')
    rows, self._keys = read(path, others), tuple(others)
    # The first line with each label, for messages.
    lines: dict[str, int] = {}
    for row in rows:
      for label in _labels('' if numbers else row.label, separator):
        lines.setdefault(label, row.line)
    classes, self._indices = class_folders.number(
      lines,
      lambda label: f'{path}, line {lines[label]},',
      class_folders.load(class_map) if class_map else None,
      whole=True,
    )
    self.label_keys = ('labels',) if separator else ('label',)
    if numbers:
      classes, self.label_keys = class_folders.Classes(numbers), ()
    self._path = path
    images = np.array([row.image.encode() for row in rows], np.bytes_)
    labels = [self._indices.get(row.label, -1) for row in rows]
    line = np.array([row.line for row in rows], np.int64)
    shape = len(rows), len(self._keys)
    texts_of_rows = np.array([row.others for row in rows], np.str_)
    columns = _Columns(
      images, np.array(labels, np.int64), line, texts_of_rows.reshape(shape)
    )
    aliases = splits.with_alias({row.split: row.split for row in rows}, split)
    self._columns = {}
    for name in splits.named(split, aliases):
      chosen = np.array([row.split == aliases[name] for row in rows])
      self._columns[name] = _Columns(*(column[chosen] for column in columns))
    lengths = {name: len(each.line) for name, each in self._columns.items()}
    self.name = f'{path}/{split}'
    self.num_classes, self.class_names = len(classes.keys), classes.names
    self._selection = splits.Selection(split, lengths, self._cut_order)

  def __getitem__(self, index: int) -> dict[str, Any]:
    columns, row = self._find(index)
    texts = columns.others[row].tolist()
    example: dict[str, Any] = dict(zip(self._keys, texts, strict=True))
    for name in self._files:
      example[name] = storage.read_other(self._path_of(example[name]))
    for name in self._numbers:
      example[name] = float(example[name])
    if 'labels' in self.label_keys:
      names = _labels(example.pop('label'), self._separator)
      example['labels'] = [self._indices[name] for name in names]
    if 'label' in self.label_keys:
      example['label'] = int(columns.label[row])
    return {'image': storage.read_image(self._image_path(index)), **example}

  def _path_of(self, name: str) -> str:
    """Returns the path of a file that the list names."""
    return storage.join(os.path.dirname(self._path), name)

  @property
  def fingerprint(self) -> dict[str, Any]:
    """Dataset fingerprint, compared when a run is resumed.

    See `data.fingerprint`.
    """
    chosen = []
    for split, rows in self._selection.rows():
      columns = self._columns[split]
      chosen += [columns.image[rows], columns.label[rows]]
      if columns.others.size:
        chosen.append(np.char.encode(columns.others[rows], 'utf-8'))
    sizes = fingerprint.file_sizes(len(self), self._image_path)
    return fingerprint.sampled(self, *chosen, file_sizes=sizes)

  def where(self, index: int) -> str:
    """Returns the file of an example, and its line in the list."""
    columns, row = self._find(index)
    line = columns.line[row]
    return f'{self._image_path(index)} ({self._path}, line {line})'

  def labels(self) -> Int[np.ndarray, ' n']:
    """Returns the labels of all examples; -1 for those without a label."""
    if 'label' not in self.label_keys:
      return np.full(len(self), -1)
    labels = {name: each.label for name, each in self._columns.items()}
    return self._selection.gather(labels)

  def _cut_order(self, split: str) -> Int[np.ndarray, ' n']:
    return splits.by_name(self._columns[split].image)

  def _find(self, index: int) -> tuple[_Columns, int]:
    """Returns the columns of an example's split, and its row in them."""
    split, row = self._selection[index]
    return self._columns[split], row

  def _image_path(self, index: int) -> str:
    """Returns the path of the image of an example."""
    columns, row = self._find(index)
    return self._path_of(columns.image[row].decode())
