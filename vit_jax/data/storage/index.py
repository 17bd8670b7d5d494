"""Offsets of the records of a sharded dataset, found once and then cached.

A shard format provides a function that scans one shard; several threads scan
the shards. The result is stored in an .npz file next to the data or, if that
directory cannot be written, in $XDG_CACHE_HOME/vit_jax (~/.cache/vit_jax). The
file also contains the sizes and modification times of the shards, and is
created again if a shard has changed.
"""

import contextvars
import hashlib
import io
import logging
import os
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from etils import epath
from jaxtyping import Int

from vit_jax.data import progress
from vit_jax.data.storage import files
from vit_jax.errors import UserError, check_choice
from vit_jax.files import paths as paths_lib

log = logging.getLogger('vit_jax')
FOLDER = '.vit_jax_index'
WHOLE = -1  # value of `cut` for a shard without an incomplete record
_VERSION = 1  # of the format of the cached file
_THREADS = 32  # scanning mostly waits for the disk or the network

Columns = dict[str, np.ndarray]


class Scan(NamedTuple):
  """Result of scanning one shard.

  Attributes:
    columns: arrays with one entry per record.
    cut: offset of the first incomplete record; `WHOLE` if there is none.
  """

  columns: Columns
  cut: int


class Index(NamedTuple):
  """Result of scanning all shards.

  Attributes:
    columns: arrays with one entry per record, shard after shard.
    counts: number of records of each shard.
    cuts: offset of the first incomplete record of each shard, or `WHOLE`.
  """

  columns: Columns
  counts: Int[np.ndarray, ' shards']
  cuts: Int[np.ndarray, ' shards']

  def split(self, name: str) -> list[np.ndarray]:
    """Returns a column as one array per shard."""
    return np.split(self.columns[name], np.cumsum(self.counts)[:-1])


def load(
  paths: Sequence[str],
  kind: str,
  scan: Callable[[str], Scan],
  *,
  on_bad_shard: str,
) -> Index:
  """Loads the index of the shards, or builds and caches it.

  Args:
    paths: paths of the shards, local or remote.
    kind: name of the format, including all settings that the columns depend on;
      part of the name of the cached file.
    scan: function that scans one shard and returns the same columns for each.
    on_bad_shard: 'error', or 'skip' to use the complete records of a shard that
      was cut short.

  Raises:
    UserError: a shard does not exist, cannot be read or was cut short;
      `on_bad_shard` is invalid; or `scan` raises it.
  """
  check_policy(on_bad_shard)
  current = stamps(paths)
  cache_paths = _cache_paths(paths, kind)
  index = None
  for path in cache_paths:
    index = index or _cached(path, current)
  if index is None:
    try:
      index = _build(paths, kind, scan)
    except OSError as error:
      raise _unreadable(error) from error
    _save(cache_paths, index, current)
  for path, cut, (size, _) in zip(paths, index.cuts, current, strict=True):
    if cut != WHOLE and on_bad_shard == 'error':
      raise UserError(
        f'{path} is cut short or damaged at offset {cut} of {size} bytes. '
        'Copy, prepare or pack it again (shards cannot be joined), or set '
        '--config.source.on_bad_shard=skip to use the others.'
      )
  return index


def check_policy(on_bad_shard: str) -> None:
  """Checks the treatment of shards that were cut short, see `load`.

  Raises:
    UserError: it is neither 'error' nor 'skip'.
  """
  check_choice('source.on_bad_shard', on_bad_shard, ('error', 'skip'))


def stamps(paths: Sequence[str]) -> Int[np.ndarray, 'shards 2']:
  """Returns (size in bytes, modification time) of each file.

  Args:
    paths: paths of the files, local or remote.

  Raises:
    UserError: a file does not exist, or its size cannot be read.
  """

  def stamp(path: str) -> tuple[int, int]:
    if files.is_remote(path):
      remote = epath.Path(path).stat()
      return remote.length, int(remote.mtime)
    local = os.stat(path)
    return local.st_size, local.st_mtime_ns

  try:
    with ThreadPoolExecutor(_THREADS) as pool:
      return np.array(list(pool.map(stamp, paths)), np.int64).reshape(-1, 2)
  except OSError as error:
    raise _unreadable(error) from error


