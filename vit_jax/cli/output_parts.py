"""Applies weights to all examples, and writes a result that can be continued.

OUT.parts/ contains about.json, which describes the computation, and the parts
00000.npz, 00001.npz, …, each written atomically, with its examples and rows.
After an interruption, the same command computes only the missing parts. When
all are complete, they are joined to the result. A lock refuses a second writer.
"""

import contextlib
import io
import itertools
import json
import logging
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import numpy as np
from absl import flags
from etils import epath

from vit_jax.arrays import sharding
from vit_jax.cli import shared_flags
from vit_jax.cli.shared_flags import Request
from vit_jax.config.completion import flatten
from vit_jax.config.schema import Config
from vit_jax.data import fingerprint
from vit_jax.data.contract import TARGETS, Source
from vit_jax.data.filters import Tail
from vit_jax.data.storage import npz
from vit_jax.errors import UserError, required
from vit_jax.evaluators.contract import Batch
from vit_jax.files import jsonl, paths
from vit_jax.processes import runtime
from vit_jax.processes.consensus import from_main
from vit_jax.run import lock
from vit_jax.training import frozen
from vit_jax.weights.contract import Pretrained

log = logging.getLogger('vit_jax')
PyTree = Any
Arrays = dict[str, np.ndarray]
# Members of a part: its range of examples, and the rows of its sorted columns.
_EXAMPLES, _ROWS = '_examples', '_rows'


def define_flags(endings: str) -> None:
  """Defines the flags that features and pseudo_label share.

  Args:
    endings: allowed endings of --out, for its help.
  """
  shared_flags.define_flags()
  shared_flags.define('weights', 'config', 'part_examples')
  flags.DEFINE_string('out', None, f'Path of the result: {endings}.')


def check_path(path: str, endings: Collection[str]) -> epath.Path:
  """Returns the path of --out.

  Raises:
    UserError: the path is remote, or has another ending.
  """
  if paths.is_remote(path) or epath.Path(path).suffix not in endings:
    raise UserError(
      f'--out={path} is not allowed: give the path of a local file that ends '
      f'in {" or ".join(endings)}.'
    )
  return paths.locate(path)


