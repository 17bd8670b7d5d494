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
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from vit_jax.config.schema import flatten
from vit_jax.data import fingerprint
from vit_jax.data.storage import npz
from vit_jax.errors import UserError
from vit_jax.files import jsonl, paths
from vit_jax.processes import runtime
from vit_jax.processes.consensus import from_main

log = logging.getLogger('vit_jax')
Arrays = dict[str, np.ndarray]


class Format(NamedTuple):
  """File format of a result, with a description.

  Attributes:
    read: function that returns the description in a file, given its path.
    write: function that takes the description of the computation, the parts
      and the path of a local file, writes all parts to it, and returns the
      description that it contains.
    results: keys of the description that are known only after the computation.
  """

  read: Callable[[str], dict[str, Any]]
  write: Callable[[dict[str, Any], 'Parts', str], dict[str, Any]]
  results: Collection[str]


def compute(
  out: epath.Path,
  about: dict[str, Any],
  size: int,
  batches: Callable[[int], Iterator[Arrays]],
  form: Format,
) -> dict[str, Any]:
  """Computes the missing parts and joins all parts to the result.

  All processes must call it. An existing result is not computed again.

  Args:
    out: path of the result.
    about: description of the computation, as JSON values; it contains
      `examples` and `batch_size`.
    size: number of batches per part.
    batches: function that takes the index of an example, and yields the columns
      of each batch of `batch_size` examples from that index on. Examples that
      cannot be used are left out.
    form: format of the result.

  Returns:
    The description in the result.

  Raises:
    UserError: the result or its parts belong to other weights, data or
      settings, or cannot be read or written.
  """
  existing = from_main(lambda: _existing(out, about, form))
  if existing:
    return existing
  parts = Parts(out)
  examples = about['examples']
  part_examples = size * about['batch_size']
  # Parts of another size begin at other examples.
  part_about = about | {'part_examples': part_examples}
  num_parts = from_main(lambda: parts.open(part_about))
  done = min(num_parts * part_examples, examples)
  if done:
    log.info('continuing after %d of %d examples', done, examples)
  pending: list[Arrays] = []
  for columns in batches(done) if done < examples else ():
    pending.append(columns)
    done = min(done + about['batch_size'], examples)
    if len(pending) == size or done == examples:
      if runtime.is_main():
        parts.append(pending)
      pending = []
  return from_main(lambda: parts.join(about, form.write))


def batch_size(out: epath.Path) -> int | None:
  """Returns the batch size of an interrupted computation; None without one.

  All processes must call it.

  Args:
    out: path of the result.
  """
  return from_main(lambda: Parts(out).about().get('batch_size'))


class Parts:
  """The parts of one result, used by the main process only."""

  def __init__(self, out: epath.Path):
    """Determines the folder of the parts, OUT.parts."""
    self.out, self.folder = out, out.with_name(out.name + '.parts')

  def open(self, about: dict[str, Any]) -> int:
    """Opens or creates the folder, and returns the number of existing parts.

    Raises:
      UserError: the folder contains parts of another result, or cannot be
        written.
    """
    file = self.folder / 'about.json'
    with paths.access(self.folder, 'written'):
      self.folder.mkdir(parents=True, exist_ok=True)
      if not file.exists():
        paths.write(file, json.dumps(about))
      _check_description(self.folder, self.about(), about)
    return len(self)

  def about(self) -> dict[str, Any]:
    """Returns the description of the computation; {} if there is none."""
    file = self.folder / 'about.json'
    return (jsonl.parse(file.read_bytes()) if file.exists() else None) or {}

  def __len__(self) -> int:
    """Returns the number of existing parts before the first missing one."""
    return next(i for i in itertools.count() if not self._path(i).exists())

  def append(self, batches: list[Arrays]) -> None:
    """Writes the columns of several batches as the next part.

    Raises:
      UserError: the part cannot be written.
    """
    content, path = io.BytesIO(), self._path(len(self))
    columns: dict[str, Any] = {
      key: np.concatenate([batch[key] for batch in batches])
      for key in batches[0]
    }
    np.savez(content, allow_pickle=False, **columns)
    with paths.access(path, 'written'):
      paths.write(path, content.getvalue())

  def column(self, key: str) -> Iterator[np.ndarray]:
    """Yields a column, part by part."""
    for index in range(len(self)):
      yield self.read(index, [key])[key]

  def read(self, index: int, keys: Collection[str] | None = None) -> Arrays:
    """Reads one part.

    Args:
      index: index of the part.
      keys: names of the columns to read; by default all of them.

    Raises:
      UserError: the file cannot be read.
    """
    path = self._path(index)
    try:
      with npz.opened(path) as arrays:
        # Earlier versions also stored the numbers of rows.
        return {k: arrays[k] for k in keys or arrays.files if k != '_rows'}
    except (OSError, ValueError) as error:
      raise UserError(
        f'{path} cannot be read ({error}): delete this part and all later ones.'
      ) from error

  def join(self, about: dict[str, Any], write: Any) -> dict[str, Any]:
    """Writes the result and removes the parts; see `Format.write`.

    Raises:
      UserError: the file cannot be written.
    """
    with (
      paths.access(self.out, 'written'),
      paths.replacing(self.out, self.folder) as temporary,
    ):
      description = write(about, self, temporary)
    with contextlib.suppress(FileNotFoundError):
      self.folder.rmtree()
    return description

  def _path(self, index: int) -> epath.Path:
    return self.folder / f'{index:05}.npz'


def _existing(
  out: epath.Path, about: dict[str, Any], form: Format
) -> dict[str, Any]:
  """Returns the description in a complete result; {} if there is none.

  Raises:
    UserError: the file is a result of other weights, data or settings.
  """
  if not out.exists():
    return {}
  description = form.read(str(out))
  compared = {
    key: value for key, value in description.items() if key not in form.results
  }
  _check_description(out, compared, about)
  log.info('%s exists already', out)
  return description


def _check_description(
  path: epath.Path, existing: dict[str, Any], about: dict[str, Any]
) -> None:
  """Checks that an existing file or folder belongs to the same computation.

  Args:
    path: path of the file or folder.
    existing: description in the file or folder.
    about: description of the computation of this command.

  Raises:
    UserError: the descriptions differ.
  """
  if 'fingerprint' in existing and 'fingerprint' in about:
    data = fingerprint.comparable(about['fingerprint'], existing['fingerprint'])
    about = about | {'fingerprint': data}
  before, now = flatten(existing), flatten(about)
  differences = [
    f'{key}: {before.get(key)!r} before, {now.get(key)!r} now'
    for key in now | before
    if before.get(key) != now.get(key)
  ]
  if differences:
    raise UserError(
      f'{path} is the result of another command ({"; ".join(differences)}). '
      'Give another --out, or delete it.'
    )
