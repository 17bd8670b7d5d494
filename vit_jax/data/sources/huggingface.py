"""Hugging Face data sets on disk: `save_to_disk`, or Parquet files.

Arrow files are mapped into memory and have random access. Parquet has none
(its rows come in compressed groups), so its images and labels are once written
to an Arrow file, beside the data or in $XDG_CACHE_HOME/vit_jax: as large as the
images again. Needs pyarrow, not the package `datasets`.
"""

import bisect
import glob
import itertools
import json
import os
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet

from vit_jax.data import classes, cuts, files, fingerprint, index, splits
from vit_jax.data.transforms import DecodeError
from vit_jax.errors import UserError, closest

_STAMP = b'vit_jax'  # key of the schema's metadata
_ROWS = 100  # of a record batch: reading it touches the pages of one row only


class Source:
  """One split of a data set of `datasets`; a local path.

  Attributes:
    name: for messages, 'pets/train'.
    num_classes: of the label.
    class_names: one for each class.
  """

  def __init__(
    self,
    split: str,
    /,
    *,
    path: str,
    image_key: str = 'image',
    label_key: str = 'label',
  ):
    """Maps the files; nothing is read until an example is asked for.

    Args:
      split: in the TFDS way: 'train', 'train[:99%]', 'train+validation'.
      path: a directory written by `save_to_disk`, or one of Parquet files whose
        names begin with their split ('train-00000-of-00002.parquet'), in it or
        in its folder data/.
      image_key: name of the image column.
      label_key: name of the label column, of whole numbers.

    Raises:
      UserError: no such data set, split or column, or other types.
    """
    path = files.local(path, 'the source huggingface').rstrip('/')
    shards = splits.with_alias(_shards(path), split)
    keys = (image_key, label_key)
    self._tables = {
      name: _Table(_with_random_access(shards[name], keys), keys)
      for name in splits.named(split, shards)
    }
    lengths = {name: len(table) for name, table in self._tables.items()}
    self._selection = splits.Selection(
      split, lengths, lambda name: self._tables[name].cut_order()
    )
    tables = list(self._tables.values())
    known = classes.Classes(tables[0].class_names())
    if not known.keys:
      known = classes.numbered(max(table.largest_label() for table in tables))
    self.name = f'{path}/{split}'
    self.num_classes = len(known.keys)
    self.class_names = known.names

  def __len__(self) -> int:
    return len(self._selection)

  def __getitem__(self, index: int) -> dict[str, Any]:
    split, position = self._selection[index]
    return self._tables[split].row(position)

  @property
  def fingerprint(self) -> dict[str, Any]:
    """By what the data set is known again; see `data.fingerprint`."""
    parts = [
      [len(self._tables[split]), *rows[[0, -1]].tolist()]
      for split, rows in self._selection.rows()
    ]
    return fingerprint.sampled(self, parts=parts)

  def where(self, index: int) -> str:
    """The file of an example and its row."""
    split, position = self._selection[index]
    return self._tables[split].where(position)


class _Table:
  """Image and label of the rows of Arrow files."""

  def __init__(self, paths: list[str], keys: tuple[str, str]):
    self._paths, self._keys = paths, keys
    tables = [pa.ipc.open_stream(pa.memory_map(p)).read_all() for p in paths]
    self._schema = tables[0].schema
    _check_columns(self._schema, paths[0], keys)
    self._files = [table.num_rows for table in tables]
    self._batches = [
      [batch.column(key) for key in keys]
      for table in tables
      for batch in table.select(list(keys)).to_batches()
    ]
    lengths = (len(labels) for _, labels in self._batches)
    self._ends = list(itertools.accumulate(lengths))

  def __len__(self) -> int:
    return sum(self._files)

  def __reduce__(self) -> tuple[Any, ...]:
    return _Table, (self._paths, self._keys)  # maps the files again

  def row(self, position: int) -> dict[str, Any]:
    number = bisect.bisect_right(self._ends, position)
    images, labels = self._batches[number]
    row = position - self._ends[number] + len(labels)
    image, label = images[row].as_py(), labels[row].as_py()
    if isinstance(image, dict):
      image = image['bytes'] or _file(image.get('path'))
    if image is None or label is None:
      raise DecodeError('no image or no label')
    return {'image': image, 'label': label}

  def where(self, position: int) -> str:
    ends = list(itertools.accumulate(self._files))
    number = bisect.bisect_right(ends, position)
    row = position - ends[number] + self._files[number]
    return f'{self._paths[number]}, row {row}'

  def cut_order(self) -> np.ndarray:
    """By rows alone: what Parquet is converted to is named for its place."""
    rows = np.arange(len(self))
    return cuts.by_place([''], np.zeros_like(rows), rows)

  def class_names(self) -> list[str]:
    """Of the label, if the data set knows them."""
    about = (self._schema.metadata or {}).get(b'huggingface', b'{}')
    features = json.loads(about).get('info', {}).get('features', {})
    return features.get(self._keys[1], {}).get('names', [])

  def largest_label(self) -> int:
    found = [
      pyarrow.compute.call_function('max', [labels]).as_py()
      for _, labels in self._batches
    ]
    return max((label for label in found if label is not None), default=-1)


