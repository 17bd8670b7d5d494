"""Lists of images and labels: CSV with a header, or JSON lines.

Every line must have the same form. A line that does not is refused with its
number, because a wrong guess here would become a wrong label.
"""

import csv
import io
import json
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from vit_jax.data.storage import classes, files
from vit_jax.errors import UserError

_COLUMNS = ('image', 'label', 'split')
_BROKEN = re.compile('[\0-\x1f\ud800-\udfff]')  # in no path and no name
_LONGEST = 4096  # bytes of a path


class Row(NamedTuple):
  """One image of a list.

  Attributes:
    image: path as written in the list.
    label: an integer or a name, as text.
    split: 'train' if the list has no splits.
    line: line number in the list, from 1.
  """

  image: str
  label: str
  split: str
  line: int


def read(path: str) -> list[Row]:
  """Reads a list; blanks around fields, blank lines and a BOM do not count.

  Args:
    path: path ending in .csv or .jsonl, local or remote.

  Raises:
    UserError: the file does not exist, it has another form or no image, a line
      is not an image with a label, a line has no split and others have one, or
      a split lists an image with two labels.
  """
  readers = {'.csv': _csv, '.jsonl': _jsonl}
  reader = readers.get(os.path.splitext(path)[1].lower())
  if reader is None:
    raise UserError(
      f'source.path is {path!r}; a manifest ends in {" or ".join(readers)}.'
    )
  text = files.read_text(path, 'source.path')
  rows = [_row(path, line, found) for line, found in reader(path, text)]
  if not rows:
    raise UserError(f'{path} lists no image: list one per line.')
  rows = _with_splits(path, rows)
  _check_repeats(path, rows)
  return rows


def _csv(path: str, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
  lines = io.StringIO(text, newline='')
  reader = csv.reader(lines, strict=True, skipinitialspace=True)
  try:
    header = [name.strip() for name in next(reader, [])]
    _check_header(path, header)
    for fields in reader:
      if len(fields) < 2 and not ''.join(fields).strip():
        continue
      line = reader.line_num
      if len(fields) != len(header):
        raise UserError(
          f'{path}, line {line}, has {len(fields)} of the {len(header)} fields '
          f'{_short(",".join(header))}: {_short(",".join(fields))}. Put fields '
          'that hold commas into quotes.'
        )
      if [field.strip() for field in fields] == header:
        raise UserError(
          f'{path}, line {line}, repeats the header: if lists were joined, '
          'keep only the first header.'
        )
      yield line, dict(zip(header, fields, strict=True))
  except csv.Error as error:
    raise UserError(
      f'{path}, line {reader.line_num}, is not valid CSV ({error}): check its '
      'quotes.'
    ) from error


def _check_header(path: str, header: list[str]) -> None:
  twice = [name for name in _COLUMNS if header.count(name) > 1]
  if twice or not {'image', 'label'} <= set(header):
    raise UserError(
      f'{path} begins with the columns {_short(str(header))}; it must have '
      'image and label, may have split, in small letters, once each, separated '
      'by commas.'
    )


def _jsonl(path: str, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
  # Not splitlines(): a JSON string may hold U+2028 and the like as they are.
  for number, line in enumerate(io.StringIO(text, newline=None), 1):
    if line.strip():
      try:
        row = json.loads(line, object_pairs_hook=_once)
      except (ValueError, RecursionError) as error:
        raise UserError(
          f'{path}, line {number}, is not JSON: {error}.'
        ) from error
      if not isinstance(row, dict):
        raise UserError(
          f'{path}, line {number}, is a JSON {type(row).__name__}; it must be '
          'an object with image and label.'
        )
      yield number, row


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  found = dict(pairs)
  if len(found) < len(pairs):
    keys = [key for key, _ in pairs]
    twice = next(key for key in keys if keys.count(key) > 1)
    raise ValueError(f'it gives {twice!r} more than once')
  return found


def _row(path: str, line: int, found: dict[str, Any]) -> Row:
  for key in found:
    if key not in _COLUMNS and key.strip().lower() in _COLUMNS:
      raise UserError(
        f'{path}, line {line}, has the key {key!r}: write '
        f'{key.strip().lower()!r}.'
      )
  image, label, split = (found.get(key) for key in _COLUMNS)
  image = image.strip() if isinstance(image, str) else image
  text = classes.text_of(label)
  if not isinstance(image, str) or not image or text is None:
    raise UserError(
      f'{path}, line {line}, has image {_short(repr(image))} and label '
      f'{_short(repr(label))}: both are required, a path and a name or '
      'an integer.'
    )
  if not isinstance(split, str | None):
    raise UserError(
      f'{path}, line {line}, has the split {_short(repr(split))}: it must be a '
      'name such as train.'
    )
  row = Row(image, text, (split or '').strip(), line)
  if any(map(_BROKEN.search, row[:3])):
    raise UserError(
      f'{path}, line {line}, has control characters or line ends in '
      f'{_short(str(row[:3]))}: check its quotes and escapes.'
    )
  _check_image(path, row)
  return row


def _check_image(path: str, row: Row) -> None:
  if len(row.image.encode()) > _LONGEST:
    raise UserError(
      f'{path}, line {row.line}, has an image of {len(row.image)} characters '
      f'({_short(row.image)}); it must be a path, and those have up to '
      f'{_LONGEST} bytes.'
    )
  if files.is_remote(row.image) and not row.image.startswith('gs://'):
    raise UserError(
      f'{path}, line {row.line}, has the image {_short(row.image)}: images are '
      'read from local paths and from gs://. Download it.'
    )


def _with_splits(path: str, rows: list[Row]) -> list[Row]:
  """Returns the rows with their splits.

  All are 'train' if no line has a split; otherwise every line must have one.
  """
  names = sorted({row.split for row in rows})
  if names == ['']:
    return [row._replace(split='train') for row in rows]
  if '' in names:
    line = next(row.line for row in rows if not row.split)
    raise UserError(
      f'{path}, line {line}, has no split, and others have one '
      f'({", ".join(names[1:4])}): give every line a split, or no line.'
    )
  alike = {name.lower(): name for name in names}
  for name in names:
    if alike[name.lower()] != name:
      raise UserError(
        f'{path} has the splits {name!r} and {alike[name.lower()]!r}: use one '
        'spelling.'
      )
  return rows


def _check_repeats(path: str, rows: list[Row]) -> None:
  """Checks that images that occur several times have the same label.

  Such an image has more weight.
  """
  if len({row.image for row in rows}) == len(rows):
    return
  first: dict[tuple[str, str], Row] = {}
  for row in rows:
    before = first.setdefault((row.split, row.image), row)
    if before.label != row.label:
      raise UserError(
        f'{path} lists {row.image} as {before.label!r} in line {before.line} '
        f'and as {row.label!r} in line {row.line}: an image has one label.'
      )


def _short(text: str) -> str:
  return text if len(text) < 120 else f'{text[:120]}…'
