"""Writes a long result in parts, so that a killed command can resume.

OUT.parts/ contains about.json, which describes the computation, and the parts
00000.npz, 00001.npz, …, each written atomically. Existing parts are not
computed again. When all are complete, they are joined to the result.
"""

import contextlib
import io
import itertools
import json
import logging
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
from etils import epath

from vit_jax.config.completion import flatten
from vit_jax.data import fingerprint
from vit_jax.data.storage import npz
from vit_jax.errors import UserError
from vit_jax.files import atomic, jsonl, outages
from vit_jax.processes import runtime
from vit_jax.processes.consensus import from_main

log = logging.getLogger('vit_jax')
Arrays = dict[str, np.ndarray]
_ROWS = '_rows'  # number of rows of each column of a part


class Parts:
  """The parts of one result."""

  def __init__(self, out: epath.Path, about: dict[str, Any]):
    """Opens or creates the folder OUT.parts.

    Args:
      out: path of the result.
      about: description of the computation, as JSON values.

    Raises:
      UserError: the folder contains parts of another result, or cannot be
        written.
    """
    self.folder, self._out = out.with_name(out.name + '.parts'), out
    file = self.folder / 'about.json'
    with outages.access(self.folder, 'written'):
      self.folder.mkdir(parents=True, exist_ok=True)
      if not file.exists():
        atomic.write(file, json.dumps(about))
      found = jsonl.parse(file.read_bytes())
    _check_description(str(self.folder), found or {}, about)

  def count(self) -> int:
    """Returns the number of existing parts before the first gap."""
    return next(n for n in itertools.count() if not self._path(n).exists())

  def write(self, number: int, arrays: Arrays) -> None:
    """Writes one part.

    Raises:
      UserError: the part cannot be written.
    """
    content = io.BytesIO()
    rows = np.array([len(column) for column in arrays.values()])
    np.savez(content, allow_pickle=False, **arrays, **{_ROWS: rows})
    with outages.access(self._path(number), 'written'):
      atomic.write(self._path(number), content.getvalue())

  def read(self, number: int, keys: Collection[str] | None = None) -> Arrays:
    """Reads one part.

    Args:
      number: number of the part.
      keys: names of the columns to read; by default all of them.

    Raises:
      UserError: the file cannot be read.
    """
    path = self._path(number)
    try:
      with npz.opened(path) as arrays:
        names = [key for key in arrays.files if key != _ROWS]
        columns = {key: arrays[key] for key in keys or names}
        # Older versions did not store the numbers of rows.
        rows = arrays[_ROWS].tolist() if _ROWS in arrays.files else []
        for key, count in zip(names, rows, strict=False):
          if key in columns and len(columns[key]) != count:
            raise ValueError(f'{key} has {len(columns[key])} of {count} rows')
        return columns
    except (OSError, ValueError) as error:
      raise UserError(
        f'{path} cannot be read ({error}). Delete this part and all later '
        'ones, and run the same command again.'
      ) from error

  @contextlib.contextmanager
  def joining(self) -> Iterator[str]:
    """Yields a temporary path for the result; removes the parts afterwards.

    Raises:
      UserError: the file cannot be written.
    """
    with (
      outages.access(self._out, 'written'),
      atomic.replacing(self._out, self.folder) as temporary,
    ):
      yield temporary
    with contextlib.suppress(FileNotFoundError):
      self.folder.rmtree()

  def _path(self, number: int) -> epath.Path:
    return self.folder / f'{number:05}.npz'


def batch_size(out: epath.Path) -> int | None:
  """Returns the batch size of an interrupted computation; None without one.

  All processes must call it.

  Args:
    out: path of the result.
  """

  def stored() -> int | None:
    file = out.with_name(out.name + '.parts') / 'about.json'
    about = jsonl.parse(file.read_bytes()) if file.exists() else None
    return (about or {}).get('batch_size')

  return from_main(stored)


def resume(
  out: epath.Path,
  about: dict[str, Any],
  size: int,
  batches: Callable[[int], Iterator[Arrays]],
) -> tuple[Parts | None, int]:
  """Computes the missing parts; all processes must call it.

  Args:
    out: path of the result.
    about: description of the computation, see `Parts`; it contains `examples`
      and `batch_size`.
    size: number of batches per part.
    batches: function that takes the index of an example, and yields the columns
      of each batch of `batch_size` examples from that index on. Examples that
      cannot be used are left out.

  Returns:
    The parts (None on all processes except the main one), and their number.
  """
  rows, examples = about['batch_size'], about['examples']
  # Parts of another size begin at other examples.
  about = about | {'part_examples': size * rows}
  parts = Parts(out, about) if runtime.is_main() else None
  number = from_main(lambda: parts.count() if parts else 0)
  start = min(number * size * rows, examples)
  if start:
    log.info('continuing after %d of %d examples', start, examples)
  pending: list[Arrays] = []
  if start < examples:
    for columns in batches(start):
      pending.append(columns)
      start = min(start + rows, examples)
      if len(pending) == size or start == examples:
        if parts:
          parts.write(number, _join(pending))
        number, pending = number + 1, []
  return parts, number


def _join(batches: list[Arrays]) -> Arrays:
  """Joins the columns of several batches."""
  return {
    key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]
  }


def existing_result(
  out: epath.Path,
  about: dict[str, Any],
  read: Callable[[str], dict[str, Any]],
  results: Collection[str],
) -> dict[str, Any]:
  """Returns the description in a complete result; {} if there is none.

  All processes must call it.

  Args:
    out: path of the result.
    about: description of the computation, see `Parts`.
    read: function that reads the description in a result, given its path.
    results: keys of the description that are known only after the computation,
      and are not compared.

  Raises:
    UserError: the file is a result of other weights, data or settings.
  """

  def on_main() -> dict[str, Any]:
    if not out.exists():
      return {}
    found = read(str(out))
    compared = {key: found[key] for key in found if key not in results}
    _check_description(str(out), compared, about)
    log.info('%s exists already', out)
    return found

  return from_main(on_main)


def _check_description(
  path: str, found: dict[str, Any], about: dict[str, Any]
) -> None:
  """Checks that an existing file or folder belongs to the same computation.

  Args:
    path: path of the file or folder.
    found: description in the file or folder.
    about: description of the computation of this command.

  Raises:
    UserError: the descriptions differ.
  """
  if 'fingerprint' in found and 'fingerprint' in about:
    data = fingerprint.comparable(about['fingerprint'], found['fingerprint'])
    about = about | {'fingerprint': data}
  found, expected = flatten(found), flatten(about)
  differences = [
    f'{key}: {found.get(key)!r} before, {expected.get(key)!r} now'
    for key in {**expected, **found}
    if found.get(key) != expected.get(key)
  ]
  if differences:
    raise UserError(
      f'{path} is the result of another command ({"; ".join(differences)}). '
      'Give another --out, or delete it.'
    )
