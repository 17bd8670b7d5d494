"""Parts joined into one file: NumPy's .npz, or Parquet.

Both hold columns of one length: `features` float32 `[n, d]`, `index` (among all
examples given, of which bad ones may be left out), `label` where there are
labels, `path` of files; and beside them, as JSON, `about`. Parts are read one
after the other; the whole need not fit the memory.
"""

import importlib
import json
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from etils import epath

from vit_jax.cli.output_parts import Arrays, Parts
from vit_jax.data.storage import npz
from vit_jax.errors import UserError

Writer = Callable[[str, Parts, int, dict[str, Any]], None]


def about_of(path: str) -> dict[str, Any]:
  """Returns the description in a file of `FORMATS`; {} for any other file.

  Raises:
    UserError: a package is missing.
  """
  try:
    if path.endswith('.npz'):
      with np.load(path) as held:
        return json.loads(str(held['about']))
    found = _pyarrow('parquet').read_schema(path).metadata or {}
    return json.loads(found.get(b'about', b'{}'))
  except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
    return {}


def check(out: epath.Path) -> None:
  """Raises UserError for an ending that stands for no format, or is missing."""
  if out.suffix not in FORMATS:
    raise UserError(
      f'--out={out} ends in {out.suffix!r}; allowed: {", ".join(FORMATS)}.'
    )
  if out.suffix == '.parquet':
    _pyarrow('parquet')


def _npz(path: str, parts: Parts, count: int, about: dict[str, Any]) -> None:
  first = parts.read(0)
  rows = sum(len(_rows(parts, n)) for n in range(count))
  columns = {
    key: npz.Column(
      (rows, *example.shape[1:]),
      _widest(parts, key, count),
      _column(parts, key, count),
    )
    for key, example in first.items()
  }
  texts = {'class_names': about['class_names'], 'about': json.dumps(about)}
  npz.write(path, columns, texts)


def _column(parts: Parts, key: str, count: int) -> Iterator[np.ndarray]:
  return (parts.read(number)[key] for number in range(count))


def _rows(parts: Parts, number: int) -> np.ndarray:
  return parts.read(number)['index']


def _widest(parts: Parts, key: str, count: int) -> np.dtype:
  """Texts of the parts differ in their length."""
  kinds = [parts.read(n)[key].dtype for n in range(count)]
  return np.result_type(*set(kinds))


def _parquet(
  path: str, parts: Parts, count: int, about: dict[str, Any]
) -> None:
  pa, parquet = _pyarrow(), _pyarrow('parquet')
  notes = {'about': json.dumps(about)}
  writer = None
  for number in range(count):
    table = _table(pa, parts.read(number)).replace_schema_metadata(notes)
    if writer is None:
      writer = parquet.ParquetWriter(path, table.schema)
    writer.write_table(table)
  assert writer is not None
  writer.close()


def _table(pa: Any, arrays: Arrays) -> Any:
  """Rows of a part; features are lists of one length."""
  columns = {}
  for key, array in arrays.items():
    columns[key] = pa.array(array.reshape(-1))
    if array.ndim > 1:
      columns[key] = pa.FixedSizeListArray.from_arrays(
        columns[key], array.shape[1]
      )
  return pa.table(columns)


def _pyarrow(module: str = '') -> Any:
  """Imports a module of pyarrow.

  Raises:
    UserError: it is not installed.
  """
  try:
    return importlib.import_module(f'pyarrow.{module}'.rstrip('.'))
  except ImportError as error:
    raise UserError(
      'Parquet is written by the package pyarrow, which is not installed: pip '
      'install pyarrow, or give --out=FILE.npz.'
    ) from error


FORMATS: dict[str, Writer] = {'.npz': _npz, '.parquet': _parquet}
