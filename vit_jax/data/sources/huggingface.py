"""Hugging Face datasets on disk, from `save_to_disk` or as Parquet files.

Arrow files are mapped into memory and have random access. Parquet files do not,
because their rows are stored in compressed groups. Their images and labels are
therefore written to an Arrow file once, next to the data or in
$XDG_CACHE_HOME/vit_jax, which needs as much space as the images. pyarrow is
required; the package `datasets` is not.
"""

import itertools
import json
import os
from collections.abc import Callable
from typing import IO, Any

import numpy as np
import pyarrow as pa
from jaxtyping import Int

from vit_jax.config import schema as schema_lib
from vit_jax.data import fingerprint, progress
from vit_jax.data.images.headers import DecodeError
from vit_jax.data.storage import arrow, class_folders, files, index, splits
from vit_jax.data.storage.splits import Concatenation
from vit_jax.errors import UserError, closest

_STAMP = b'vit_jax'  # key of the stamp in the metadata of a cached file
_LABELS = 100_000  # labels that are read at once
_ROWS = 100  # rows of a record batch; reading a row touches only its own pages


_KINDS: dict[str, Callable[[pa.DataType], bool]] = {
  'integer': pa.types.is_integer,
  'boolean': pa.types.is_boolean,
  'text': lambda kind: (
    pa.types.is_string(kind) or pa.types.is_large_string(kind)
  ),
}


@schema_lib.operational('path')
class Source(splits.Selected):
  """One split of a local dataset of the package `datasets`.

  Attributes:
    name: name for messages, such as 'pets/train'.
    num_classes: number of classes of the label.
    class_names: names of the classes, in the order of the labels.
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
    """Maps the files into memory; images are read when they are needed.

    Args:
      split: split as in TFDS: 'train', 'train[:99%]', 'train+validation'.
      path: directory that `save_to_disk` wrote, or directory of Parquet files
        as on the hub: 'train-00000-of-00002.parquet' or 'train/0000.parquet',
        directly in it, in its folder data/, or in a folder named for the
        configuration ('default').
      image_key: name of the image column.
      label_key: name of the label column, which contains integers, booleans
        or text. Text is numbered in the sorted order of all splits.

    Raises:
      UserError: the dataset, the split or a column does not exist; a column has
        another type; files are missing or cut short; or labels without names
        are not 0 to K-1.
    """
    path = files.place(path, 'source.path')
    path = files.local(path, 'the source huggingface').rstrip('/')
    shards = splits.with_alias(arrow.shards(path), split)
    keys = (image_key, label_key)
    self._tables = {
      name: _Table(_with_random_access(shards[name], keys), keys, path)
      for name in splits.named(split, shards)
    }
    lengths = {name: len(table) for name, table in self._tables.items()}
    self._selection = splits.Selection(
      split, lengths, lambda name: self._tables[name].cut_order()
    )
    all_classes, self._numbers = _classes(
      list(self._tables.values()), path, shards, label_key
    )
    self.name = f'{path}/{split}'
    self.num_classes = len(all_classes.keys)
    self.class_names = all_classes.names

  def __getitem__(self, index: int) -> dict[str, Any]:
    split, position = self._selection[index]
    example = self._tables[split].row(position)
    if self._numbers is not None:
      text = example['label']
      if text not in self._numbers:
        raise DecodeError(f'no label, but {text!r}')
      example['label'] = self._numbers[text]
    return example

  @property
  def fingerprint(self) -> dict[str, Any]:
    """Dataset fingerprint, compared when a run is resumed.

    See `data.fingerprint`.
    """
    parts = [
      [len(self._tables[split]), *rows[[0, -1]].tolist()]
      for split, rows in self._selection.rows()
    ]
    return fingerprint.sampled(self, parts=parts)

  def where(self, index: int) -> str:
    """Returns the file of an example and its row."""
    split, position = self._selection[index]
    return self._tables[split].where(position)

  def labels(self) -> Int[np.ndarray, ' n']:
    """Returns the labels of all examples; -1 for those without a label."""
    parts = self._selection.rows()
    return np.concatenate(
      [
        self._tables[split].all_labels(self._numbers)[rows]
        for split, rows in parts
      ]
    )


class _Table:
  """Images and labels of the rows of Arrow files.

  It is pickled as its arguments: the receiving process maps the files again.
  """

  def __init__(self, paths: list[str], keys: tuple[str, str], folder: str):
    self._paths, self._keys, self._folder = paths, keys, folder
    tables = [arrow.read(path) for path in paths]
    _check_columns([table.schema for table in tables], paths, keys)
    self._schema = tables[0].schema
    self._files = Concatenation(table.num_rows for table in tables)
    self._batches = [
      [batch.column(key) for key in keys]
      for table in tables
      for batch in table.select(list(keys)).to_batches()
    ]
    self._rows = Concatenation(len(labels) for _, labels in self._batches)

  def __len__(self) -> int:
    return len(self._rows)

  def __reduce__(self) -> tuple[Any, ...]:
    return _Table, (self._paths, self._keys, self._folder)

  def row(self, position: int) -> dict[str, Any]:
    number, row = self._rows.find(position)
    images, labels = self._batches[number]
    image, label = images[row].as_py(), labels[row].as_py()
    if isinstance(image, dict):
      image = image['bytes'] or _file(self._folder, image.get('path'))
    if image is None or label is None:
      raise DecodeError('no image or no label')
    return {'image': image, 'label': label}

  def where(self, position: int) -> str:
    number, row = self._files.find(position)
    return f'{self._paths[number]}, row {row}'

  def cut_order(self) -> np.ndarray:
    """Returns the order in which the table is cut, see `hash_order`.

    It depends on the rows only, because the name of a converted file depends on
    the location of the dataset.
    """
    rows = np.arange(len(self))
    return files.by_place([''], np.zeros_like(rows), rows)

  def class_names(self) -> list[str]:
    """Returns the names of the label's classes, if the dataset has them."""
    return _names(self._schema, self._keys[1])

  def all_labels(self, numbers: dict[Any, int] | None) -> Int[np.ndarray, ' n']:
    """Returns the label of each row; -1 for a row without a label.

    Args:
      numbers: {value of the column: label}; None for integers.
    """
    return np.concatenate(
      [_numbered(labels, numbers) for _, labels in self._batches]
    )

  def label_kind(self) -> str:
    """Returns the kind of the label column: a key of _KINDS."""
    return _kind(self._schema.field(self._keys[1]).type)

  def labels(self) -> set[int]:
    """Returns all distinct labels of a column of integers."""
    values: set[Any] = set()
    for _, labels in self._batches:
      values.update(labels.unique().to_pylist())
    # Rows without a label have None or -1.
    return {label for label in values if label is not None and label >= 0}


