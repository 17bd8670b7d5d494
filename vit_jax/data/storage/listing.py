"""Lists of images and labels: CSV with a header, or JSON lines.

Every line must have the same form. Any other line is reported as an error with
the line's number, because a wrong guess would lead to a wrong label.
"""

import csv
import io
import json
import os
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from vit_jax.data.storage import classes, files
from vit_jax.errors import UserError

# Names of columns in the lists of other programs.
_SYNONYMS = {
  'image': ('image', 'filename', 'file', 'file_name', 'filepath', 'path'),
  'label': ('label', 'labels', 'class', 'class_name', 'category', 'target'),
  'split': ('split', 'subset', 'set', 'fold'),
}


class Row(NamedTuple):
  """One image of a list.

  Attributes:
    image: path as written in the list.
    label: integer or name, as text; '' if the list has no labels.
    split: name of the split; 'train' if the list has no splits.
    line: line number in the list, from 1.
  """

  image: str
  label: str
  split: str
  line: int


def read(path: str) -> list[Row]:
  """Reads a list; blanks around fields, blank lines and a BOM are ignored.

  Args:
    path: path ending in .csv or .jsonl, local or remote.

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
  text = files.read_text(path, 'source.path')
  rows = [_row(path, line, fields) for line, fields in reader(path, text)]
  if not rows:
    raise UserError(f'{path} lists no image: list one per line.')
  without = [row for row in rows if not row.split]
  if 0 < len(without) < len(rows):
    raise UserError(
      f'{path}, line {without[0].line}, has no split, but others have one: '
      'give every line a split, or none.'
    )
  if without:
    rows = [row._replace(split='train') for row in rows]
  unlabelled = [row for row in rows if not row.label]
  if 0 < len(unlabelled) < len(rows):
    raise UserError(
      f'{path}, line {unlabelled[0].line}, has no label, but others have one: '
      'give every line a label, or none.'
    )
  _check_repeats(path, rows)
  return rows


def _has_known_labels(names: Collection[str]) -> bool:
  """Returns whether there are labels, or nothing that could contain them."""
  return 'label' in names or set(names) <= {'image', 'split'}


def _remedy(header: list[str]) -> str:
  """Describes how to change the header of another program, if it is clear."""
  changes = []
  for name in header:
    separators = [each for each in '\t;|' if each in name]
    if separators:
      return f': replace the separator {separators[0]!r} by commas'
    known = next((k for k, v in _SYNONYMS.items() if name.lower() in v), name)
    if known != name and known not in header:
      changes.append(f'{name} to {known}')
  return f': rename {", ".join(changes)}' if changes else ''


def _csv(path: str, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
  """Yields (line number, fields) of a CSV file."""
  lines = io.StringIO(text, newline='')
  reader = csv.reader(lines, strict=True, skipinitialspace=True)
  try:
    header = [name.strip() for name in next(reader, [])]
    if 'image' not in header or not _has_known_labels(header):
      raise UserError(
        f'{path} begins with the columns {_short(str(header))}; required are '
        'image and label, and split is optional, in lower case and separated '
        f'by commas{_remedy(header)}. A list of images without labels has no '
        'other columns than image and split.'
      )
    for fields in reader:
      if not ''.join(fields).strip():
        continue
      if len(fields) != len(header):
        raise UserError(
          f'{path}, line {reader.line_num}, has {len(fields)} of the '
          f'{len(header)} fields {",".join(header)}: put fields that contain '
          'commas into quotes.'
        )
      yield reader.line_num, dict(zip(header, fields, strict=True))
  except csv.Error as error:
    raise UserError(
      f'{path}, line {reader.line_num}, is not valid CSV ({error}): check its '
      'quotes.'
    ) from error


def _jsonl(path: str, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
  """Yields (line number, object) of a file of JSON lines."""
  # Not splitlines(): JSON strings may contain U+2028 and other line separators.
  for number, line in enumerate(io.StringIO(text, newline=None), 1):
    if line.strip():
      try:
        yield number, dict(json.loads(line))
      except (ValueError, TypeError, RecursionError) as error:
        raise UserError(
          f'{path}, line {number}, is not a JSON object: {error}.'
        ) from error


def _row(path: str, line: int, fields: dict[str, Any]) -> Row:
  """Checks the fields of a line and returns them as a row."""
  image, split = fields.get('image'), fields.get('split')
  label = classes.text_of(fields.get('label'))
  if _has_known_labels(fields) and 'label' not in fields:
    label = ''
  image = image.strip() if isinstance(image, str) else None
  if not image or label is None or not isinstance(split, str | None):
    shown = {key: fields.get(key) for key in ('image', 'label', 'split')}
    raise UserError(
      f'{path}, line {line}, has {_short(str(shown))}: required are image, a '
      'path, and label, a name or an integer; split is a name. In a list of '
      'images without labels, all lines have only image and split.'
    )
  if files.is_remote(image) and not image.startswith('gs://'):
    raise UserError(
      f'{path}, line {line}, has the image {_short(image)}: images are read '
      'from local paths and from gs://. Download it.'
    )
  return Row(image, label, (split or '').strip(), line)


def _check_repeats(path: str, rows: list[Row]) -> None:
  """Checks that an image has the same label on all of its lines.

  Repeated images are allowed, so that they can have a higher weight.
  """
  first: dict[tuple[str, str], Row] = {}
  for row in rows:
    before = first.setdefault((row.split, row.image), row)
    if before.label != row.label:
      raise UserError(
        f'{path} lists {row.image} as {before.label!r} in line {before.line} '
        f'and as {row.label!r} in line {row.line}: an image has one label.'
      )


def _short(text: str) -> str:
  return text if len(text) < 160 else f'{text[:160]}…'
