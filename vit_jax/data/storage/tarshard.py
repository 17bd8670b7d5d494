"""Finds the images and labels in a tar shard in WebDataset's format.

Consecutive members whose names are equal up to the first dot after the last
slash are one example: an image, and its label as `.cls` or in `.json`.
"""

import json
import tarfile
from typing import Any

import numpy as np
from etils import epath

from vit_jax.data import progress
from vit_jax.data.storage import classes, files, index
from vit_jax.errors import UserError

_BLOCK = 512  # bytes of a tar header
_CHUNK = 2**20  # bytes that are read at once after the last member
_LONGEST = 1000  # maximum size of a label, bytes
_BOM = b'\xef\xbb\xbf'


def scan(path: str, label_key: str | None) -> index.Scan:
  """Finds image and label of each example of a shard.

  Args:
    path: path of the shard.
    label_key: key of the label in `.json` members; None for images without
      labels.

  Returns:
    Columns `offset` (int64) and `size` (uint32) of the image, in bytes, and
    `label`, text as bytes.

  Raises:
    UserError: the shard is compressed; or an example has no image, no label,
      two members with the same ending, or a link.
  """
  rows: list[tuple[int, int, bytes]] = []
  group: list[tarfile.TarInfo] = []
  with epath.Path(path).open('rb') as file:
    if file.read(2) == b'\x1f\x8b':
      raise UserError(
        f'{path} is compressed and has no random access: gunzip it.'
      )
    file.seek(0)
    try:
      with tarfile.open(fileobj=file, mode='r:') as tar:
        for member in iter(tar.next, None):
          progress.made()
          # tarfile would otherwise keep all members in memory.
          tar.members = []  # pyright: ignore[reportAttributeAccessIssue]
          if member.isdir() or _name(member).startswith('.'):
            continue
          if group and _key(member) != _key(group[0]):
            rows.append(_example(path, file, group, label_key))
            group = []
          group.append(member)
        file.seek(tar.offset)
        whole = _only_zeros_follow(file)
        if whole and group:
          rows.append(_example(path, file, group, label_key))
    except tarfile.ReadError:
      whole = False
  cut = index.WHOLE if whole else group[0].offset if group else 0
  offset, size, label = zip(*rows, strict=True) if rows else ((), (), ())
  columns = {
    'offset': np.array(offset, np.int64),
    'size': np.array(size, np.uint32),
    'label': np.array(label, np.bytes_),
  }
  return index.Scan(columns, cut)


def _only_zeros_follow(file: Any) -> bool:
  """Returns whether the rest of a file is at least one block of zeros.

  tarfile stops at the first block of zeros, even if more members follow because
  shards were joined (`cat a.tar b.tar`) or a part was not written.
  """
  chunk = file.read(_BLOCK)
  whole = len(chunk) == _BLOCK
  while chunk:
    if chunk.strip(b'\0'):
      return False
    chunk = file.read(_CHUNK)
  return whole


def _name(member: tarfile.TarInfo) -> str:
  return member.name.rpartition('/')[2]


def _key(member: tarfile.TarInfo) -> str:
  """Returns the path of a member up to the first dot of its file name."""
  folder, slash, name = member.name.rpartition('/')
  return folder + slash + name.partition('.')[0]


def _example(
  path: str, file: Any, group: list[tarfile.TarInfo], label_key: str | None
) -> tuple[int, int, bytes]:
  """Returns (offset, size, label) of an example, given its members.

  Raises:
    UserError: the members are not one image and its label.
  """
  parts: dict[str, tarfile.TarInfo] = {}
  for member in group:
    end = '.' + _name(member).partition('.')[2].lower()
    if end in parts:
      raise UserError(
        f'{path}: the example {_key(member)!r} has {end} twice, at offset '
        f'{parts[end].offset} and at {member.offset}: keys must '
        'be unique. Pack the shard again.'
      )
    if not member.isreg() or member.issparse():
      raise UserError(
        f'{path}: {member.name!r} at offset {member.offset} is a link or a '
        'sparse file, without bytes of its own here: pack the shard again with '
        'tar --hard-dereference --dereference and without --sparse.'
      )
    parts[end] = member
  images = [part for end, part in parts.items() if end in files.IMAGES]
  text = _label(file, parts, label_key)
  if len(images) != 1 or text is None:
    raise UserError(
      f'{path}: the example {_key(group[0])!r} has the members '
      f'{", ".join(parts)}; it must have one image ({" ".join(files.IMAGES)}) '
      f'and its label, an integer or a name, as .cls or as {label_key!r} in '
      '.json (for images without labels: --config.source.label_key=None). The '
      'key of an example ends at the first dot of a name.'
    )
  return images[0].offset_data, images[0].size, text


def _label(
  file: Any, parts: dict[str, tarfile.TarInfo], label_key: str | None
) -> bytes | None:
  """Returns the label in `.cls` or `.json`; None if there is no valid one."""

  def content(member: tarfile.TarInfo) -> bytes:
    file.seek(member.offset_data)
    return file.read(member.size)

  if label_key is None:
    return b''
  if '.cls' in parts:
    if parts['.cls'].size > _LONGEST:
      return None
    return content(parts['.cls']).removeprefix(_BOM).strip() or None
  if '.json' not in parts:
    return None
  try:
    found = json.loads(content(parts['.json']).removeprefix(_BOM))
    text = classes.text_of(found[label_key])
    return text.encode() if text and len(text) <= _LONGEST else None
  except (ValueError, KeyError, TypeError, RecursionError):
    return None
