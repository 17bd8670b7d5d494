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
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple

from vit_jax.errors import UserError
from vit_jax.prepare.shards import Skipped

_SYNSET = re.compile(r'(?:[^/]*/)*(n\d{8})\.tar')
_BLOCK = 512  # bytes of a block of the tar format


@dataclasses.dataclass(frozen=True)
class Synset:
  """The tar file of one synset: a range of a file, or bytes in memory.

  Attributes:
    wnid: WordNet name of the class, for example 'n00004475'.
    path: path of the file that contains it.
    offset: position in that file, in bytes.
    size: length in bytes.
    data: content, if the source is compressed and can only be read in order.
  """

  wnid: str
  path: str
  offset: int
  size: int
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


def synsets(source: pathlib.Path) -> Iterator[Synset]:
  """Yields the synsets of a source, in the order of the source.

  Args:
    source: archive, or directory of tar files.

  Raises:
    UserError: the file does not exist, is another archive, or is truncated.
  """
  count = 0
  try:
    for synset in _reader(source)(source):
      count += 1
      yield synset
    if not count:
      raise EOFError('it contains no nXXXXXXXX.tar')
  except (OSError, tarfile.TarError, EOFError, zlib.error) as error:
    raise UserError(
      f'--source={source} is not a complete archive ({error}); {count} synsets '
      'were read. Give the whole fall11_whole.tar or winter21_whole.tar.gz of '
      'image-net.org, or a directory of its nXXXXXXXX.tar files (for a folder '
      'of images by class: python -m vit_jax.prepare folder).'
    ) from error


def num_bytes(source: pathlib.Path) -> int:
  """Returns the size of a source in bytes."""
  return sum(size for _, size, _ in file_stats(source))


def file_stats(source: pathlib.Path) -> list[list[Any]]:
  """Returns [path, size, time of the last change] of each file of a source.

  Sizes are in bytes, times in ns.
  """
  paths = _tars(source) if source.is_dir() else [source]
  stats = [(path, path.stat()) for path in paths]
  return [[str(path), s.st_size, s.st_mtime_ns] for path, s in stats]


def _reader(
  source: pathlib.Path,
) -> Callable[[pathlib.Path], Iterator[Synset]]:
  """Returns the function that reads a directory or a kind of archive."""
  if source.is_dir():
    return _directory
  with source.open('rb') as file:
    return _compressed if file.read(2) == b'\x1f\x8b' else _plain


def _directory(source: pathlib.Path) -> Iterator[Synset]:
  """Yields the synsets of a directory of tar files; reads no files."""
  for path in _tars(source):
    yield Synset(path.stem, str(path), 0, path.stat().st_size)


def _tars(source: pathlib.Path) -> list[pathlib.Path]:
  """Returns the tar files of synsets in a directory, sorted."""
  return [p for p in sorted(source.iterdir()) if _SYNSET.fullmatch(p.name)]


def _plain(source: pathlib.Path) -> Iterator[Synset]:
  """Yields the synsets of an uncompressed archive; reads only the headers."""
  with source.open('rb') as file, tarfile.open(fileobj=file, mode='r:') as tar:
    for member in tar:
      wnid = _wnid(member)
      if wnid:
        yield Synset(wnid, str(source), member.offset_data, member.size)
    _check_end(file, tar.offset)


def _compressed(source: pathlib.Path) -> Iterator[Synset]:
  """Yields the synsets of an archive that can only be read in order."""
  with (
    gzip.open(source) as stream,
    tarfile.open(fileobj=stream, mode='r|', bufsize=2**20) as tar,
  ):
    for member in tar:
      wnid = _wnid(member)
      content = tar.extractfile(member) if wnid else None
      if wnid and content is not None:
        yield Synset(wnid, str(source), 0, member.size, content.read())
    while stream.read(2**20):  # gzip compares the checksum at the end
      pass


def _wnid(member: tarfile.TarInfo) -> str | None:
  """Returns 'nXXXXXXXX' of a member nXXXXXXXX.tar; None for other members."""
  match = _SYNSET.fullmatch(member.name)
  return match[1] if match and member.isreg() else None


def _check_end(file: IO[bytes], offset: int) -> None:
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
  if not member.isreg():
    return Skipped(member.name, 'a link or another special member')
  content = tar.extractfile(member)
  assert content is not None  # a regular file
  return Picture(name, content.read())
