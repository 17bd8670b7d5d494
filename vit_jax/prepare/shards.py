"""Writes ImageNet-21k as array_record shards, resumably, without TensorFlow.

The features are image (the unchanged bytes of the file), label and file_name.
DATA_DIR/.prepare/imagenet21k is the working directory, which is kept after an
interruption; DATA_DIR/.prepare is locked during a preparation. Each shard is
written by one task; a shard that exists is not written again. The complete
result is renamed to its final path, so that a data set is complete as soon as
it exists.
"""

import contextlib
import functools
import hashlib
import json
import logging
import multiprocessing
import os
import pathlib
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

import tensorflow_datasets as tfds
from array_record.python.array_record_module import (  # pyright: ignore
  ArrayRecordWriter,
)
from etils import epath
from tensorflow_datasets.core import naming
from tensorflow_datasets.proto import tf_example_pb2

from vit_jax.data import progress
from vit_jax.errors import UserError
from vit_jax.files import jsonl, paths
from vit_jax.processes import interruption, machine
from vit_jax.run import lock

log = logging.getLogger('vit_jax')
Result = TypeVar('Result')
NAME, VERSION = 'imagenet21k', '1.0.0'
_DESCRIPTION = (
  'ImageNet-21k: every image of the public archive that can be decoded, by '
  'synset, in random order.'
)
SHARD_BYTES = 2**29  # bytes of a shard, which a worker holds in memory
_WORKER_BYTES = 2**31  # memory of a worker, including a synset or a shard
_FORMAT = 'array_record'
_FOLDER = '.prepare'
# One record per group, as in TFDS, for random access. Compression does not make
# JPEGs smaller.
_OPTIONS = 'group_size:1,uncompressed'


def order_key(name: str) -> int:
  """Returns the hash of a file name, from 0 to 2^64 - 1.

  Images are ordered by it, so that every part of a split is a random sample.
  """
  encoded = name.encode('utf-8', 'surrogateescape')
  digest = hashlib.blake2b(encoded, digest_size=8, person=b'vit_jax order')
  return int.from_bytes(digest.digest(), 'big')


def example(name: bytes, label: int, image: bytes) -> bytes:
  """Serializes a tf.train.Example to the same bytes in every process.

  Args:
    name: name of the file, for the feature `file_name`.
    label: label of the image.
    image: content of the file. Its format is determined from the content: a PNG
      file named .JPEG is a PNG file.
  """
  proto = tf_example_pb2.Example()  # pyright: ignore (created at import)
  features = proto.features.feature
  features['image'].bytes_list.value.append(image)
  features['label'].int64_list.value.append(label)
  features['file_name'].bytes_list.value.append(name)
  return proto.SerializeToString(deterministic=True)


def is_prepared(data_dir: pathlib.Path, name: str) -> bool:
  """Returns whether a data set that this package builds exists."""
  return (data_dir / name / VERSION / 'dataset_info.json').exists()


def clean(data_dir: pathlib.Path, name: str) -> None:
  """Removes the working directory of a finished data set, if it still exists.

  Raises:
    UserError: another process has locked the directory.
  """
  if (data_dir / _FOLDER / name).exists():
    with locked(data_dir) as work:
      shutil.rmtree(work)


@contextlib.contextmanager
def locked(data_dir: pathlib.Path) -> Iterator[pathlib.Path]:
  """Locks the preparations of a TFDS directory; yields the working directory.

  The lock is that of its parent, because the working directory is removed while
  the lock is held.

  Raises:
    UserError: another process has locked the directory, or there is no
      permission, for example because another user has started to prepare.
    StorageError: the storage is full or does not respond.
    OSError: the directory cannot be created.
  """
  root = data_dir / _FOLDER
  root.mkdir(parents=True, exist_ok=True)
  with lock.hold(epath.Path(root)):
    work = root / NAME
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
  free, needed = shutil.disk_usage(work).free, num_bytes - existing
  if free < needed:
    raise UserError(
      f'the disk of --data_dir={work.parent.parent} has {free / 1e9:,.1f} GB '
      f'free; {needed / 1e9:,.1f} GB are needed.'
    )


def start(work: pathlib.Path, plan: dict[str, Any]) -> None:
  """Creates the directory of the shards, empty if the plan has changed.

  Args:
    work: working directory.
    plan: everything that the result depends on, as JSON values.
  """
  file = epath.Path(work / 'plan.json')
  if jsonl.read_object(file) != plan:
    shutil.rmtree(work / 'result', ignore_errors=True)
    paths.write(file, json.dumps(plan))
  (work / 'result').mkdir(exist_ok=True)


