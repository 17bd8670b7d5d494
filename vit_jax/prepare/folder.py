"""Builds a TFDS data set from a folder: DIR/CLASS/IMAGE, or with splits.

Directories DIR/train, DIR/val and similar that contain CLASS/IMAGE are splits
of these names; without them, all images belong to `train`. The source `folder`
finds the same images (`data/storage/class_folders.py`). Classes are the sorted
names of the class directories of all splits. Order, checks and format are those
of `imagenet21k`; one pass is enough because the images are already files on the
disk.
"""

import functools
import os
import pathlib
import re
from collections.abc import Iterator, Sequence

from vit_jax.data.storage import class_folders
from vit_jax.errors import UserError
from vit_jax.prepare import shards
from vit_jax.prepare.shards import Skipped

NAME = 'folder'
_SPLITS = {'training': 'train', 'testing': 'test'}  # other names are kept
_NAME = re.compile(r'[a-z][a-z0-9_]*')


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
  listings = _listings(os.fspath(source))
  classes = sorted({c for found in listings.values() for c in found.classes})
  labels = {class_name: label for label, class_name in enumerate(classes)}
  files, sizes = {}, {}
  for split, found in listings.items():
    names = map(os.fsdecode, found.paths)
    files[split] = sorted(names, key=lambda name: (shards.key(name), name))
    stats = [os.stat(f'{found.root}/{name}') for name in files[split]]
    sizes[split] = [status.st_size for status in stats]
  plan = {'source': str(source.absolute()), 'shard_bytes': shard_bytes}
  plan |= {'files': files, 'sizes': sizes}
  notes = {}
  with shards.locked(data_dir, name) as work:
    shards.require_space(work, sum(map(sum, sizes.values())))
    shards.start(work, plan)
    for split, names in files.items():
      root = listings[split].root
      count = min(1 + sum(sizes[split]) // shard_bytes, len(names))
      bounds = [i * len(names) // count for i in range(count + 1)]
      sources = [
        functools.partial(_examples, split, root, names[start:stop], labels)
        for start, stop in zip(bounds, bounds[1:], strict=False)
      ]
      notes[split] = shards.write_split(work, name, split, sources, workers)
      if not any(note['length'] for note in notes[split]):
        raise UserError(f'no image of the split {split!r} can be decoded.')
    description = f'Images of the folder {source.name}, by class.'
    shards.finish(work, name, notes, classes, description)


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
    UserError: two directories are the same split, a directory cannot be used,
      or a class name contains characters that cannot be printed.
  """
  listings = {}
  for folder, root in class_folders.roots(source, '--source').items():
    split = _SPLITS.get(folder.lower(), folder.lower())
    if split in listings:
      raise UserError(
        f'{root} and {listings[split].root} are both {split!r}; merge them.'
      )
    listings[split] = class_folders.listing(root)
    for name in listings[split].classes:
      if not name.isprintable():
        raise UserError(f'{root}/{name!r}: rename it as a class name.')
  return listings


def _examples(
  split: str, root: str, names: Sequence[str], labels: dict[str, int]
) -> Iterator[bytes | Skipped]:
  """Yields the examples of one shard.

  Args:
    split: name of the split.
    root: directory of the split.
    names: paths of the images relative to the root.
    labels: label of each class.
  """
  for name in names:
    where = f'{split}/{name}'
    try:
      data = pathlib.Path(root, name).read_bytes()
    except OSError as error:
      yield Skipped(where, f'cannot be read: {error.strerror}')
    else:
      yield shards.example(name, labels[name.partition('/')[0]], data, where)