def _unreadable(error: Exception) -> UserError:
  return UserError(
    f'a shard cannot be read ({error}): check its path, or copy the data set '
    'again.'
  )


def _cache_paths(paths: Sequence[str], kind: str) -> list[str]:
  """Returns where the index is cached: next to the shards, or at home.

  The name of the first file depends on relative paths, so that the index moves
  with the data; the name of the second on absolute ones.
  """
  folder = os.path.dirname(paths[0])
  home = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
  relative = [path.removeprefix(folder) for path in paths]
  absolute = [p if files.is_remote(p) else os.path.abspath(p) for p in paths]
  return [
    files.join(folder, f'{FOLDER}/{_digest(relative)}-{kind}.npz'),
    os.path.join(home, 'vit_jax', f'{_digest(absolute)}-{kind}.npz'),
  ]


def _digest(texts: Sequence[str]) -> str:
  joined = '\n'.join([str(_VERSION), *texts]).encode(errors='surrogateescape')
  return hashlib.sha256(joined).hexdigest()[:16]


def _save(cache_paths: Sequence[str], index: Index, stamp: np.ndarray) -> None:
  """Writes the index and the `stamps` to the first path that can be written.

  The file is complete as soon as it exists. Several processes may write it at
  the same time.
  """
  columns: Any = {f'column_{key}': x for key, x in index.columns.items()}
  content = io.BytesIO()
  np.savez(
    content, stamp=stamp, cuts=index.cuts, counts=index.counts, **columns
  )
  reasons = []
  for path in map(epath.Path, cache_paths):
    try:
      path.parent.mkdir(parents=True, exist_ok=True)
      paths_lib.write(path, content.getvalue())
      return
    except Exception as error:  # noqa: BLE001 (object stores raise many kinds)
      reasons.append(f'{path}: {error}')
  log.warning(
    'the index of the data set cannot be stored and is built at each start '
    '(%s): set XDG_CACHE_HOME to a directory that can be written.',
    '; '.join(reasons),
  )


def _cached(path: str, stamp: np.ndarray) -> Index | None:
  """Reads a cached index; None if it is missing, damaged or outdated."""
  try:
    content = io.BytesIO(files.read(path))
    with np.load(content, allow_pickle=False) as arrays:
      if not np.array_equal(arrays['stamp'], stamp):
        return None
      columns = {
        key.removeprefix('column_'): arrays[key]
        for key in arrays.files
        if key.startswith('column_')
      }
      return Index(columns, arrays['counts'], arrays['cuts'])
  except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
    return None


def _build(
  paths: Sequence[str], kind: str, scan: Callable[[str], Scan]
) -> Index:
  """Scans all shards in several threads, and reports the progress."""
  label = f'indexing {len(paths)} {kind} shards of {os.path.dirname(paths[0])}'
  with ThreadPoolExecutor(_THREADS) as pool:
    # Tasks run in copies of the context, which contains the progress listener.
    contexts = [contextvars.copy_context() for _ in paths]
    try:
      tasks = pool.map(
        lambda context, path: context.run(scan, path), contexts, paths
      )
      scans = list(progress.shown(tasks, len(paths), label))
    except BaseException:
      pool.shutdown(wait=True, cancel_futures=True)
      raise
  names = list(scans[0].columns)
  columns = {
    name: np.concatenate([each.columns[name] for each in scans])
    for name in names
  }
  counts = [len(each.columns[names[0]]) for each in scans]
  cuts = [each.cut for each in scans]
  return Index(columns, np.array(counts, np.int64), np.array(cuts, np.int64))
