"""Joins the parts of the features into one .npz or Parquet file.

Both formats contain columns of equal length: `features` float32 `[n, d]`
(or `[n, …, d]`, see `features.intermediate`),
`index` of the example in the source (bad records are left out), `label` if the
source has labels, and `path` for image files. They also contain `about`, a
description as JSON. Parts are read one after another, so that the result may be
larger than the memory.
"""

import importlib
import json
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
    UserError: pyarrow is required but not installed.
  """
  try:
    if path.endswith('.npz'):
      return npz.about(path)[0]
    metadata = _pyarrow('parquet').read_schema(path).metadata or {}
    found = json.loads(metadata.get(b'about', b'{}'))
    return found if isinstance(found, dict) else {}
  except (OSError, ValueError, KeyError, NotImplementedError):
    return {}


def check(out: epath.Path) -> None:
  """Checks that the format of the output file is supported.

  Raises:
    UserError: the file name extension is unknown, or pyarrow is required but
      not installed.
  """
  if out.suffix not in FORMATS:
    raise UserError(
      f'the extension of --out={out} is {out.suffix!r}; allowed: '
      f'{", ".join(FORMATS)}.'
    )
  if out.suffix == '.parquet':
    _pyarrow('parquet')


def _npz(path: str, parts: Parts, count: int, about: dict[str, Any]) -> None:
  first = parts.read(0)
  rows = sum(len(_rows(parts, n)) for n in range(count))
  columns = {
    key: npz.Column(
      (rows, *example.shape[1:]),
      _common_dtype(parts, key, count),
      _column(parts, key, count),
    )
    for key, example in first.items()
  }
  texts = {'class_names': about['class_names'], 'about': json.dumps(about)}
  npz.write(path, columns, texts)


def _column(parts: Parts, key: str, count: int) -> Iterator[np.ndarray]:
  return (parts.read(number, [key])[key] for number in range(count))


def _rows(parts: Parts, number: int) -> np.ndarray:
  return parts.read(number, ['index'])['index']


def _common_dtype(parts: Parts, key: str, count: int) -> np.dtype:
  """Returns the common dtype of a column in all parts.

  The dtype of paths contains the length of the longest path in the part.
  """
  dtypes = [parts.read(n, [key])[key].dtype for n in range(count)]
  return np.result_type(*set(dtypes))


def _parquet(
  path: str, parts: Parts, count: int, about: dict[str, Any]
) -> None:
  pa, parquet = _pyarrow(), _pyarrow('parquet')
  metadata = {'about': json.dumps(about)}
  writer = None
  for number in range(count):
    table = _table(pa, parts.read(number)).replace_schema_metadata(metadata)
    if writer is None:
      writer = parquet.ParquetWriter(path, table.schema)
    writer.write_table(table)
  assert writer is not None
  writer.close()


def _table(pa: Any, arrays: Arrays) -> Any:
  """Creates a pyarrow table of a part; features are lists of a fixed size.

  Features with more than two axes are nested lists.
  """
  columns = {}
  for key, array in arrays.items():
    columns[key] = pa.array(array.reshape(-1))
    for size in reversed(array.shape[1:]):
      columns[key] = pa.FixedSizeListArray.from_arrays(columns[key], size)
  return pa.table(columns)


def _pyarrow(module: str = '') -> Any:
  """Imports a module of pyarrow.

  Raises:
    UserError: pyarrow is not installed.
  """
  try:
    return importlib.import_module(f'pyarrow.{module}'.rstrip('.'))
  except ImportError as error:
    raise UserError(
      'Parquet files require the package pyarrow, which is not installed: pip '
      'install pyarrow, or use --out=FILE.npz.'
    ) from error


FORMATS: dict[str, Writer] = {'.npz': _npz, '.parquet': _parquet}
