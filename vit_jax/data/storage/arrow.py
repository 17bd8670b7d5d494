"""Files of Hugging Face datasets: the files of each split, and their contents.

On the hub and on disk, the Parquet files of a split either contain its name
(`train-00000-of-00002.parquet`) or are in a folder with its name
(`train/0000.parquet`): at the top level, in `data/`, or in a folder for the
configuration of the dataset (`default/train/0000.parquet`).
"""

import glob
import json
import os
import re
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from vit_jax.data.storage import files, splits
from vit_jax.errors import UserError

_NUMBERED = re.compile(r'(.+)-(\d{4,})-of-(\d{4,})')
_END = b'\xff\xff\xff\xff\0\0\0\0'  # of an Arrow stream


def shards(path: str) -> dict[str, list[str]]:
  """Returns the Arrow or Parquet files of each split, {'train': [path, …]}.

  Args:
    path: local directory of the dataset.

  Raises:
    UserError: it is not a dataset, it has several configurations, or Parquet
      files of it are missing.
  """
  about = f'{path}/dataset_dict.json'
  if os.path.isfile(about):
    names = _listed(about, 'splits')
    return {name: _saved(f'{path}/{name}') for name in names}
  if os.path.isfile(f'{path}/state.json'):
    return {'train': _saved(path)}
  found = _parquet(path)
  if not found:
    raise UserError(
      f'source.path is {path!r}, which is neither a data set '
      'written by `save_to_disk` (dataset_dict.json or state.json is missing) '
      'nor a directory of Parquet files: save it with '
      'datasets.load_dataset(…).save_to_disk(path).'
    )
  for paths in found.values():
    _check_all_there(paths)
  return found


def _saved(folder: str) -> list[str]:
  about = f'{folder}/state.json'
  try:
    return [f'{folder}/{f["filename"]}' for f in _listed(about, '_data_files')]
  except (KeyError, TypeError) as error:
    raise _damaged(about, 'it names no files') from error


def _listed(about: str, key: str) -> list[Any]:
  """Reads a list in a JSON file that `save_to_disk` wrote."""
  try:
    found = json.loads(files.read_text(about, 'source.path'))[key]
  except (ValueError, KeyError, TypeError) as error:
    raise _damaged(about, error) from error
  if not isinstance(found, list):
    raise _damaged(about, f'{key} is no list')
  return found


def _parquet(path: str) -> dict[str, list[str]]:
  """Parquet files of each split, as they lie under a directory."""
  found = _merged([_here(path), _here(f'{path}/data')])
  if found:
    return found
  configs = {folder: _here(folder) for folder in _folders(path)}
  configs = {folder: found for folder, found in configs.items() if found}
  if len(configs) > 1:
    raise UserError(
      f'source.path is {path!r}, which holds the configurations '
      f'{", ".join(map(os.path.basename, configs))} of a data set: name one, '
      f'as in --config.source.path={next(iter(configs))}.'
    )
  return next(iter(configs.values()), {})


def _here(folder: str) -> dict[str, list[str]]:
  """Files in a folder, and in its folders that are splits."""
  own = os.path.basename(os.path.abspath(folder))
  found: dict[str, list[str]] = {}
  for file in _files(folder):
    default = own if own in splits.NAMES else 'train'
    found.setdefault(_split_of(file) or default, []).append(file)
  below: dict[str, list[str]] = {}
  for sub in _folders(folder):
    name, inside = os.path.basename(sub), _files(sub)
    if name == 'data' or not inside:
      continue  # data/ is not a split, whatever its files are called
    if name in splits.NAMES or not any(map(_split_of, inside)):
      below[name] = inside
  return _merged([found, below])


def _merged(parts: list[dict[str, list[str]]]) -> dict[str, list[str]]:
  merged: dict[str, list[str]] = {}
  for name, paths in ((n, p) for part in parts for n, p in part.items()):
    if name in merged:
      raise UserError(
        f'the split {name!r} has Parquet files in two places, as '
        f'{merged[name][0]} and as {paths[0]}: remove one of them.'
      )
    merged[name] = paths
  return merged


def _files(folder: str) -> list[str]:
  return sorted(glob.glob(f'{glob.escape(folder)}/*.parquet'))


def _folders(folder: str) -> list[str]:
  found = sorted(glob.glob(f'{glob.escape(folder)}/*/'))
  return [path.rstrip('/') for path in found]


def _split_of(file: str) -> str:
  """'train' of 'train-00000-of-00002.parquet'; nothing of '0000.parquet'."""
  name = os.path.basename(file).removesuffix('.parquet')
  numbered = _NUMBERED.fullmatch(name)
  if numbered:
    return numbered[1]
  return '' if name.isdecimal() else name.partition('-')[0]


def _check_all_there(paths: list[str]) -> None:
  """Refuses a split of which '…-00001-of-00002' is not there."""
  names = [os.path.basename(path).removesuffix('.parquet') for path in paths]
  found = [match for match in map(_NUMBERED.fullmatch, names) if match]
  totals = sorted({int(match[3]) for match in found})
  missing = set(range(max(totals, default=0))) - {int(m[2]) for m in found}
  if len(totals) > 1 or missing:
    came = f'says that there are {totals[-1]} such files, and '
    came += (
      f'others say {totals[0]}'
      if len(totals) > 1
      else f'number {min(missing):05d} is missing'
    )
    raise UserError(f'{paths[-1]} {came}: download the data set again.')


def read(path: str) -> pa.Table:
  """Maps an Arrow stream.

  Raises:
    UserError: it is none, or cut short.
  """
  try:
    with open(path, 'rb') as file:
      file.seek(-len(_END), os.SEEK_END)
      end = file.read()
    memory = pa.memory_map(path)
    table = pa.ipc.open_stream(memory).read_all()
  except (pa.ArrowException, OSError) as error:
    raise _damaged(path, error) from error
  # Between two batches a stream may end as well: rows would be lost unnoticed.
  if end != _END or memory.tell() != os.path.getsize(path):
    raise _damaged(path, 'it ends without its end mark')
  return table


def schema(path: str) -> pa.Schema:
  """Reads the schema of a Parquet file.

  Raises:
    UserError: it is not a Parquet file, or cut short.
  """
  try:
    return pyarrow.parquet.read_schema(path)
  except (pa.ArrowException, OSError) as error:
    raise _damaged(path, error) from error


def batches(path: str, keys: list[str], rows: int) -> Iterator[pa.RecordBatch]:
  """Some columns of a Parquet file, some rows at a time.

  Raises:
    UserError: they cannot be read.
  """
  try:
    with pyarrow.parquet.ParquetFile(path) as file:
      yield from file.iter_batches(rows, columns=keys)
  except (pa.ArrowException, OSError) as error:
    raise _damaged(path, error) from error


def _damaged(path: str, reason: Any) -> UserError:
  text = str(getattr(reason, 'strerror', None) or reason).splitlines()
  return UserError(
    f'{path} is cut short or damaged ({text[0][:200] if text else reason!r}): '
    'copy or save the data set again.'
  )
