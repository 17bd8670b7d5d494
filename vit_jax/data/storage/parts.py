"""Results in a directory of parts, which `features` and `pseudo_label` write.

The directory contains description.json, the `Computation`, and the parts
00000.npz, 00001.npz, …, which together are the result. Each part has the
columns of a range of examples, that range (`examples`), and a checksum of these
arrays. Files are written atomically, so missing parts can be computed later.
"""

import dataclasses
import io
import json
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from etils import epath
from jaxtyping import Int

from vit_jax.config.completion import flatten
from vit_jax.config.schema import Section
from vit_jax.data import fingerprint
from vit_jax.errors import UserError
from vit_jax.files import jsonl, paths

Arrays = dict[str, np.ndarray]
_DESCRIPTION = 'description.json'
_EXAMPLES, _CHECKSUM = 'examples', 'checksum'
# Bytes of a ZIP archive's local file header. Its last four are the lengths of
# the name and of the extra field that follow it (APPNOTE.TXT, 4.3.7).
_LOCAL_HEADER = 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Computation:
  """Everything on which the columns of a result depend.

  Attributes:
    checkpoint: path of the weights.
    weights: set of weights of the checkpoint, such as 'ema'.
    digest: digest of the parameters.
    data: name of the source.
    source: config section of the source; {} for image files.
    split: split of the source; '' for image files.
    fingerprint: fingerprint of the examples, see `data.fingerprint`.
    class_names: class names of the labels; [] without labels.
    examples: number of examples.
    on_bad_record: policy for bad records.
    preprocess: settings of the preprocessing.
    batch_size: images per batch.
    part_examples: examples per part, a multiple of the batch size.
    settings: further settings of the command, such as `layers`.
  """

  checkpoint: str
  weights: str
  digest: str
  data: str
  source: Section
  split: str
  fingerprint: dict[str, Any]
  class_names: list[str]
  examples: int
  on_bad_record: str
  preprocess: Section
  batch_size: int
  part_examples: int
  settings: dict[str, Any]

  def summary(self) -> dict[str, Any]:
    """Returns the attributes and the settings in one dict, to be printed."""
    values = dataclasses.asdict(self)
    settings = values.pop('settings')
    return values | settings

  @classmethod
  def read(cls, folder: epath.Path) -> 'Computation | None':
    """Reads the description in a directory; None if there is none.

    Raises:
      UserError: the description cannot be read.
    """
    path = folder / _DESCRIPTION
    if not path.exists():
      return None
    values = jsonl.read_object(path)
    fields = {field.name for field in dataclasses.fields(cls)}
    if values.keys() != fields:
      raise UserError(
        f'{path} is damaged, or was not written by `features` or '
        '`pseudo_label`: delete its directory, or give another one.'
      )
    return cls(**values)


