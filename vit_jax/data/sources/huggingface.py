"""Hugging Face datasets on disk, from `save_to_disk` or as Parquet files.

The package `datasets` reads them with random access. It converts Parquet files,
whose rows are stored in compressed groups, to Arrow files once, in its cache
(`$HF_HOME`), which needs as much space as the dataset.
"""

import glob
import os
import re
from typing import Any

import datasets
import numpy as np
from jaxtyping import Int

from vit_jax.config import schema as schema_lib
from vit_jax.data import fingerprint
from vit_jax.data.images.headers import DecodeError
from vit_jax.data.storage import class_folders, files, splits
from vit_jax.errors import UserError

_NUMBERED = re.compile(r'(.+)-\d{4,}-of-(\d{4,})\.parquet')
_END = b'\xff\xff\xff\xff\0\0\0\0'  # end mark of an Arrow stream
_KIND = re.compile(r'u?(int)\d+|(bool)|(?:large_)?(string)')


@schema_lib.operational('path')
class Source(splits.Labelled):
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
    self._path = files.local(path, 'the source huggingface').rstrip('/')
    loaded = splits.with_alias(_load(self._path), split)
    names = splits.named(split, loaded)
    self._tables = {
      name: _columns(loaded[name], self._path, image_key, label_key)
      for name in names
    }
    all_classes, self._numbers = _classes(loaded, names, self._path, label_key)
    lengths = {name: len(table) for name, table in self._tables.items()}
    self._selection = splits.Selection(split, lengths, self._cut_order)
    self.name = f'{self._path}/{split}'
    self.num_classes = len(all_classes.keys)
    self.class_names = all_classes.names

  def __getitem__(self, index: int) -> dict[str, Any]:
    split, position = self._selection[index]
    # Seven times as fast as `self._tables[split][position]`.
    columns = self._tables[split].data.columns
    image, label = (column[position].as_py() for column in columns)
    if self._numbers is not None:
      label = self._numbers.get(label)
    if label is None or not (image and any(image.values())):
      raise DecodeError('no image (bytes or path), or no label')
    data = image['bytes']
    if data is None:
      data = files.read_image(files.join(self._path, image['path']))
    return {'image': data, 'label': label}

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
    """Returns the split of an example and its row in the split."""
    split, position = self._selection[index]
    return f'{self._path}, split {split}, row {position}'

  def _labels_of(self, split: str) -> Int[np.ndarray, ' n']:
    _, column = self._tables[split].data.columns
    values = column.to_pylist()
    if self._numbers is not None:
      values = map(self._numbers.get, values)
    labels = [-1 if value is None else value for value in values]
    return np.array(labels, np.int64)

  def _cut_order(self, split: str) -> np.ndarray:
    # By the rows only, because names of converted files depend on their path.
    rows = np.arange(len(self._tables[split]))
    return files.by_place([''], np.zeros_like(rows), rows)


def _load(path: str) -> dict[str, datasets.Dataset]:
  """Opens all splits of a dataset.

  Raises:
    UserError: the directory does not contain a dataset, or a file is missing or
      damaged.
  """
  try:
    by_split = _parquet_files(path)
    if by_split:
      loaded: Any = {
        name: datasets.Dataset.from_parquet(paths)
        for name, paths in by_split.items()
      }
    else:
      loaded = datasets.load_from_disk(path)
      if isinstance(loaded, datasets.Dataset):
        loaded = {'train': loaded}
      for table in loaded.values():
        for file in table.cache_files:
          _check_end(file['filename'])
  except Exception as error:  # noqa: BLE001 (the library raises many kinds)
    raise UserError(
      f'source.path is {path!r}, which cannot be read ('
      f'{error.__cause__ or error}): give a directory of Parquet files, or one '
      'that datasets.load_dataset(…).save_to_disk wrote.'
    ) from error
  return dict(loaded)


