"""`imagenet21k`: the public ImageNet-21k archives as a TFDS data set.

TFDS does not provide it. There is one split, `train`, ordered by a hash of the
file names, so that every part of it is a random sample; `train[:51200]` is used
for validation. Files are kept unchanged. Files that training could not decode
are left out and listed in undecodable.txt.

Classes are synsets in the order of their WordNet names: label k is the k-th
synset of the archive. The usual head has 21,843 outputs: the 21,841 synsets of
the fall 2011 archive and two more, in the same order. Without a class list, its
last outputs stay unused. A class list (one line per output, which starts with
the synset) gives the labels of an official head instead.

The archive is read once to check every image; its positions are stored, sorted
by hash. Shards, which are intervals of the sorted list, are then copied from
the archive. Synsets and shards that are finished are not repeated. This needs
disk space of the size of the archive.

`fall11_whole.tar` contains n00004475.tar, n00005787.tar, …; a directory of such
tar files, such as that of the unpacked winter21_whole.tar.gz, is also accepted.
Each of them contains n00004475_15899.JPEG, …. No file is extracted: members are
read into memory. Their names are used only to determine the class, and as a
text feature.
"""

import collections
import functools
import io
import itertools
import json
import logging
import os
import pathlib
import re
import tarfile
from collections.abc import Iterator
from typing import IO, NamedTuple

import numpy as np
from etils import epath
from jaxtyping import Shaped

from vit_jax.data import progress
from vit_jax.data.images.decode import decode
from vit_jax.data.images.headers import DecodeError
from vit_jax.errors import UserError
from vit_jax.files import paths
from vit_jax.prepare import shards

log = logging.getLogger('vit_jax')
_VALIDATION = 51_200  # images held out by configs/l16_i21k.py
_SYNSET = re.compile(r'(?:[^/]*/)*(n\d{8})\.tar')
_BLOCK = 512  # bytes of a block of the tar format
# Fields of an image: hash of its name, number of its synset, offset in the
# file that contains it and size, bytes.
_FIELDS = (
  ('key', np.uint64),
  ('synset', np.int32),
  ('offset', np.int64),
  ('size', np.int64),
)


