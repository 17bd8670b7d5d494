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
from vit_jax.data import contract, fingerprint
from vit_jax.data.images.headers import DecodeError
from vit_jax.data.storage import class_folders, files, splits
from vit_jax.errors import UserError

_NUMBERED = re.compile(r'(.+)-\d{4,}-of-(\d{4,})\.parquet')
_END = b'\xff\xff\xff\xff\0\0\0\0'  # end mark of an Arrow stream


# A resumed run may have another path; the fingerprint is compared instead.
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
    label_key: str | None = 'label',
    others: tuple[str, ...] = (),
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
        or text; None for images without labels. Text is numbered in the
        sorted order of all splits.
      others: names of further columns that the examples contain; images as
        encoded bytes.

    Raises:
      UserError: the dataset, the split or a column does not exist; a column has
        another type; `others` names another image or label; files are missing
        or cut short; or labels without names are not 0 to K-1.
    """
    self._path = files.local(path, 'the source huggingface').rstrip('/')
    contract.check_others(others, image=image_key, label=label_key)
    self._others, self._has_label = others, label_key is not None
    keys = [image_key, *filter(None, [label_key]), *others]
    try:
      loaded = splits.with_alias(_load(self._path), split)
      used = splits.named(split, loaded)
      self._tables = {
        name: loaded[name]
        .select_columns(keys)
        .cast_column(image_key, datasets.Image(decode=False))
        for name in used
      }
      classes, self._label_by_value = _classes(loaded, used, label_key)
    except UserError:
      raise
    except Exception as error:  # noqa: BLE001 (the library raises many kinds)
      raise UserError(
        f'source.path is {path!r}, which cannot be read with '
        f'source.image_key={image_key!r} (images) and source.label_key='
        f'{label_key!r} (integers, booleans or text) as Parquet files or as a '
        f'directory of save_to_disk: {error.__cause__ or error}'
      ) from error
    lengths = {name: len(table) for name, table in self._tables.items()}
    self.name = f'{self._path}/{split}'
    self.num_classes, self.class_names = len(classes.keys), classes.names
    self._selection = splits.Selection(split, lengths, self._cut_order)

  def __getitem__(self, index: int) -> dict[str, Any]:
    split, position = self._selection[index]
    # Seven times as fast as `self._tables[split][position]`.
    columns = self._tables[split].data.columns
    image, *others = (column[position].as_py() for column in columns)
    label = others.pop(0) if self._has_label else 0
    if self._label_by_value is not None:
      label = self._label_by_value.get(label)
    has_image = image and any(image.values())  # see `_content`
    if label is None or not has_image:
      raise DecodeError('no image (bytes or path), or no label')
    values = dict(zip(self._others, map(self._content, others), strict=True))
    return {'image': self._content(image), 'label': label, **values}

  def _content(self, value: Any) -> Any:
    """Returns the bytes of an image, and any other value unchanged.

    An image is a dict of 'bytes' and 'path', one of which may be None.
    """
    if not isinstance(value, dict) or value.keys() != {'bytes', 'path'}:
      return value
    if value['bytes'] is not None:
      return value['bytes']
    return files.read_image(files.join(self._path, value['path']))

  @property
  def fingerprint(self) -> dict[str, Any]:
    """Dataset fingerprint, compared when a run is resumed.

    See `data.fingerprint`.
    """
    # Of each part: examples in the split, first and last row of the part.
    parts = [
      [len(self._tables[split]), *rows[[0, -1]].tolist()]
      for split, rows in self._selection.rows()
    ]
    return fingerprint.sampled(self, parts=parts)

  def where(self, index: int) -> str:
    """Returns the split of an example and its row in the split."""
    split, position = self._selection[index]
    return f'{self._path}, split {split}, row {position}'

  def labels(self) -> Int[np.ndarray, ' n']:
    """Returns the labels of all examples; -1 for those without a label."""
    if not self._has_label:
      return np.zeros(len(self), np.int64)
    labels = []
    for split, rows in self.rows():
      _, column, *_ = self._tables[split].data.columns
      values = column.take(rows).to_pylist()
      if self._label_by_value is not None:
        values = map(self._label_by_value.get, values)
      labels += [-1 if value is None else value for value in values]
    return np.array(labels, np.int64)

  def _cut_order(self, split: str) -> np.ndarray:
    # By the numbers of the rows, as if all were in one file without a name,
    # because the names of converted files depend on the path of the dataset.
    rows = np.arange(len(self._tables[split]))
    return splits.by_place([''], np.zeros_like(rows), rows)


def _load(path: str) -> dict[str, datasets.Dataset]:
  """Opens all splits of a dataset.

  Raises:
    Exception: the directory does not contain a dataset, or a file is missing or
      damaged.
  """
  if by_split := _parquet_files(path):
    return {
      name: datasets.Dataset.from_parquet(paths)
      for name, paths in by_split.items()
    }
  loaded: Any = datasets.load_from_disk(path)
  if isinstance(loaded, datasets.Dataset):
    loaded = {'train': loaded}
  for table in loaded.values():
    for file in table.cache_files:
      _check_end(file['filename'])
  return dict(loaded)


def _parquet_files(path: str) -> dict[str, Any]:
  """Returns the Parquet files of each split: {'train': [path, …]}.

  The split is specified by the file's name (`train-00000-of-00002.parquet`), or
  else by its folder (`train/0000.parquet`), and is otherwise 'train'.

  Raises:
    ValueError: files of a split are missing or in several folders.
  """
  by_split: dict[str, Any] = {}
  stated: dict[str, set[int]] = {}  # numbers of files according to their names
  pattern = f'{glob.escape(path)}/**/*.parquet'
  for file in sorted(glob.glob(pattern, recursive=True)):
    numbered = _NUMBERED.fullmatch(os.path.basename(file))
    split = numbered[1] if numbered else splits.of_file(file) or 'train'
    by_split.setdefault(split, []).append(file)
    if numbered:
      stated.setdefault(split, set()).add(int(numbered[2]))
  for split, paths in by_split.items():
    folders = sorted({os.path.dirname(file) for file in paths})
    counts = stated.get(split, set())
    if len(folders) > 1 or counts - {len(paths)}:
      raise ValueError(
        f'{split} has {len(paths)} Parquet files in {folders}; number of '
        f'files according to their names: {sorted(counts)}'
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


def _classes(
  loaded: dict[str, datasets.Dataset], used: list[str], key: str | None
) -> tuple[class_folders.Classes, dict[Any, int] | None]:
  """Returns the classes of the dataset.

  Args:
    loaded: all splits, which together determine the classes of text.
    used: names of the splits that are read.
    key: name of the label column; None for images without labels.

  Returns:
    Classes; and {value of the column: label}, or None for integers.

  Raises:
    ValueError: the splits have different classes, or no row has a label.
  """
  if key is None:
    return class_folders.Classes([class_folders.UNLABELLED]), None
  # A ClassLabel has names.
  names = [getattr(loaded[name].features[key], 'names', None) for name in used]
  if any(other != names[0] for other in names):
    raise ValueError(f'the splits have different classes: {names}')
  if names[0]:
    return class_folders.Classes(names[0]), None
  values = {value for name in used for value in loaded[name].unique(key)}
  is_text = any(isinstance(value, str) for value in values)
  if is_text:  # the other splits may have further classes
    for table in loaded.values():
      if key in table.features:
        values |= {x for x in table.unique(key) if isinstance(x, str)}
  values.discard(None)
  if values and all(isinstance(value, bool) for value in values):
    return class_folders.Classes(class_folders.BOOLEANS), {False: 0, True: 1}
  # Blank text and negative numbers are not labels.
  if is_text:
    texts = {value for value in values if value.strip()}
  else:
    texts = {str(value) for value in values if value >= 0}
  if not texts:
    raise ValueError('no row of the split has a label')
  classes, numbers = class_folders.number(
    texts, lambda label: f'the column {key!r}', whole=is_text
  )
  return classes, numbers if is_text else None
