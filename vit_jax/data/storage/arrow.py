"""Finds and reads the Arrow and Parquet files of Hugging Face datasets.

The split of a Parquet file is specified by the file's name
(`train-00000-of-00002.parquet`), or else by its folder (`train/0000.parquet`).
If neither specifies one, the split is 'train'.
"""

import contextlib
import glob
import json
import os
import re
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet

from vit_jax.data.storage import files, splits
from vit_jax.errors import UserError

_NUMBERED = re.compile(r'(.+)-\d{4,}-of-(\d{4,})\.parquet')
_END = b'\xff\xff\xff\xff\0\0\0\0'  # end mark of an Arrow stream


def shards(path: str) -> dict[str, list[str]]:
  """Finds the Arrow or Parquet files of each split: {'train': [path, …]}.

  Args:
    path: local directory of the dataset.

  Raises:
    UserError: the directory is not a dataset, it has several configurations, or
      Parquet files are missing.
  """
  about = f'{path}/dataset_dict.json'
  if os.path.isfile(about):
    with _reading(about):
      names = json.loads(files.read_text(about, 'source.path'))['splits']
    return {name: _saved(f'{path}/{name}') for name in names}
  if os.path.isfile(f'{path}/state.json'):
    return {'train': _saved(path)}
  by_split: dict[str, list[str]] = {}
  for file in sorted(
    glob.glob(f'{glob.escape(path)}/**/*.parquet', recursive=True)
  ):
    numbered = _NUMBERED.fullmatch(os.path.basename(file))
    split = numbered[1] if numbered else splits.of_file(file) or 'train'
    by_split.setdefault(split, []).append(file)
  if not by_split:
    raise UserError(
      f'source.path is {path!r}, which is neither a data set '
      'written by `save_to_disk` (dataset_dict.json or state.json is missing) '
      'nor a directory of Parquet files: save it with '
      'datasets.load_dataset(…).save_to_disk(path).'
    )
  for paths in by_split.values():
    _check_complete(paths)
  return by_split


def _saved(folder: str) -> list[str]:
  """Returns the Arrow files of a split that `save_to_disk` wrote."""
  about = f'{folder}/state.json'
  with _reading(about):
    entries = json.loads(files.read_text(about, 'source.path'))['_data_files']
    return [f'{folder}/{entry["filename"]}' for entry in entries]


def _check_complete(paths: list[str]) -> None:
  """Checks that all Parquet files of a split exist, in one folder.

  Raises:
    UserError: the files are in several folders, or some are missing.
  """
  folders = sorted({os.path.dirname(path) for path in paths})
  names = [os.path.basename(path) for path in paths]
  totals = {int(m[2]) for m in map(_NUMBERED.fullmatch, names) if m}
  if len(folders) > 1 or (totals and totals != {len(paths)}):
    expected = f', but their names specify {max(totals)}' if totals else ''
    raise UserError(
      f'the split of {paths[-1]} has {len(paths)} Parquet files in the folders '
      f'{" and ".join(folders)}{expected}: set --config.source.path to one of '
      'these folders, or download the data set again.'
    )


def read(path: str) -> pa.Table:
  """Maps an Arrow stream into memory.

  Raises:
    UserError: the file is not an Arrow stream, or is cut short.
  """
  with _reading(path):
    with open(path, 'rb') as file:
      file.seek(-len(_END), os.SEEK_END)
      end = file.read()
    memory = pa.memory_map(path)
    table = pa.ipc.open_stream(memory).read_all()
    # pyarrow does not report a stream that is cut short between two batches.
    if end != _END or memory.tell() != os.path.getsize(path):
      raise ValueError('it ends without its end mark')
    return table


def schema(path: str) -> pa.Schema:
  """Reads the schema of a Parquet file.

  Raises:
    UserError: the file is not a Parquet file, or is cut short.
  """
  with _reading(path):
    return pyarrow.parquet.read_schema(path)


def batches(path: str, keys: list[str], rows: int) -> Iterator[pa.RecordBatch]:
  """Yields some columns of a Parquet file in batches of rows.

  Args:
    path: path of the file.
    keys: names of the columns to read.
    rows: maximum number of rows of a batch.

  Raises:
    UserError: the file cannot be read.
  """
  with _reading(path), pyarrow.parquet.ParquetFile(path) as file:
    yield from file.iter_batches(rows, columns=keys)


@contextlib.contextmanager
def _reading(path: str) -> Iterator[None]:
  """Converts errors of reading a file to `UserError`."""
  try:
    yield
  except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
    text = str(getattr(error, 'strerror', None) or error).partition('\n')[0]
    raise UserError(
      f'{path} cannot be read ({text[:200]}): copy or save the data set again.'
    ) from error
