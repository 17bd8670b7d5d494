"""Reads the public ImageNet-21k archives: a tar file of one tar per synset.

`fall11_whole.tar` contains n00004475.tar, n00005787.tar, …, and
`winter21_whole.tar.gz` contains winter21_whole/n00005787.tar, …; a directory of
such tar files is also accepted. Each of them contains n00004475_15899.JPEG, ….

No file is extracted: members are read into memory. Their names are used only to
determine the class, and as a text feature.
"""

import dataclasses
import gzip
import io
import pathlib
import re
import tarfile
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from vit_jax.errors import UserError

_SYNSET = re.compile(r'(?:[^/]*/)*(n\d{8})\.tar')
_MAX_SYNSET_BYTES = 2**32  # more than ten times the size of the largest synset
_MAX_NAME = 1_000
_BLOCK = 512  # bytes of a block of the tar format


@dataclasses.dataclass(frozen=True)
class Synset:
  """The tar file of one synset: a part of a file, or bytes in memory.

  Attributes:
    wnid: WordNet name of the class, for example 'n00004475'.
    path: path of the file that contains it.
    offset: position in that file, in bytes.
    size: length in bytes.
    share: fraction of the source up to the end of this synset, in [0, 1].
    data: content, if the source is compressed and can only be read in order.
  """

  wnid: str
  path: str
  offset: int
  size: int
  share: float
  data: bytes | None = dataclasses.field(default=None, repr=False)

  def read(self) -> bytes:
    """Reads the bytes of the tar file.

    Raises:
      OSError: the file cannot be read.
    """
    if self.data is not None:
      return self.data
    with open(self.path, 'rb') as file:
      file.seek(self.offset)
      return file.read(self.size)


class Picture(NamedTuple):
  """An image file of a synset; `name` is its name in the tar file."""

  name: str
  data: bytes


class Skipped(NamedTuple):
  """A part of the source that is left out, and the reason."""

  name: str
  reason: str


def synsets(source: pathlib.Path) -> Iterator[Synset]:
  """Yields the synsets of a source, in the order of the source.

  Args:
    source: archive, or directory of tar files.

  Raises:
    UserError: the file does not exist, is another archive, or is truncated.
  """
  if not source.exists():
    raise UserError(
      f'--source is {source}, which does not exist. Give fall11_whole.tar or '
      'winter21_whole.tar.gz from image-net.org, or a directory of its '
      'nXXXXXXXX.tar files.'
    )
  count = 0
  try:
    for synset in _reader(source)(source):
      count += 1
      yield synset
  except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
    raise UserError(
      f'{source} is not a complete tar archive ({error}); {count} synsets were '
      'read. If the download is incomplete, finish it and run the same command '
      'again, which continues.'
    ) from error
  if not count:
    raise UserError(
      f'{source} contains no nXXXXXXXX.tar. Give fall11_whole.tar or '
      'winter21_whole.tar.gz as downloaded from image-net.org. For a folder of '
      'images by class, use: python -m vit_jax.prepare folder'
    )


def num_bytes(source: pathlib.Path) -> int:
  """Returns the size of a source in bytes."""
  return sum(size for _, size, _ in stamp(source))


def stamp(source: pathlib.Path) -> list[list[Any]]:
  """Returns [path, size, time of the last change] of each file of a source.

  Sizes are in bytes, times in ns.
  """
  paths = _tars(source) if source.is_dir() else [source]
  stats = [(path, path.stat()) for path in paths]
  return [[str(path), s.st_size, s.st_mtime_ns] for path, s in stats]


def _reader(source: pathlib.Path):
  if source.is_dir():
    return _directory
  with source.open('rb') as file:
    return _compressed if file.read(2) == b'\x1f\x8b' else _plain


