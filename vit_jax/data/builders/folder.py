"""A TFDS data set from a folder of images: DIR/CLASS/IMAGE, or with splits.

DIR/train/CLASS/IMAGE, DIR/val/CLASS/IMAGE and the like give splits of these
names; without such directories everything becomes `train`. Classes are the
directories' names, sorted; all splits share them. Order, checks and format are
those of `imagenet21k`; the images lie on the disk already, so one pass does.
"""

import dataclasses
import logging
import os
import pathlib
import re
from collections.abc import Iterator

from vit_jax.data.builders import images, runs, shards, workspace
from vit_jax.data.builders.archive import Skipped
from vit_jax.errors import UserError

log = logging.getLogger('vit_jax')
NAME = 'folder'
SPLITS = ('train', 'val', 'valid', 'validation', 'dev', 'test')
_NAME = re.compile(r'[a-z][a-z0-9_]*')
_SUFFIXES = ('.jpg', '.jpeg', '.png', '.gif', '.bmp', '.webp', '.tif', '.tiff')


@dataclasses.dataclass(frozen=True)
class _File:
  """An image file; `name` is relative to its split's directory."""

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
  """Builds the data set in data_dir/name/1.0.0, or goes on with it.

  Args:
    source: the folder.
    data_dir: the TFDS directory.
    name: of the data set.
    workers: processes.
    shard_bytes: of one shard of the result, about.

  Raises:
    UserError: a folder, a name or a disk that will not do.
    OSError: a file cannot be read or written.
  """
  check_name(name)
  splits = {
    split: _files(folder, split) for split, folder in _splits(source).items()
  }
  classes = sorted({f.class_name for files in splits.values() for f in files})
  labels = {class_name: label for label, class_name in enumerate(classes)}
  plan = [
    str(source.absolute()),
    shard_bytes,
    {k: [[f.name, f.size] for f in files] for k, files in splits.items()},
  ]
  written = {}
  with workspace.locked(data_dir, name) as work:
    size = sum(f.size for files in splits.values() for f in files)
    workspace.require_space(work, size)
    result = shards.prepared_result(work, plan)
    for split, files in splits.items():
      sources = _shards(files, labels, shard_bytes)
      written[split] = shards.write_split(work, name, split, sources, workers)
      if not sum(written[split].lengths):
        raise UserError(f'no image of the split {split!r} can be decoded.')
    skipped = [
      Skipped(f'{split}/{file}', reason)
      for split, found in written.items()
      for file, reason in found.skipped
    ]
    shards.write_list(result / 'undecodable.txt', skipped)
    about = f'Images of the folder {source.name}, by class.'
    shards.write_metadata(result, name, written, classes, about)
    target = data_dir / name / workspace.VERSION
    workspace.publish(work, result, target)
  counts = [f'{sum(w.lengths):,} {split}' for split, w in written.items()]
  log.info(
    '%s: %s images in %d classes; %d left out, see undecodable.txt there',
    target,
    ', '.join(counts),
    len(classes),
    len(skipped),
  )


def check_name(name: str) -> None:
  """Raises UserError unless it can be the name of a data set."""
  if not _NAME.fullmatch(name):
    raise UserError(
      f'--name={name!r} cannot name a data set: small letters, digits and _, '
      'a letter first, as in --name=my_set.'
    )


def _splits(source: pathlib.Path) -> dict[str, pathlib.Path]:
  """The directories that hold classes, by split."""
  if not source.is_dir():
    raise UserError(
      f'--source={source} is no directory. Wanted is one with '
      'CLASS/IMAGE, or train/CLASS/IMAGE and test/CLASS/IMAGE.'
    )
  inside = _directories(source)
  found = {
    path.name: path
    for path in inside
    if path.name in SPLITS and _directories(path)
  }
  others = [path.name for path in inside if path.name not in found]
  if found and others:
    raise UserError(
      f'{source} has the splits {", ".join(found)} and beside them '
      f'{", ".join(others[:3])}: are these classes or splits? Splits are named '
      f'{", ".join(SPLITS)}; move what is neither elsewhere.'
    )
  return found or {'train': source}


def _directories(folder: pathlib.Path) -> list[pathlib.Path]:
  return sorted(
    path
    for path in folder.iterdir()
    if path.is_dir() and not path.name.startswith('.')
  )


def _files(folder: pathlib.Path, split: str) -> list[_File]:
  """The images of a split, in order of the hash of their names."""
  found = []
  for directory in _directories(folder):
    if not directory.name.isprintable():
      raise UserError(f'{str(directory)!r} cannot name a class: rename it.')
    with os.scandir(directory) as entries:
      found += [
        _File(
          path=entry.path,
          name=f'{directory.name}/{entry.name}',
          class_name=directory.name,
          size=entry.stat().st_size,
        )
        for entry in entries
        if entry.is_file() and entry.name.lower().endswith(_SUFFIXES)
      ]
  if not found:
    raise UserError(
      f'{folder}: no image for the split {split!r}. Wanted are CLASS/IMAGE '
      f'with the endings {" ".join(_SUFFIXES)}.'
    )
  return sorted(found, key=lambda file: (runs.key(file.name), file.name))


def _shards(
  files: list[_File], labels: dict[str, int], shard_bytes: int
) -> list['_Examples']:
  """Consecutive files, in equal numbers."""
  size = sum(file.size for file in files)
  count = min(1 + size // shard_bytes, len(files))
  bounds = [i * len(files) // count for i in range(count + 1)]
  return [
    _Examples(tuple((f, labels[f.class_name]) for f in files[start:stop]))
    for start, stop in zip(bounds, bounds[1:], strict=False)
  ]


@dataclasses.dataclass(frozen=True)
class _Examples:
  """The examples of one shard: files and their labels."""

  files: tuple[tuple[_File, int], ...]

  def __call__(self) -> Iterator[shards.Example | Skipped]:
    for file, label in self.files:
      try:
        data = pathlib.Path(file.path).read_bytes()
      except OSError as error:
        yield Skipped(file.name, f'cannot be read: {error.strerror}')
        continue
      reason = images.problem(data)
      if reason is None:
        yield shards.Example(file.name, label, data)
      else:
        yield Skipped(file.name, reason)
