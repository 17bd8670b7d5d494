"""Writes array_record shards and metadata of a TFDS data set.

TensorFlow is not needed. The features are image (the unchanged bytes of the
file), label and file_name. Each shard is written by one task, followed by a
note about its content. A shard with a note is not written again.
"""

import dataclasses
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

from vit_jax.errors import UserError
from vit_jax.prepare import parallel, runs, workspace
from vit_jax.prepare.archive import Skipped

SHARD_BYTES = 2**29  # bytes of a shard, which a worker holds in memory
_FORMAT = 'array_record'
# One record per group, as in TFDS, for random access. Compression does not make
# JPEGs smaller.
_OPTIONS = 'group_size:1,uncompressed'


class Example(NamedTuple):
  """An image of a shard: name of its file, label, and encoded bytes."""

  name: str
  label: int
  image: bytes


@dataclasses.dataclass(frozen=True)
class Shard:
  """A shard to write.

  Attributes:
    path: path of the shard.
    note: path of the note about its content.
    examples: function that yields the examples, and a `Skipped` for each item
      that is left out.
  """

  path: pathlib.Path
  note: pathlib.Path
  examples: Callable[[], Iterator[Example | Skipped]]


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


def prepared_result(work: pathlib.Path, plan: Any) -> pathlib.Path:
  """Returns the directory of the result, emptied if the plan has changed.

  Args:
    work: working directory.
    plan: everything that the result depends on, as JSON values.
  """
  result = work / 'result'
  if runs.read_json(work / 'plan.json') != plan:
    shutil.rmtree(result, ignore_errors=True)
    shutil.rmtree(work / 'notes', ignore_errors=True)
    runs.write_json(work / 'plan.json', plan)
  result.mkdir(exist_ok=True)
  (work / 'notes').mkdir(exist_ok=True)
  return result


def write_split(
  work: pathlib.Path,
  name: str,
  split: str,
  sources: Sequence[Callable[[], Iterator[Example | Skipped]]],
  workers: int,
) -> Split:
  """Writes the missing shards of a split.

  Args:
    work: working directory; shards are written to result/ in it, notes to
      notes/.
    name: name of the data set.
    split: name of the split.
    sources: functions that yield the content of each shard; picklable.
    workers: number of processes.

  Raises:
    UserError: the disk is full, or a worker was killed.
  """
  total = len(sources)
  names = [
    f'{name}-{split}.{_FORMAT}-{i:05d}-of-{total:05d}' for i in range(total)
  ]
  notes = [work / 'notes' / f'{shard}.json' for shard in names]
  missing = [i for i in range(total) if not notes[i].exists()]
  tasks = (
    Shard(work / 'result' / names[i], notes[i], sources[i]) for i in missing
  )
  progress = parallel.Progress(f'writing {name}/{split}')
  progress.skip((total - len(missing)) / total)
  results = parallel.unordered(_write, tasks, min(workers, len(missing) or 1))
  for done, count in enumerate(results, total - len(missing) + 1):
    progress.add(done / total, count)
  written = [runs.read_json(note) for note in notes]
  return Split(
    [note['length'] for note in written],
    sum(note['num_bytes'] for note in written),
    [Skipped(*item) for note in written for item in note['skipped']],
  )


def _write(shard: Shard) -> int:
  """Writes one shard; returns its number of images."""
  count, num_bytes, skipped = 0, 0, []

  def records() -> Iterator[bytes]:
    nonlocal count, num_bytes
    for example in shard.examples():
      if isinstance(example, Skipped):
        skipped.append(example)
        continue
      record = _serialized(example)
      count, num_bytes = count + 1, num_bytes + len(record)
      yield record

  write_records(shard.path, records(), _OPTIONS)
  note = {'length': count, 'num_bytes': num_bytes, 'skipped': skipped}
  runs.write_json(shard.note, note)
  return count


def write_records(
  path: pathlib.Path, records: Iterable[bytes], options: str
) -> None:
  """Writes an array_record file atomically.

  Args:
    path: path of the file.
    records: records of the file.
    options: options of the array_record writer.

  Raises:
    UserError: the file cannot be written, for example because the disk is full.
  """
  temporary = path.with_name(f'{path.name}.tmp')
  try:
    writer = ArrayRecordWriter(str(temporary), options)
    for record in records:
      writer.write(record)
    writer.close()
  except RuntimeError as error:  # raised by the writer for all errors
    raise UserError(
      f'{path} cannot be written: {error}. Fix the cause and run the same '
      'command again, which continues.'
    ) from error
  os.replace(temporary, path)


def write_metadata(
  result: pathlib.Path,
  name: str,
  splits: dict[str, Split],
  class_names: Sequence[str],
  description: str,
) -> None:
  """Writes the metadata of TFDS.

  Args:
    result: directory of the shards.
    name: name of the data set.
    splits: content of each split.
    class_names: names of the classes, in the order of the labels.
    description: description of the data set.
  """
  features = {
    'image': tfds.features.Image(),
    'label': tfds.features.ClassLabel(names=list(class_names)),
    'file_name': tfds.features.Text(),
  }
  template = naming.ShardedFileTemplate(
    data_dir=epath.Path(result), dataset_name=name, filetype_suffix=_FORMAT
  )
  tfds.folder_dataset.write_metadata(
    data_dir=result,
    features=features,
    split_infos=[
      tfds.core.SplitInfo(
        name=split,
        shard_lengths=written.lengths,
        num_bytes=written.num_bytes,
        filename_template=template.replace(split=split),
      )
      for split, written in splits.items()
    ],
    version=workspace.VERSION,
    filename_template=template,
    check_data=False,
    description=description,
    supervised_keys=('image', 'label'),
  )


def _serialized(example: Example) -> bytes:
  """Serializes a tf.train.Example to the same bytes in every process."""
  proto = tf_example_pb2.Example()  # pyright: ignore (created at import)
  features = proto.features.feature
  features['image'].bytes_list.value.append(example.image)
  features['label'].int64_list.value.append(example.label)
  features['file_name'].bytes_list.value.append(os.fsencode(example.name))
  return proto.SerializeToString(deterministic=True)


def write_list(path: pathlib.Path, skipped: Iterable[Skipped]) -> None:
  """Writes the skipped items, sorted, one per line: name, tab, reason."""
  lines = sorted(
    '\t'.join(part.encode('unicode_escape').decode() for part in item) + '\n'
    for item in skipped
  )
  path.write_text(''.join(lines))