def write_shards(
  work: pathlib.Path,
  sources: Sequence[Callable[[], Iterator[bytes]]],
  workers: int,
) -> None:
  """Writes the missing shards of the split `train`.

  Args:
    work: working directory; shards are written to result/ in it.
    sources: one function per shard that yields its serialized examples;
      picklable.
    workers: number of processes.

  Raises:
    UserError: the disk is full, or a worker was killed.
  """
  missing = []
  for i, source in enumerate(sources):
    file = f'{NAME}-train.{_FORMAT}-{i:05d}-of-{len(sources):05d}'
    path = work / 'result' / file
    if not path.exists():
      missing.append(functools.partial(write_shard, path, source))
  written = unordered(missing, min(workers, len(missing)))
  for _ in progress.shown(written, len(missing), f'writing {NAME}/train'):
    pass  # the results are in the files


def write_shard(
  path: pathlib.Path, source: Callable[[], Iterator[bytes]]
) -> None:
  """Writes one shard atomically.

  Raises:
    UserError: the file cannot be written, for example because the disk is full.
  """
  temporary = path.with_name(f'{path.name}.tmp')
  try:
    writer = ArrayRecordWriter(str(temporary), _OPTIONS)
    for record in source():
      writer.write(record)
    writer.close()
  except RuntimeError as error:  # raised by the writer for all errors
    raise UserError(
      f'{path} cannot be written: {error}. The same command continues.'
    ) from error
  os.replace(temporary, path)


def finish(
  work: pathlib.Path,
  lengths: Sequence[int],
  num_bytes: int,
  class_names: Sequence[str],
  skipped: Sequence[Sequence[str]],
) -> None:
  """Writes metadata and the list of skipped files, and moves the result.

  Its final path is DATA_DIR/imagenet21k/1.0.0.

  Args:
    work: working directory, which is removed.
    lengths: number of images of each shard.
    num_bytes: size of all images.
    class_names: names of the classes, in the order of the labels.
    skipped: names and reasons of what was left out.

  Raises:
    UserError: the final path exists.
  """
  result = work / 'result'
  lines = sorted(
    '\t'.join(text.encode('unicode_escape').decode() for text in item) + '\n'
    for item in skipped
  )
  (result / 'undecodable.txt').write_text(''.join(lines))
  template = naming.ShardedFileTemplate(
    data_dir=epath.Path(result), dataset_name=NAME, filetype_suffix=_FORMAT
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
        name='train',
        shard_lengths=list(lengths),
        num_bytes=num_bytes,
        filename_template=template.replace(split='train'),
      )
    ],
    version=VERSION,
    filename_template=template,
    check_data=False,
    description=_DESCRIPTION,
    supervised_keys=('image', 'label'),
  )
  target = work.parent.parent / NAME / VERSION
  target.parent.mkdir(parents=True, exist_ok=True)
  try:
    os.rename(result, target)
  except OSError as error:
    raise UserError(
      f'{target} exists and is not a complete data set: move it elsewhere.'
    ) from error
  shutil.rmtree(work)
  log.info(
    '%s: %s images in %s classes; %s left out, listed in undecodable.txt',
    target,
    f'{sum(lengths):,}',
    f'{len(class_names):,}',
    f'{len(skipped):,}',
  )


def default_workers() -> int:
  """Returns the number of workers: one per core, limited by memory."""
  by_memory = machine.memory_bytes() // _WORKER_BYTES
  return max(1, min(machine.cores(), by_memory))


def unordered(
  tasks: Sequence[Callable[[], Result]], workers: int
) -> Iterator[Result]:
  """Executes tasks, and yields their results in the order of completion.

  Args:
    tasks: picklable functions, whose exceptions are raised again here.
    workers: number of processes; with 1 or 0, tasks run in this process.

  Raises:
    UserError: a process was killed.
  """
  if workers <= 1:
    yield from (task() for task in tasks)
    return
  pool = futures.ProcessPoolExecutor(
    workers,
    # A forked copy of a process with threads (JAX, TensorFlow) may hang.
    multiprocessing.get_context('spawn'),
    initializer=_start_worker,
  )
  try:
    done = futures.as_completed([pool.submit(task) for task in tasks])
    yield from (future.result() for future in done)
  except BrokenProcessPool as error:
    raise UserError(
      'a worker process was killed, probably for lack of memory: run the same '
      f'command with fewer --workers than {workers}; it continues.'
    ) from error
  finally:
    pool.shutdown(wait=True, cancel_futures=True)


def _start_worker() -> None:
  """Makes a worker process end when its parent ends, or by Ctrl-C."""
  # Ctrl-C would otherwise print a traceback of each worker.
  signal.signal(signal.SIGINT, signal.SIG_DFL)
  interruption.end_worker_with_parent()
