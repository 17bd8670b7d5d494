"""Builds a TFDS data set from a folder: DIR/CLASS/IMAGE, or with splits.

Directories DIR/train, DIR/val and similar that contain CLASS/IMAGE are splits
of these names; without them, all images belong to `train`. The source `folder`
finds the same images (`data/storage/class_folders.py`). Classes are the sorted
names of the class directories of all splits. Order, checks and format are those
of `imagenet21k`; one pass is enough because the images are already files on the
disk.
"""

import dataclasses
import logging
import os
import pathlib
import re
from collections.abc import Iterator

from vit_jax.data.storage import class_folders
from vit_jax.errors import UserError
from vit_jax.prepare import shards
from vit_jax.prepare.shards import Skipped

log = logging.getLogger('vit_jax')
NAME = 'folder'
_SPLITS = {'training': 'train', 'testing': 'test'}  # other names are kept
_NAME = re.compile(r'[a-z][a-z0-9_]*')


@dataclasses.dataclass(frozen=True)
class _File:
  """An image file; `name` is relative to the directory of the split."""

  path: str
  name: str
  class_name: str
  size: int


def prepare(
  source: pathlib.Path,
  data_dir: pathlib.Path,
  name: str,
  *,
  workers: int = 1,
  shard_bytes: int = shards.SHARD_BYTES,
) -> None:
  """Builds the data set in data_dir/name/1.0.0, or continues to build it.

  Args:
    source: folder of images.
    data_dir: TFDS directory.
    name: name of the data set.
    workers: number of processes.
    shard_bytes: approximate size of one shard of the result.

  Raises:
    UserError: the folder or a name cannot be used, or the disk is too small.
    OSError: a file cannot be read or written.
  """
  check_name(name)
  splits = {
    split: _files(listing)
    for split, listing in _listings(os.fspath(source)).items()
  }
  classes = sorted({f.class_name for files in splits.values() for f in files})
  labels = {class_name: label for label, class_name in enumerate(classes)}
  plan = [
    str(source.absolute()),
    shard_bytes,
    {k: [[f.name, f.size] for f in files] for k, files in splits.items()},
  ]
  written = {}
  with shards.locked(data_dir, name) as work:
    size = sum(f.size for files in splits.values() for f in files)
    shards.require_space(work, size)
    shards.start(work, plan)
    for split, files in splits.items():
      sources = _shards(split, files, labels, shard_bytes)
      written[split] = shards.write_split(work, name, split, sources, workers)
      if not sum(written[split].lengths):
        raise UserError(f'no image of the split {split!r} can be decoded.')
    description = f'Images of the folder {source.name}, by class.'
    target = shards.finish(work, name, written, classes, description)
  counts = [f'{sum(w.lengths):,} {split}' for split, w in written.items()]
  log.info(
    '%s: %s images in %d classes; %d left out, listed in undecodable.txt',
    target,
    ', '.join(counts),
    len(classes),
    sum(len(w.skipped) for w in written.values()),
  )


def check_name(name: str) -> None:
  """Checks the name of a data set.

  Raises:
    UserError: the name is not allowed.
  """
  if not _NAME.fullmatch(name):
    raise UserError(
      f'--name is {name!r}; allowed: lower-case letters, digits and _, as in '
      '--name=my_set.'
    )


def _listings(source: str) -> dict[str, class_folders.Listing]:
  """Lists the images of each split: 'train', 'val', 'test', ….

  Raises:
    UserError: two directories are the same split, or a directory cannot be
      used.
  """
  listings = {}
  for folder, root in class_folders.roots(source, '--source').items():
    split = _SPLITS.get(folder.lower(), folder.lower())
    if split in listings:
      raise UserError(
        f'{root} and {listings[split].root} are both {split!r}; merge them.'
      )
    listings[split] = class_folders.listing(root)
  return listings


def _files(listing: class_folders.Listing) -> list[_File]:
  """Returns the images of a split, ordered by the hash of their names.

  Raises:
    UserError: a class name contains characters that cannot be printed.
  """
  for name in listing.classes:
    if not name.isprintable():
      raise UserError(f'{listing.root}/{name!r}: rename it as a class name.')
  files = []
  for name in map(os.fsdecode, listing.paths):
    path = f'{listing.root}/{name}'
    files.append(
      _File(path, name, name.partition('/')[0], os.stat(path).st_size)
    )
  return sorted(files, key=lambda file: (shards.key(file.name), file.name))


def _shards(
  split: str, files: list[_File], labels: dict[str, int], shard_bytes: int
) -> list['_Examples']:
  """Splits files into consecutive parts of nearly equal size."""
  size = sum(file.size for file in files)
  count = min(1 + size // shard_bytes, len(files))
  bounds = [i * len(files) // count for i in range(count + 1)]
  return [
    _Examples(
      split, tuple((f, labels[f.class_name]) for f in files[start:stop])
    )
    for start, stop in zip(bounds, bounds[1:], strict=False)
  ]


@dataclasses.dataclass(frozen=True)
class _Examples:
  """A picklable function that yields the examples of one shard.

  Attributes:
    split: name of the split.
    files: files of the shard and their labels.
  """

  split: str
  files: tuple[tuple[_File, int], ...]

  def __call__(self) -> Iterator[bytes | Skipped]:
    for file, label in self.files:
      try:
        data = pathlib.Path(file.path).read_bytes()
        reason = shards.problem(data)
      except OSError as error:
        data, reason = b'', f'cannot be read: {error.strerror}'
      if reason is None:
        yield shards.example(file.name, label, data)
      else:
        yield Skipped(f'{self.split}/{file.name}', reason)