def _numbered(
  labels: pa.Array, numbers: dict[Any, int] | None
) -> Int[np.ndarray, ' n']:
  """Returns the labels of a record batch; see `_Table.all_labels`."""
  if numbers is None:
    filled = labels.cast(pa.int64()).fill_null(-1)
    return filled.to_numpy(zero_copy_only=False)
  encoded = labels.dictionary_encode()
  values = [numbers.get(each, -1) for each in encoded.dictionary.to_pylist()]
  indices = encoded.indices.cast(pa.int64()).fill_null(len(values))
  return np.array([*values, -1])[indices.to_numpy(zero_copy_only=False)]


def _kind(label: pa.DataType) -> str:
  """Returns the kind of a type of labels; '' if it is not allowed."""
  return next((kind for kind, fits in _KINDS.items() if fits(label)), '')


def _names(schema: pa.Schema, key: str) -> list[str]:
  """Returns the class names that the package `datasets` stores in a schema."""
  about = json.loads((schema.metadata or {}).get(b'huggingface', b'{}'))
  features = about.get('info', {}).get('features', {})
  return features.get(key, {}).get('names') or []


def _classes(
  tables: list[_Table], path: str, shards: dict[str, list[str]], key: str
) -> tuple[class_folders.Classes, dict[Any, int] | None]:
  """Returns the classes of the data set.

  Args:
    tables: tables of the splits that are read.
    path: path of the data set, for messages.
    shards: files of all splits, which together determine the classes of text.
    key: name of the label column.

  Returns:
    Classes; and {value of the column: label}, or None for integers.

  Raises:
    UserError: the splits have different classes, or no row has a label.
  """
  names, kind = tables[0].class_names(), tables[0].label_kind()
  if any((t.class_names(), t.label_kind()) != (names, kind) for t in tables):
    raise UserError(
      f'the splits of {path} have different lists of classes or types of '
      f'{key!r}: read one of them, or save the data set again.'
    )
  if kind == 'boolean':
    return class_folders.Classes(class_folders.BOOLEANS), {False: 0, True: 1}
  is_text = kind == 'text'
  if names and not is_text:
    return class_folders.Classes(names), None
  labels = _texts(shards, key) if is_text else _integers(tables)
  if not labels:
    raise UserError(f'{path} has no label in any row: use a labelled split.')
  numbered, numbers = class_folders.number(
    labels,
    lambda label: path,
    whole=is_text,
    remedy='Number them like this, or save them as a ClassLabel.',
  )
  return numbered, numbers if is_text else None