def _parquet_files(path: str) -> dict[str, Any]:
  """Returns the Parquet files of each split: {'train': [path, …]}.

  The split is specified by the file's name (`train-00000-of-00002.parquet`), or
  else by its folder (`train/0000.parquet`), and is otherwise 'train'.

  Raises:
    ValueError: files of a split are missing or in several folders.
  """
  by_split: dict[str, Any] = {}
  pattern = f'{glob.escape(path)}/**/*.parquet'
  for file in sorted(glob.glob(pattern, recursive=True)):
    numbered = _NUMBERED.fullmatch(os.path.basename(file))
    split = numbered[1] if numbered else splits.of_file(file) or 'train'
    by_split.setdefault(split, []).append(file)
  for split, paths in by_split.items():
    folders = sorted({os.path.dirname(file) for file in paths})
    matches = (_NUMBERED.fullmatch(os.path.basename(file)) for file in paths)
    totals = {int(match[2]) for match in matches if match}
    if len(folders) > 1 or totals - {len(paths)}:
      raise ValueError(
        f'{split} has {len(paths)} Parquet files in {folders}, not {totals}'
      )
  return by_split


def _check_end(path: str) -> None:
  """Checks that an Arrow stream has its end mark.

  The library does not report a stream that is cut short between two batches.

  Raises:
    ValueError: the file is cut short.
  """
  with open(path, 'rb') as file:
    file.seek(-len(_END), os.SEEK_END)
    if file.read() != _END:
      raise ValueError(f'{path} ends without its end mark')


def _columns(
  table: datasets.Dataset, path: str, image_key: str, label_key: str
) -> datasets.Dataset:
  """Returns the image column, not decoded, and the label column.

  Raises:
    UserError: a column is missing or has another type.
  """
  try:
    chosen = table.select_columns([image_key, label_key])
    if not _kind(table.features[label_key]):
      raise TypeError(f'{label_key!r} is {table.features[label_key]}')
    return chosen.cast_column(image_key, datasets.Image(decode=False))
  except (TypeError, ValueError, NotImplementedError) as error:
    raise UserError(
      f'{path} cannot be read with source.image_key={image_key!r} (images) '
      f'and source.label_key={label_key!r} (integers, booleans or text): '
      f'{error}. Its columns are {", ".join(table.features)}.'
    ) from error


def _kind(label: Any) -> str:
  """Returns the kind of a label: int, bool or string; '' if not allowed."""
  match = _KIND.fullmatch(str(getattr(label, 'dtype', '')))
  return match[match.lastindex or 0] if match else ''


def _classes(
  loaded: dict[str, datasets.Dataset], used: list[str], path: str, key: str
) -> tuple[class_folders.Classes, dict[Any, int] | None]:
  """Returns the classes of the data set.

  Args:
    loaded: all splits, which together determine the classes of text.
    used: names of the splits that are read.
    path: path of the data set, for messages.
    key: name of the label column.

  Returns:
    Classes; and {value of the column: label}, or None for integers.

  Raises:
    UserError: the splits have different classes, or no row has a label.
  """
  described = []
  for name in used:
    feature = loaded[name].features[key]
    described.append((getattr(feature, 'names', None), _kind(feature)))
  names, kind = described[0]
  if any(each != (names, kind) for each in described):
    raise UserError(
      f'the splits of {path} have different classes or types of {key!r}.'
    )
  if kind == 'bool':
    return class_folders.Classes(class_folders.BOOLEANS), {False: 0, True: 1}
  if names:
    return class_folders.Classes(names), None
  is_text = kind == 'string'
  texts = set()
  for table in loaded.values() if is_text else [loaded[name] for name in used]:
    if key in table.features and _kind(table.features[key]) == kind:
      texts.update(map(str, filter(_is_label, table.unique(key))))
  if not texts:
    raise UserError(f'{path} has no label in any row: use a labelled split.')
  numbered, numbers = class_folders.number(
    texts,
    lambda label: path,
    whole=is_text,
    remedy='Number them like this, or save them as a ClassLabel.',
  )
  return numbered, numbers if is_text else None


def _is_label(value: Any) -> bool:
  """Returns whether a value is a label: text, or an integer of at least 0."""
  if isinstance(value, str):
    return bool(value.strip())
  return value is not None and value >= 0
