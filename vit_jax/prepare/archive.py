"""The public ImageNet-21k archives: a tar of one tar for each synset.

`fall11_whole.tar` holds n00004475.tar, n00005787.tar, …;
`winter21_whole.tar.gz` holds winter21_whole/n00005787.tar, …; a directory of
such tars will do as well. Each of them holds n00004475_15899.JPEG, ….

Nothing is ever extracted: members are read into memory, and their names only
tell the class and become a text feature.
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
_MAX_SYNSET_BYTES = 2**32  # the largest real one has less than a tenth of it
_MAX_NAME = 1_000
_BLOCK = 512  # of the tar format, bytes


@dataclasses.dataclass(frozen=True)
class Synset:
  """The tar of one synset: a part of a file, or its bytes.

  Attributes:
    wnid: WordNet's name of the class, 'n00004475'.
    path: the file that holds it.
    offset: its position there, bytes.
    size: its length, bytes.
    share: fraction of the source that has been read with it, 0…1.
    data: its bytes, if the source is compressed and cannot be read again.
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
  """An image file of a synset; `name` is what its tar calls it."""

  name: str
  data: bytes


class Skipped(NamedTuple):
  """Something of the source that is left out, and why."""

  name: str
  reason: str


def synsets(source: pathlib.Path) -> Iterator[Synset]:
  """Yields the synsets of a source, in its order.

  Raises:
    UserError: the file does not exist, is another archive, or is cut short.
  """
  if not source.exists():
    raise UserError(
      f'--source={source} does not exist. Give fall11_whole.tar or '
      'winter21_whole.tar.gz from image-net.org, or a directory of its '
      'nXXXXXXXX.tar files.'
    )
  found = 0
  try:
    for synset in _reader(source)(source):
      found += 1
      yield synset
  except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
    raise UserError(
      f'{source} is no whole tar archive ({error}); {found} synsets were read '
      'up to there. Is it a partial download? With the whole file the same '
      'command goes on.'
    ) from error
  if not found:
    raise UserError(
      f'{source} holds no nXXXXXXXX.tar. Give fall11_whole.tar or '
      'winter21_whole.tar.gz as they come from image-net.org; a folder of '
      'images by class is made a data set by: python -m vit_jax.prepare folder'
    )


def num_bytes(source: pathlib.Path) -> int:
  """Returns the size of a source."""
  return sum(size for _, size, _ in stamp(source))


def stamp(source: pathlib.Path) -> list[list[Any]]:
  """[path, size, time of the last change] of each file of a source."""
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
  """Parts of an uncompressed archive; only headers are read here."""
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
    while stream.read(2**20):  # to the end, where the checksum is compared
      pass


def _wnid(member: tarfile.TarInfo) -> str | None:
  """Returns the synset of a member of the archive, if it is one."""
  match = _SYNSET.fullmatch(member.name)
  if not (match and member.isreg()) or member.issparse():
    return None
  if member.size > _MAX_SYNSET_BYTES:
    raise tarfile.ReadError(f'{member.name} claims {member.size:,} bytes')
  return match[1]


def _check_end(file, offset: int) -> None:
  """Python's tarfile takes a damaged header for the end; this does not."""
  file.seek(offset)
  if file.read(_BLOCK).strip(b'\0'):
    raise tarfile.ReadError(f'no header at byte {offset:,}')


def pictures(synset: Synset) -> Iterator[Picture | Skipped]:
  """Yields the images in the tar file of a synset, in its order.

  A damaged tar file yields the images before the damage.
  """
  file, count = io.BytesIO(synset.read()), 0
  try:
    with tarfile.open(fileobj=file, mode='r:') as tar:
      for member in tar:
        if not member.isdir():
          count += 1
          yield _picture(tar, member)
      _check_end(file, tar.offset)
  except Exception as error:  # noqa: BLE001 (hostile headers raise many kinds)
    yield Skipped(
      f'{synset.wnid}.tar', f'damaged after {count} members: {error}'
    )


def _picture(
  tar: tarfile.TarFile, member: tarfile.TarInfo
) -> Picture | Skipped:
  name = member.name.removeprefix('./')
  if any(part in ('', '.', '..') for part in name.split('/')):
    return Skipped(member.name, 'a name that leaves its directory')
  if len(name) > _MAX_NAME:
    return Skipped(name[:_MAX_NAME], f'a name of {len(name):,} characters')
  if not member.isreg() or member.issparse():
    return Skipped(member.name, 'a link or another special member')
  content = tar.extractfile(member)
  assert content is not None  # a regular file
  return Picture(name, content.read())