def _integers(tables: list[_Table]) -> set[str]:
  return {str(label) for table in tables for label in table.labels()}


def _texts(shards: dict[str, list[str]], key: str) -> set[str]:
  """Returns the distinct texts of a column in the files of all splits."""
  found: set[Any] = set()
  for path in itertools.chain.from_iterable(shards.values()):
    if path.endswith('.parquet'):
      has_key = key in arrow.schema(path).names
      columns = arrow.batches(path, [key], _LABELS) if has_key else []
      parts = (batch.column(key) for batch in columns)
    else:
      table = arrow.read(path)
      parts = [table.column(key)] if key in table.schema.names else []
    for part in parts:
      found.update(part.unique().to_pylist())
  return {text for text in found if isinstance(text, str) and text.strip()}


def _file(folder: str, path: str | None) -> bytes:
  if not path:
    raise DecodeError('neither the bytes of an image nor a path')
  return files.read_image(files.join(folder, path))


def _check_columns(
  schemas: list[pa.Schema], paths: list[str], keys: tuple[str, str]
) -> None:
  """Checks that all files have the columns, with usable and equal types.

  Raises:
    UserError: a column is missing or has another type, or the classes of files
      differ.
  """
  first = None
  for schema, path in zip(schemas, paths, strict=True):
    for key in keys:
      if key not in schema.names:
        raise UserError(
          f'{path} has no column {key!r} (source.image_key, label_key); '
          f'{closest(key, schema.names)}.'
        )
    image, label = (schema.field(key).type for key in keys)
    first = first or label
    names = [image.field(i).name for i in range(image.num_fields)]
    binary = pa.types.is_binary(image) or pa.types.is_large_binary(image)
    usable = _kind(label) and _kind(label) == _kind(first)
    if not (binary or 'bytes' in names) or not usable:
      raise UserError(
        f'{path} has {keys[0]!r} of type {image} and {keys[1]!r} of type '
        f'{label}; they must be an image (bytes, or a struct with bytes) and '
        'an integer, a boolean or text, the same in all files: choose other '
        'columns (source.image_key, label_key), or convert these with '
        'datasets.Dataset.cast_column.'
      )
    if _names(schema, keys[1]) != _names(schemas[0], keys[1]):
      raise UserError(
        f'{path} and {paths[0]} have different lists of classes: they belong '
        'to different data sets. Save it again.'
      )


def _with_random_access(paths: list[str], keys: tuple[str, str]) -> list[str]:
  """Returns Arrow files; Parquet files are converted to one cached file."""
  stamps = index.stamps(paths)  # also checks that the files exist
  if not paths[0].endswith('.parquet'):
    return paths
  stamp = json.dumps([*keys, *stamps.tolist()]).encode()
  cache_paths = index.cache_places(paths, 'rows.arrow')
  for cached in cache_paths:
    if os.path.isfile(cached) and _stored_stamp(cached) == stamp:
      return [cached]
  return [
    index.save(cache_paths, lambda file: _convert(file, paths, keys, stamp))
  ]


def _stored_stamp(path: str) -> bytes | None:
  """Returns the stamp of the files from which a cached file was converted.

  It is None if the cached file is damaged.
  """
  try:
    return (arrow.read(path).schema.metadata or {}).get(_STAMP)
  except UserError:
    return None


def _convert(
  file: IO[bytes], paths: list[str], keys: tuple[str, str], stamp: bytes
) -> None:
  """Writes two columns of Parquet files to an Arrow stream."""
  schemas = [arrow.schema(path) for path in paths]
  _check_columns(schemas, paths, keys)
  metadata = {**(schemas[0].metadata or {}), _STAMP: stamp}
  schema = pa.schema([schemas[0].field(key) for key in keys], metadata)
  label = f'converting Parquet files of {os.path.dirname(paths[0])}'
  with pa.ipc.new_stream(file, schema) as writer:
    for path in progress.shown(iter(paths), len(paths), label):
      for batch in arrow.batches(path, list(keys), _ROWS):
        writer.write_batch(batch.select(list(keys)).cast(schema))