@dataclasses.dataclass(frozen=True)
class Parts:
  """The parts of a result.

  Attributes:
    folder: local directory.
    computation: what the parts contain.
  """

  folder: epath.Path
  computation: Computation

  @classmethod
  def begin(cls, folder: epath.Path, computation: Computation) -> 'Parts':
    """Describes an empty directory, or continues a result.

    Raises:
      UserError: the directory contains other files or another result, or
        cannot be written.
      StorageError: the storage is full or fails.
    """
    existing = Computation.read(folder)
    if existing is None:
      files = [entry.name for entry in paths.entries(folder)]
      if other := [name for name in files if not name.startswith('.')]:
        raise UserError(
          f'{folder} contains other files, such as {min(other)}: give another '
          '--out.'
        )
      text = json.dumps(dataclasses.asdict(computation))
      paths.save(folder / _DESCRIPTION, text)
      return cls(folder, computation)
    before = flatten(dataclasses.asdict(existing))
    now = flatten(dataclasses.asdict(computation))
    differences = [
      f'{key}: {before.get(key)!r} before, {now.get(key)!r} now'
      for key in now | before
      if before.get(key) != now.get(key)
    ]
    if differences:
      raise UserError(
        f'{folder} is the result of another command '
        f'({"; ".join(differences)}). Give another --out, or delete it.'
      )
    return cls(folder, computation)

  @classmethod
  def open(cls, path: str) -> 'Parts':
    """Opens a complete result.

    Raises:
      UserError: there is no result, or a part is missing.
    """
    folder = paths.locate(path)
    computation = Computation.read(folder)
    if computation is None:
      raise UserError(
        f'{path} is not a directory that `features` or `pseudo_label` wrote.'
        f'{paths.nearest(path)}'
      )
    parts = cls(folder, computation)
    missing = [i for i in range(len(parts)) if not parts.path(i).exists()]
    if missing:
      raise UserError(
        f'{len(missing)} of {len(parts)} parts of {path} are missing: run the '
        'command that writes them again, which continues.'
      )
    return parts

  def __len__(self) -> int:
    """Returns the number of parts of the complete result."""
    return -(-self.computation.examples // self.computation.part_examples)

  def column(self, key: str) -> Iterator[np.ndarray]:
    """Yields a column, part by part."""
    return (load(self.path(i), key)[key] for i in range(len(self)))

  def path(self, index: int) -> epath.Path:
    """Returns the path of a part."""
    return self.folder / f'{index:05}.npz'

  def indices(self, index: int) -> Int[np.ndarray, ' n']:
    """Returns the indices of the examples of a part, int64."""
    start = index * self.computation.part_examples
    end = start + self.computation.part_examples
    return np.arange(start, min(end, self.computation.examples))

  def missing(self) -> list[int]:
    """Returns the indices of the parts that do not exist; reads the others.

    Raises:
      UserError: a part is damaged.
    """
    missing = []
    for index in range(len(self)):
      if self.path(index).exists():
        self.read(index)
      else:
        missing.append(index)
    return missing

  def write(self, index: int, columns: Arrays) -> None:
    """Writes the columns of a part.

    Raises:
      UserError: there is no permission to write it.
      StorageError: the storage is full or fails.
    """
    save(self.path(index), columns | {_EXAMPLES: self._limits(index)})

  def read(self, index: int) -> Arrays:
    """Reads the columns of a part.

    Raises:
      UserError: the part is damaged, or has other examples.
    """
    columns = load(self.path(index))
    found = columns.pop(_EXAMPLES, np.zeros(0))
    expected = self._limits(index)
    if not np.array_equal(found, expected):
      raise _unreadable(
        self.path(index), f'its examples are {found}, not {expected}'
      )
    return columns

  def _limits(self, index: int) -> Int[np.ndarray, '2']:
    """Returns the index of the first example, and that after the last."""
    first, last = self.indices(index)[[0, -1]]
    return np.array([first, last + 1])


def read_features(path: str) -> Arrays:
  """Reads all parts that `python -m vit_jax.features --out=PATH` wrote.

  Args:
    path: local directory.

  Returns:
    The columns: `features` float32 `[n, d]` (or with further axes), `index`,
    and `label` or `path`.

  Raises:
    UserError: a part is missing or damaged.
  """
  parts = Parts.open(path)
  read = [parts.read(index) for index in range(len(parts))]
  return {key: np.concatenate([part[key] for part in read]) for key in read[0]}


def save(path: epath.Path, columns: Mapping[str, np.ndarray]) -> None:
  """Writes arrays with their checksum to an uncompressed .npz file.

  Raises:
    UserError: there is no permission to write it.
    StorageError: the storage is full or fails.
  """
  content = io.BytesIO()
  check = {_CHECKSUM: np.array(_checksum(columns))}
  np.savez(content, allow_pickle=False, **columns, **check)  # pyright: ignore[reportArgumentType]
  paths.save(path, content.getvalue())


def load(path: epath.Path, *keys: str) -> Arrays:
  """Reads the arrays that `save` wrote, and compares their checksums.

  Args:
    path: path of the file.
    *keys: arrays to read, which are then compared with the checksums of the
      archive only; by default all.

  Raises:
    UserError: the file is missing or damaged.
  """
  try:
    with open(path, 'rb') as file, np.load(file) as archive:
      columns = {key: archive[key] for key in keys or archive}
    if not keys and str(columns.pop(_CHECKSUM)) != _checksum(columns):
      raise ValueError('its checksum differs')
  except Exception as error:  # damaged archives raise many kinds of errors
    raise _unreadable(path, paths.reason(error)) from error
  return columns


def _checksum(columns: Mapping[str, np.ndarray]) -> str:
  return fingerprint.checksum(*(columns[key] for key in sorted(columns)))


def _unreadable(path: epath.Path, reason: str) -> UserError:
  return UserError(
    f'{path} cannot be read ({reason}): delete it, and run the command that '
    'writes it again, which computes only this file.'
  )


class Rows(NamedTuple):
  """Rows of an array in a file that `save` wrote, which are read one by one.

  Attributes:
    path: path of the file.
    offset: position of the first row in the file, bytes.
    dtype: dtype of the array.
    width: number of values per row.
  """

  path: str
  offset: int
  dtype: str
  width: int

  @classmethod
  def of(cls, path: epath.Path, key: str, array: np.ndarray) -> 'Rows':
    """Locates the rows of a matrix in the file from which it has been read.

    Args:
      path: path of the file.
      key: name of the array.
      array: the array, `[rows, width]`.
    """
    with open(path, 'rb') as file, zipfile.ZipFile(file) as archive:
      member = archive.getinfo(f'{key}.npy')
      file.seek(member.header_offset)
      header = file.read(_LOCAL_HEADER)
    lengths = np.frombuffer(header[-4:], '<u2')  # of name and extra field
    start = member.header_offset + _LOCAL_HEADER + int(lengths.sum())
    end = start + member.file_size  # the array is at the end of its member
    offset = end - array.nbytes
    return cls(str(path), offset, array.dtype.str, array.shape[1])

  def read(self, row: int) -> np.ndarray:
    """Returns a row."""
    size = self.width * np.dtype(self.dtype).itemsize
    offset = self.offset + row * size
    return np.fromfile(self.path, self.dtype, self.width, offset=offset)