def compute(
  out: epath.Path,
  weights: Pretrained,
  request: Request,
  config: Config,
  source: Source,
  about: dict[str, Any],
  *,
  predict: Callable[[PyTree, Batch], dict[str, jax.Array]],
  columns: Callable[[Arrays, np.ndarray], Arrays],
  write: Callable[[dict[str, Any], 'Parts', str], dict[str, Any]],
  results: Collection[str],
) -> dict[str, Any]:
  """Applies frozen weights to all examples, and writes the results.

  All processes must call it. An existing result is not computed again.

  Args:
    out: path of the result, see `check_path`.
    weights: weights, see `shared_flags.open_weights`.
    request: request of the command.
    config: completed config with the sections reader and preprocess.
    source: source of the examples.
    about: description of the computation as JSON values, in addition to
      weights, preprocessing and batch size.
    predict: function of (parameters, batch) to arrays `[n, …]`.
    columns: function of the results for a batch, with targets and `mask`, and
      of the index of each example, to the columns of the batch. Padding and
      examples that cannot be used, which the mask excludes, are left out.
    write: function of the description, the parts and the path of a local file;
      it writes all parts to the file, and returns the description in it.
    results: keys of that description that are known only after the computation.

  Returns:
    The description in the result.

  Raises:
    UserError: a record is bad; or the result or its parts belong to other
      weights, data or settings, or cannot be read or written.
  """
  mesh, parts = sharding.make_mesh(jax.devices()), Parts(out)
  # An interrupted computation continues with its batch size.
  rows = request.batch_size or from_main(lambda: parts.about.get('batch_size'))
  rows = rows or shared_flags.fitting(
    weights, mesh, predict=predict, examples=len(source)
  )
  setting = shared_flags.evaluation_setting(
    weights, config, lambda _: source, mesh, rows
  )
  batch_size, examples = setting.batch_size, len(source)

  def labelled(params: PyTree, batch: Batch) -> PyTree:
    kept = {key: batch[key] for key in (*TARGETS, 'mask') if key in batch}
    return predict(params, batch) | kept

  with contextlib.ExitStack() as stack:
    stack.enter_context(jax.set_mesh(mesh))
    abstract = weights.abstract_weights(mesh)
    shape = (batch_size, *weights.image_size, weights.model().channels)
    images = {'image': jax.ShapeDtypeStruct(shape, np.uint8)}
    first, *_ = jax.tree.leaves(jax.eval_shape(predict, abstract, images))
    params = weights.load_weights(mesh)
    about = {
      'checkpoint': weights.path,
      'weights': request.weights,
      'digest': frozen.digests({'': params})[''],
      'data': source.name,
      'examples': examples,
      'on_bad_record': config.reader.on_bad_record,
      'preprocess': shared_flags.describe(weights, config),
      'batch_size': batch_size,
      **about,
    }
    for may_write in (False, True):
      # Another command may finish before this one holds the lock.
      if may_write and runtime.is_main():
        stack.enter_context(parts.locked())
      if existing := from_main(lambda: _existing(out, about, results)):
        return existing
    # A part has the same size whether an example has one vector or many.
    vectors = math.prod(first.shape[1:-1])
    size = -(-request.part_examples // (batch_size * vectors))
    part_examples = size * batch_size
    num_parts = from_main(lambda: parts.open(about, part_examples, examples))
    done = min(num_parts * part_examples, examples)
    if done:
      log.info('continuing after %d of %d examples', done, examples)
    pending: list[Arrays] = []
    first_of_part, remaining = done, Tail(source, done)
    function = setting.compiled(labelled)
    batches = setting.sweep(params, remaining, function) if remaining else ()
    for result in batches:
      index = done + np.arange(len(result['mask']), dtype=np.int64)
      pending.append(columns(result, index))
      done = min(done + batch_size, examples)
      if len(pending) == size or done == examples:
        if runtime.is_main():
          parts.write(num_parts, pending, (first_of_part, done))
        pending, first_of_part, num_parts = [], done, num_parts + 1
    return from_main(lambda: parts.join(about, write))


class Parts:
  """The parts of one result, used by the main process only."""

  def __init__(self, out: epath.Path):
    """Determines the folder of the parts, OUT.parts."""
    self.out, self.folder = out, out.with_name(out.name + '.parts')

  @contextlib.contextmanager
  def locked(self) -> Iterator[None]:
    """Holds the folder's lock, so that a second writer is refused.

    Raises:
      UserError: another command writes the same result, or has just written it.
    """
    with paths.access(self.folder, 'written'):
      self.folder.mkdir(parents=True, exist_ok=True)
    with lock.hold(self.folder):
      if not (self.folder / lock.FILE).exists():  # it was removed meanwhile
        raise UserError(f'{self.out} has just been written: start again.')
      yield
      if [entry.name for entry in paths.entries(self.folder)] == [lock.FILE]:
        self.folder.rmtree()

  @property
  def about(self) -> dict[str, Any]:
    """Description of the computation; {} if there is none."""
    return jsonl.read_object(self.folder / 'about.json')

  def open(
    self, about: dict[str, Any], part_examples: int, examples: int
  ) -> int:
    """Opens or creates the folder, and returns the number of existing parts.

    Args:
      about: description of the computation.
      part_examples: number of examples per part. Parts of another size begin at
        other examples, and are not continued.
      examples: number of all examples.

    Raises:
      UserError: the folder contains parts of another result or of other
        examples, or cannot be written.
    """
    about = about | {'part_examples': part_examples}
    file = self.folder / 'about.json'
    with paths.access(self.folder, 'written'):
      self.folder.mkdir(parents=True, exist_ok=True)
      if not file.exists():
        paths.write(file, json.dumps(about))
      _check_description(self.folder, self.about, about)
    for index in range(len(self)):
      start = index * part_examples
      expected = [start, min(start + part_examples, examples)]
      found = self.read(index, [_EXAMPLES])[_EXAMPLES].tolist()
      if found != expected:
        raise self._unreadable(index, f'examples {found}, not {expected}')
    return len(self)

  def __len__(self) -> int:
    """Returns the number of existing parts before the first missing one."""
    return next(i for i in itertools.count() if not self._path(i).exists())

  def write(
    self, index: int, batches: list[Arrays], examples: tuple[int, int]
  ) -> None:
    """Writes the columns of several batches as a part.

    Args:
      index: index of the part.
      batches: columns of each batch.
      examples: first example, and the one after the last.

    Raises:
      UserError: the part cannot be written.
    """
    content, path = io.BytesIO(), self._path(index)
    columns: dict[str, Any] = {
      key: np.concatenate([batch[key] for batch in batches])
      for key in batches[0]
    }
    rows = [len(columns[key]) for key in sorted(columns)]
    columns |= {_EXAMPLES: np.array(examples), _ROWS: np.array(rows)}
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
    try:
      # The checksums of the archive are verified.
      with npz.opened(self._path(index)) as arrays:
        names = sorted({*arrays.files} - {_EXAMPLES, _ROWS})
        rows = dict(zip(names, arrays[_ROWS].tolist(), strict=True))
        found = {key: arrays[key] for key in keys or names}
        for key in rows.keys() & found:
          if len(found[key]) != rows[key]:
            raise ValueError(f'{len(found[key])} of {rows[key]} rows of {key}')
        return found
    except (OSError, ValueError) as error:
      raise self._unreadable(index, error) from error

  def join(self, about: dict[str, Any], write: Any) -> dict[str, Any]:
    """Writes the result and removes the parts; see `compute`.

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

  def _unreadable(self, index: int, reason: object) -> UserError:
    return UserError(
      f'{self._path(index)} cannot be read ({reason}): delete this part and '
      'all later ones.'
    )

  def _path(self, index: int) -> epath.Path:
    return self.folder / f'{index:05}.npz'


def about_of(path: str) -> dict[str, Any]:
  """Returns the description in a result, .npz or .parquet; {} if it has none.

  Raises:
    UserError: pyarrow is required but not installed.
  """
  try:
    if path.endswith('.npz'):
      return npz.about(path)[0]
    schema = pyarrow('pyarrow.parquet').read_schema(path)
    return jsonl.parse((schema.metadata or {}).get(b'about', b'')) or {}
  except (OSError, ValueError, KeyError, NotImplementedError):
    return {}


def pyarrow(module: str = 'pyarrow') -> Any:
  """Imports pyarrow, or a module of it; see `required`."""
  return required(module, 'a Parquet file', 'pyarrow')


def _existing(
  out: epath.Path, about: dict[str, Any], results: Collection[str]
) -> dict[str, Any]:
  """Returns the description in a complete result; {} if there is none.

  Raises:
    UserError: the file is a result of other weights, data or settings.
  """
  if not out.exists():
    return {}
  existing = about_of(str(out))
  compared = {key: existing[key] for key in existing if key not in results}
  _check_description(out, compared, about)
  log.info('%s exists already', out)
  return existing


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
