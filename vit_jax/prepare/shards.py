"""Writes TFDS data sets as array_record shards, resumably, without TensorFlow.

The features are image (the unchanged bytes of the file), label and file_name.
DATA_DIR/.prepare/NAME is the working directory: it is locked during a
preparation and kept after an interruption. Each shard is written by one task,
followed by a note about its content; a shard with a note is not written again.
The complete result is renamed to its final path, so that a data set is complete
as soon as it exists.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow_datasets as tfds
from array_record.python.array_record_module import (  # pyright: ignore
  ArrayRecordWriter,
)
from etils import epath
from tensorflow_datasets.core import naming
from tensorflow_datasets.proto import tf_example_pb2

from vit_jax.data import progress
from vit_jax.data.images.decode import decode
from vit_jax.data.images.headers import DecodeError
from vit_jax.errors import UserError
from vit_jax.files import paths
from vit_jax.prepare import parallel

VERSION = '1.0.0'
SHARD_BYTES = 2**29  # bytes of a shard, which a worker holds in memory
_FORMAT = 'array_record'
_FOLDER = '.prepare'
# One record per group, as in TFDS, for random access. Compression does not make
# JPEGs smaller.
_OPTIONS = 'group_size:1,uncompressed'


class Skipped(NamedTuple):
  """A part of the source that is left out, and the reason."""

  name: str
  reason: str


class Split(NamedTuple):
  """Content of the shards of a split.

  Attributes:
    lengths: number of images in each shard.
    num_bytes: total size of the records.
    skipped: images that were left out.
  """

  lengths: list[int]
  num_bytes: int
  skipped: list[Skipped]


def key(name: str) -> int:
  """Returns the hash of a file name, from 0 to 2^64 - 1.

  Images are ordered by it, so that every part of a split is a random sample.
  """
  encoded = name.encode('utf-8', 'surrogateescape')
  digest = hashlib.blake2b(encoded, digest_size=8, person=b'vit_jax order')
  return int.from_bytes(digest.digest(), 'big')


def problem(data: bytes) -> str | None:
  """Returns the reason why training could not decode an image; None if it can.

  The format is determined from the content: a PNG file named .JPEG is a PNG
  file.
  """
  try:
    decode(data)
  except DecodeError as error:
    return str(error)
  return None


def example(name: str, label: int, image: bytes) -> bytes:
  """Serializes a tf.train.Example to the same bytes in every process."""
  proto = tf_example_pb2.Example()  # pyright: ignore (created at import)
  features = proto.features.feature
  features['image'].bytes_list.value.append(image)
  features['label'].int64_list.value.append(label)
  features['file_name'].bytes_list.value.append(os.fsencode(name))
  return proto.SerializeToString(deterministic=True)


def with_label(record: bytes, labels: dict[int, int]) -> bytes:
  """Replaces the label of a serialized example by `labels[label]`."""
  proto = tf_example_pb2.Example.FromString(record)  # pyright: ignore
  value = proto.features.feature['label'].int64_list.value
  value[0] = labels[value[0]]
  return proto.SerializeToString(deterministic=True)


def write_json(path: pathlib.Path, value: Any) -> None:
  """Writes a JSON file atomically."""
  paths.write(epath.Path(path), json.dumps(value))


def read_json(path: pathlib.Path) -> Any:
  """Reads a file that `write_json` wrote; None if it does not exist."""
  return json.loads(path.read_text()) if path.exists() else None


def is_prepared(data_dir: pathlib.Path, name: str) -> bool:
  """Returns whether a data set that this package builds exists."""
  return (data_dir / name / VERSION / 'dataset_info.json').exists()


def clean(data_dir: pathlib.Path, name: str) -> None:
  """Removes the working directory of a finished data set, if it still exists.

  Raises:
    UserError: another process has locked the directory.
  """
  if (data_dir / _FOLDER / name).exists():
    with locked(data_dir, name) as work:
      shutil.rmtree(work)


@contextlib.contextmanager
def locked(data_dir: pathlib.Path, name: str) -> Iterator[pathlib.Path]:
  """Locks the working directory of a data set and yields its path.

  Raises:
    UserError: another process has locked the directory.
    OSError: the directory cannot be written, for example because another user
      has started to prepare the data set.
  """
  root = data_dir / _FOLDER
  root.mkdir(parents=True, exist_ok=True)
  with open(root / f'{name}.lock', 'a') as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise UserError(
        f'another process is preparing {name} in {data_dir}: wait for it.'
      ) from error
    work = root / name
    work.mkdir(mode=0o700, exist_ok=True)
    yield work


def require_space(work: pathlib.Path, num_bytes: int) -> None:
  """Checks that the disk has enough space for a preparation.

  Args:
    work: working directory, whose files count as part of the space needed.
    num_bytes: space needed in total, bytes.

  Raises:
    UserError: the disk is too full; the message contains the space needed.
  """
  existing = sum(p.stat().st_size for p in work.rglob('*') if p.is_file())
  free = shutil.disk_usage(work).free
  if free < num_bytes - existing:
    raise UserError(
      f'the disk of --data_dir={work.parent.parent} has {free / 1e9:,.1f} GB '
      f'free; {(num_bytes - existing) / 1e9:,.1f} GB are needed.'
    )


def start(work: pathlib.Path, plan: Any) -> None:
  """Creates the directory of the result, empty if the plan has changed.

  Args:
    work: working directory.
    plan: everything that the result depends on, as JSON values.
  """
  result = work / 'result'
  if read_json(work / 'plan.json') != plan:
    shutil.rmtree(result, ignore_errors=True)
    shutil.rmtree(work / 'notes', ignore_errors=True)
    write_json(work / 'plan.json', plan)
  result.mkdir(exist_ok=True)
  (work / 'notes').mkdir(exist_ok=True)


class _Shard(NamedTuple):
  """A shard to write: its path, the path of its note, and its content."""

  path: pathlib.Path
  note: pathlib.Path
  records: Callable[[], Iterator[bytes | Skipped]]


def write_split(
  work: pathlib.Path,
  name: str,
  split: str,
  sources: Sequence[Callable[[], Iterator[bytes | Skipped]]],
  workers: int,
) -> Split:
  """Writes the missing shards of a split.

  Args:
    work: working directory; shards are written to result/ in it, notes to
      notes/.
    name: name of the data set.
    split: name of the split.
    sources: one function per shard that yields its serialized examples, and a
      `Skipped` for each item that is left out; picklable.
    workers: number of processes.

  Raises:
    UserError: the disk is full, or a worker was killed.
  """
  total = len(sources)
  tasks = []
  for i, source in enumerate(sources):
    file = f'{name}-{split}.{_FORMAT}-{i:05d}-of-{total:05d}'
    note = work / 'notes' / f'{file}.json'
    tasks.append(_Shard(work / 'result' / file, note, source))
  missing = [task for task in tasks if not task.note.exists()]
  written = parallel.unordered(_write, missing, min(workers, len(missing)))
  for _ in progress.shown(written, len(missing), f'writing {name}/{split}'):
    pass
  notes = [read_json(task.note) for task in tasks]
  return Split(
    [note['length'] for note in notes],
    sum(note['num_bytes'] for note in notes),
    [Skipped(*item) for note in notes for item in note['skipped']],
  )


def _write(shard: _Shard) -> None:
  """Writes one shard and its note."""
  sizes, skipped = [], []

  def records() -> Iterator[bytes]:
    for item in shard.records():
      if isinstance(item, Skipped):
        skipped.append(item)
      else:
        sizes.append(len(item))
        yield item

  write_records(shard.path, records())
  note = dict(length=len(sizes), num_bytes=sum(sizes), skipped=skipped)
  write_json(shard.note, note)


def write_records(path: pathlib.Path, records: Iterable[bytes]) -> None:
  """Writes an array_record file atomically.

  Args:
    path: path of the file.
    records: records of the file.

  Raises:
    UserError: the file cannot be written, for example because the disk is full.
  """
  temporary = path.with_name(f'{path.name}.tmp')
  try:
    writer = ArrayRecordWriter(str(temporary), _OPTIONS)
    for record in records:
      writer.write(record)
    writer.close()
  except RuntimeError as error:  # raised by the writer for all errors
    raise UserError(
      f'{path} cannot be written: {error}. The same command continues.'
    ) from error
  os.replace(temporary, path)


def finish(
  work: pathlib.Path,
  name: str,
  splits: dict[str, Split],
  class_names: Sequence[str],
  description: str,
) -> pathlib.Path:
  """Writes metadata and the list of skipped files, and publishes the result.

  Args:
    work: working directory, which is removed.
    name: name of the data set.
    splits: content of each split.
    class_names: names of the classes, in the order of the labels.
    description: description of the data set.

  Returns:
    The final path, DATA_DIR/NAME/VERSION.

  Raises:
    UserError: the final path exists.
  """
  result = work / 'result'
  skipped = [item for written in splits.values() for item in written.skipped]
  lines = sorted(
    '\t'.join(text.encode('unicode_escape').decode() for text in item) + '\n'
    for item in skipped
  )
  (result / 'undecodable.txt').write_text(''.join(lines))
  template = naming.ShardedFileTemplate(
    data_dir=epath.Path(result), dataset_name=name, filetype_suffix=_FORMAT
  )
  tfds.folder_dataset.write_metadata(
    data_dir=result,
    features={
      'image': tfds.features.Image(),
      'label': tfds.features.ClassLabel(names=list(class_names)),
      'file_name': tfds.features.Text(),
    },
    split_infos=[
      tfds.core.SplitInfo(
        name=split,
        shard_lengths=written.lengths,
        num_bytes=written.num_bytes,
        filename_template=template.replace(split=split),
      )
      for split, written in splits.items()
    ],
    version=VERSION,
    filename_template=template,
    check_data=False,
    description=description,
    supervised_keys=('image', 'label'),
  )
  target = work.parent.parent / name / VERSION
  target.parent.mkdir(parents=True, exist_ok=True)
  try:
    os.rename(result, target)
  except OSError as error:
    raise UserError(
      f'{target} exists and is not a complete data set: move it elsewhere.'
    ) from error
  shutil.rmtree(work)
  return target