def prepare(
  source: pathlib.Path,
  data_dir: pathlib.Path,
  *,
  class_list: pathlib.Path | None = None,
  workers: int = 1,
  shard_bytes: int = shards.SHARD_BYTES,
) -> None:
  """Builds the data set in data_dir/imagenet21k/1.0.0, or continues it.

  Args:
    source: path of the archive; see `synsets`.
    data_dir: TFDS directory.
    class_list: file of synsets in the order of labels.
    workers: number of processes.
    shard_bytes: approximate size of one shard of the result.

  Raises:
    UserError: the source or the class list cannot be used, or the disk is too
      small.
    OSError: a file cannot be read or written.
  """
  listed = _class_list(class_list) if class_list else None
  found = synsets(source)
  names = _class_names(found, listed)
  with shards.locked(data_dir) as work:
    shards.require_space(work, sum(synset.size for synset in found))
    images, skipped = _index(work, found, workers)
    num_bytes = int(images['size'].sum())
    num_shards = min(1 + num_bytes // shard_bytes, len(images))
    stamps = [synset.stamp() for synset in found]
    shards.start(work, {'synsets': stamps, 'names': names, 'count': num_shards})
    np.save(work / 'images.npy', images)
    # Shard i has the images from bounds[i] to bounds[i + 1].
    bounds = [len(images) * i // num_shards for i in range(num_shards + 1)]
    labels = {_number(name): label for label, name in enumerate(names)}
    files = {_number(synset.wnid): synset.path for synset in found}
    sources = [
      functools.partial(
        _records, work / 'images.npy', start, stop, files, labels
      )
      for start, stop in itertools.pairwise(bounds)
    ]
    shards.write_shards(work, sources, workers)
    lengths = np.diff(bounds).tolist()
    shards.finish(work, lengths, num_bytes, names, skipped)
  if len(images) > _VALIDATION:
    log.info(
      'to train on it: python -m vit_jax.train --config=configs/l16_i21k.py '
      '--config.source.data_dir=%s --config.train.num_examples=%d',
      data_dir,
      len(images) - _VALIDATION,
    )


class Synset(NamedTuple):
  """The tar file of one synset, a range of a file.

  Attributes:
    wnid: WordNet name of the class, for example 'n00004475'.
    path: path of the file that contains it.
    offset: position in that file, in bytes.
    size: length in bytes.
  """

  wnid: str
  path: str
  offset: int
  size: int

  def read(self) -> bytes:
    """Reads the bytes of the tar file.

    Raises:
      OSError: the file cannot be read.
    """
    return _read(self.path, self.offset, self.size)

  def stamp(self) -> list[str | int]:
    """Returns values that change if the tar file may have changed."""
    return [*self, os.stat(self.path).st_mtime_ns]


def _number(wnid: str) -> int:
  """Returns the number in the name of a synset: 4475 for 'n00004475'."""
  return int(wnid[1:])


class Image(NamedTuple):
  """An image in the tar file of a synset.

  Attributes:
    name: name of the member.
    offset: position in the tar file, in bytes.
    data: content.
  """

  name: str
  offset: int
  data: bytes


class Skipped(NamedTuple):
  """A part of the source that is left out, and the reason."""

  name: str
  reason: str


def _read(path: str, offset: int, size: int) -> bytes:
  """Reads a part of a file; offset and size in bytes."""
  with open(path, 'rb') as file:
    file.seek(offset)
    return file.read(size)


def synsets(source: pathlib.Path) -> list[Synset]:
  """Returns the synsets of a source, in its order; reads only the headers.

  Args:
    source: archive, or directory of tar files.

  Raises:
    UserError: the file does not exist, is compressed, is another archive, or is
      truncated.
  """
  found = []
  try:
    if source.is_dir():
      for path in sorted(source.iterdir()):
        if _SYNSET.fullmatch(path.name):
          found.append(Synset(path.stem, str(path), 0, path.stat().st_size))
    else:
      with (
        source.open('rb') as file,
        tarfile.open(fileobj=file, mode='r:') as tar,
      ):
        for member in tar:
          match = _SYNSET.fullmatch(member.name)
          if match and member.isreg():
            at = member.offset_data
            found.append(Synset(match[1], str(source), at, member.size))
        _check_end(file, tar.offset)
    if not found:
      raise EOFError('it contains no nXXXXXXXX.tar')
  except (OSError, tarfile.TarError, EOFError) as error:
    raise UserError(
      f'--source={source} is not a complete archive ({error}); {len(found)} '
      'synsets were read. Give the whole fall11_whole.tar of image-net.org, or '
      'a directory of its nXXXXXXXX.tar files; unpack winter21_whole.tar.gz '
      '(tar -xf) and give its directory.'
    ) from error
  return found


def _check_end(file: IO[bytes], offset: int) -> None:
  """Checks that the archive ends at an offset, in bytes.

  Python's tarfile regards a damaged header as the end of the archive, whose
  end are blocks of zeros.

  Raises:
    tarfile.ReadError: the block at the offset is not empty.
  """
  file.seek(offset)
  if file.read(_BLOCK).strip(b'\0'):
    raise tarfile.ReadError(f'byte {offset:,} is not the start of a header')


def pictures(wnid: str, data: bytes) -> Iterator[Image | Skipped]:
  """Yields the images of a synset's tar file, in its order.

  If the file is damaged, the images before the damage are yielded, and then a
  `Skipped` that describes it. A member that is not a file in the directory of
  the synset is also left out.

  Args:
    wnid: WordNet name of the synset, for the description.
    data: content of the tar file.
  """
  file, count = io.BytesIO(data), 0
  try:
    with tarfile.open(fileobj=file, mode='r:') as tar:
      for member in tar:
        if member.isdir():
          continue
        count += 1
        name = member.name.removeprefix('./')
        if any(part in ('', '.', '..') for part in name.split('/')):
          reason = 'the path may be outside of the directory'
          yield Skipped(member.name, reason)
        elif not member.isreg() or member.issparse():
          yield Skipped(member.name, 'a link or another special member')
        else:
          content = tar.extractfile(member)
          assert content is not None  # a regular file
          yield Image(name, member.offset_data, content.read())
      _check_end(file, tar.offset)
  except Exception as error:  # noqa: BLE001 (damaged headers raise many kinds)
    yield Skipped(f'{wnid}.tar', f'damaged after {count} members: {error}')


def _index(
  work: pathlib.Path, found: list[Synset], workers: int
) -> tuple[Shaped[np.ndarray, ' n'], list[list[str]]]:
  """Checks all images; the results of synsets that exist are not repeated.

  Returns:
    The images with `_FIELDS` and `name`, sorted by hash; and what is left out.
  """
  (work / 'synsets').mkdir(exist_ok=True)
  files = [work / 'synsets' / f'{synset.wnid}.npz' for synset in found]
  tasks = [
    functools.partial(_check, file, synset)
    for file, synset in zip(files, found, strict=True)
  ]
  checked = shards.unordered(tasks, workers)
  for _ in progress.shown(checked, len(found), 'checking images'):
    pass  # the results are in the files
  rows, skipped = [], []
  for file in files:
    with np.load(file) as arrays:
      rows.append(arrays['images'])
      skipped += json.loads(str(arrays['about']))['skipped']
  images = np.concatenate(rows)
  if not len(images):
    raise UserError('none of the images of the archive can be decoded.')
  # Stable: images with equal names stay in order.
  return images[np.argsort(images['key'], kind='stable')], skipped


def _check(path: pathlib.Path, synset: Synset) -> None:
  """Decodes the images of a synset, and stores where they are.

  Args:
    path: path of the .npz file to write: the array `images` with `_FIELDS` and
      `name`, and `about` in JSON. It is kept if its stamp is the current one.
    synset: tar file to check.
  """
  stamp = synset.stamp()
  if path.exists():
    with np.load(path) as arrays:
      if json.loads(str(arrays['about']))['stamp'] == stamp:
        return
  rows, skipped = [], []
  for image in pictures(synset.wnid, synset.read()):
    where = f'{synset.wnid}/{image.name}'
    if isinstance(image, Skipped):
      skipped.append([where, image.reason])
      continue
    try:
      decode(image.data)
    except DecodeError as error:
      skipped.append([where, str(error)])
      continue
    rows.append(
      (
        shards.order_key(where),
        _number(synset.wnid),
        synset.offset + image.offset,
        len(image.data),
        os.fsencode(image.name),
      )
    )
  width = max([1, *(len(row[-1]) for row in rows)])
  content = io.BytesIO()
  np.savez(
    content,
    images=np.array(rows, [*_FIELDS, ('name', f'S{width}')]),
    about=json.dumps({'stamp': stamp, 'skipped': skipped}),
  )
  paths.write(epath.Path(path), content.getvalue())


def _records(
  index: pathlib.Path,
  start: int,
  stop: int,
  files: dict[int, str],
  labels: dict[int, int],
) -> Iterator[bytes]:
  """Yields the records of one shard.

  Args:
    index: file of all images, sorted by hash.
    start: first image of the shard.
    stop: end of the shard, exclusive.
    files: file that contains a synset, by the number in its name.
    labels: label of a synset, by the number in its name.
  """
  for image in np.load(index, mmap_mode='r')[start:stop]:
    synset = int(image['synset'])
    data = _read(files[synset], int(image['offset']), int(image['size']))
    yield shards.example(bytes(image['name']), labels[synset], data)


def _class_names(found: list[Synset], listed: list[str] | None) -> list[str]:
  """Returns the synsets in the order of labels.

  Args:
    found: synsets of the archive.
    listed: synsets of the class list, if there is one.

  Raises:
    UserError: the class list lacks a synset of the archive.
  """
  in_archive = sorted({synset.wnid for synset in found})
  if listed is None:
    return in_archive
  missing = sorted(set(in_archive) - set(listed))
  if missing:
    raise UserError(
      f'--class_list lacks {len(missing):,} of the {len(in_archive):,} synsets '
      f'of the archive: {", ".join(missing[:3])}, … Complete or remove it.'
    )
  return listed


def _class_list(path: pathlib.Path) -> list[str]:
  """Returns the synsets at the starts of the lines of a file.

  Raises:
    UserError: the file cannot be read, has another form, or repeats a synset.
  """
  try:
    lines = path.read_text().splitlines()
  except (OSError, ValueError) as error:
    raise UserError(f'--class_list={path} cannot be read: {error}.') from error
  names = [line.split()[0].rstrip(',') for line in lines if line.strip()]
  wrong = [name for name in names if not re.fullmatch(r'n\d{8}', name)]
  counts = collections.Counter(names)
  wrong += [name for name, count in counts.items() if count > 1]
  if wrong or not names:
    raise UserError(
      f'--class_list={path} contains {wrong[:1]}: each line must start with a '
      "different synset, such as 'n00004475'."
    )
  return names