def _file(path: str | None) -> bytes:
  if not path:
    raise DecodeError('neither the bytes of an image nor a path')
  return files.read_image(path)


def _shards(path: str) -> dict[str, list[str]]:
  """Arrow or Parquet files of each split."""
  about = f'{path}/dataset_dict.json'
  if os.path.isfile(about):
    names = json.loads(files.read_text(about, 'source.path'))['splits']
    return {name: _saved(f'{path}/{name}') for name in names}
  if os.path.isfile(f'{path}/state.json'):
    return {'train': _saved(path)}
  found: dict[str, list[str]] = {}
  for folder in (path, f'{path}/data'):
    for file in sorted(glob.glob(f'{glob.escape(folder)}/*.parquet')):
      name = os.path.basename(file).removesuffix('.parquet')
      found.setdefault(name.partition('-')[0], []).append(file)
  if not found:
    raise UserError(
      f'source.path is {path!r}, which is no data set that `save_to_disk` '
      'wrote (no dataset_dict.json or state.json), and no directory of Parquet '
      'files: save it with datasets.load_dataset(…).save_to_disk(path).'
    )
  return found


def _saved(folder: str) -> list[str]:
  state = json.loads(files.read_text(f'{folder}/state.json', 'source.path'))
  return [f'{folder}/{entry["filename"]}' for entry in state['_data_files']]


def _check_columns(schema: pa.Schema, path: str, keys: tuple[str, str]) -> None:
  for key in keys:
    if key not in schema.names:
      raise UserError(
        f'{path} has no column {key!r} (source.image_key, label_key); '
        f'{closest(key, schema.names)}.'
      )
  image, label = (schema.field(key).type for key in keys)
  names = [image.field(i).name for i in range(image.num_fields)]
  binary = pa.types.is_binary(image) or pa.types.is_large_binary(image)
  if not (binary or 'bytes' in names) or not pa.types.is_integer(label):
    raise UserError(
      f'{path} has {keys[0]!r} of type {image} and {keys[1]!r} of type '
      f'{label}; they must be an image (bytes, or a struct with bytes) and a '
      'whole number (source.image_key, label_key).'
    )


def _with_random_access(paths: list[str], keys: tuple[str, str]) -> list[str]:
  """The files, or what Parquet ones were converted to."""
  stamp = index.stamps(paths)
  if not paths[0].endswith('.parquet'):
    return paths
  mark = json.dumps([*keys, *stamp.tolist()]).encode()
  places = index.cache_places(paths, 'rows.arrow')
  for place in places:
    if os.path.isfile(place):
      with pa.memory_map(place) as file:
        metadata = pa.ipc.open_stream(file).schema.metadata or {}
      if metadata.get(_STAMP) == mark:
        return [place]
  return [index.save(places, lambda file: _convert(file, paths, keys, mark))]


def _convert(
  file: IO[bytes], paths: list[str], keys: tuple[str, str], mark: bytes
) -> None:
  schema = pyarrow.parquet.read_schema(paths[0])
  _check_columns(schema, paths[0], keys)
  metadata = {**(schema.metadata or {}), _STAMP: mark}
  schema = pa.schema([schema.field(key) for key in keys], metadata)
  label = f'converting Parquet files of {os.path.dirname(paths[0])}'
  with pa.ipc.new_stream(file, schema) as writer:
    for path in index.progress(iter(paths), len(paths), label):
      with pyarrow.parquet.ParquetFile(path) as parquet:
        for batch in parquet.iter_batches(_ROWS, columns=list(keys)):
          writer.write_batch(batch.select(list(keys)).cast(schema))