def _directory(source: pathlib.Path) -> Iterator[Synset]:
  paths = _tars(source)
  sizes = [path.stat().st_size for path in paths]
  read, total = 0, max(sum(sizes), 1)
  for path, size in zip(paths, sizes, strict=True):
    read += size
    yield Synset(path.stem, str(path), 0, size, read / total)


def _tars(source: pathlib.Path) -> list[pathlib.Path]:
  return [p for p in sorted(source.iterdir()) if _SYNSET.fullmatch(p.name)]


def _plain(source: pathlib.Path) -> Iterator[Synset]:
  """Yields the synsets of an uncompressed archive; reads only the headers."""
  total = source.stat().st_size
  with source.open('rb') as file, tarfile.open(fileobj=file, mode='r:') as tar:
    for member in tar:
      wnid = _wnid(member)
      if wnid:
        start = member.offset_data
        share = (start + member.size) / total
        yield Synset(wnid, str(source), start, member.size, share)
    _check_end(file, tar.offset)


def _compressed(source: pathlib.Path) -> Iterator[Synset]:
  """Yields the synsets of an archive that can only be read in order."""
  total = source.stat().st_size
  with (
    source.open('rb') as file,
    gzip.open(file) as stream,
    tarfile.open(fileobj=stream, mode='r|', bufsize=2**20) as tar,
  ):
    for member in tar:
      wnid = _wnid(member)
      content = tar.extractfile(member) if wnid else None
      if wnid and content is not None:
        data = content.read()
        share = file.tell() / total
        yield Synset(wnid, str(source), 0, member.size, share, data)
    while stream.read(2**20):  # gzip compares the checksum at the end
      pass


def _wnid(member: tarfile.TarInfo) -> str | None:
  """Returns the WordNet name in the name of a member, nXXXXXXXX.tar.

  Returns:
    The name, or None if the member is not the archive of a synset.

  Raises:
    tarfile.ReadError: the member is implausibly large.
  """
  match = _SYNSET.fullmatch(member.name)
  if not (match and member.isreg()) or member.issparse():
    return None
  if member.size > _MAX_SYNSET_BYTES:
    raise tarfile.ReadError(
      f'the size of {member.name} is given as {member.size:,} bytes'
    )
  return match[1]


def _check_end(file, offset: int) -> None:
  """Checks that the archive ends at an offset, in bytes.

  Python's tarfile regards a damaged header as the end of the archive.

  Raises:
    tarfile.ReadError: the block at the offset is not empty.
  """
  file.seek(offset)
  if file.read(_BLOCK).strip(b'\0'):
    raise tarfile.ReadError(f'byte {offset:,} is not the start of a header')


def pictures(synset: Synset) -> Iterator[Picture | Skipped]:
  """Yields the images in the tar file of a synset, in the order of the file.

  If the file is damaged, the images before the damage are yielded, and then a
  `Skipped` that describes it.
  """
  file, count = io.BytesIO(synset.read()), 0
  try:
    with tarfile.open(fileobj=file, mode='r:') as tar:
      for member in tar:
        if not member.isdir():
          count += 1
          yield _picture(tar, member)
      _check_end(file, tar.offset)
  except Exception as error:  # noqa: BLE001 (damaged headers raise many kinds)
    yield Skipped(
      f'{synset.wnid}.tar', f'damaged after {count} members: {error}'
    )


def _picture(
  tar: tarfile.TarFile, member: tarfile.TarInfo
) -> Picture | Skipped:
  """Reads an image, or returns the reason why its member is left out."""
  name = member.name.removeprefix('./')
  if any(part in ('', '.', '..') for part in name.split('/')):
    return Skipped(member.name, 'the path may be outside of the directory')
  if len(name) > _MAX_NAME:
    return Skipped(name[:_MAX_NAME], f'a name of {len(name):,} characters')
  if not member.isreg() or member.issparse():
    return Skipped(member.name, 'a link or another special member')
  content = tar.extractfile(member)
  assert content is not None  # a regular file
  return Picture(name, content.read())
