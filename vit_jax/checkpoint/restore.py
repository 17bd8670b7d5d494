"""Restores the newest step that is intact for all processes; reads weights.

Each process reads its shards of a step. Before the step is used or renamed, the
processes exchange whether they succeeded; otherwise an error on one process
would leave the others waiting.

A directory also contains the id of the run whose steps it has. Restarts do not
change the id. Every manifest contains it, so that a step that was copied from
another run is recognized.
"""

import errno
import logging
import math
import uuid
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from vit_jax.arrays import sharding, tree
from vit_jax.checkpoint import agreement, items, manifest, steps
from vit_jax.checkpoint.agreement import CorruptError
from vit_jax.checkpoint.manifest import Manifest
from vit_jax.config import direction
from vit_jax.errors import UserError
from vit_jax.files import paths
from vit_jax.processes import consensus

log = logging.getLogger('vit_jax')

PyTree = Any
RUN_ID_FILE = 'run_id.json'


class RemovedError(UserError):
  """A step was removed while it was read."""


def newest(
  root: epath.Path, abstract: PyTree, run: str
) -> tuple[PyTree, int] | None:
  """Restores the newest intact step; see `Checkpointer.restore_latest`.

  Args:
    root: directory of checkpoints.
    abstract: shapes, dtypes and shardings of the state.
    run: id of the run; a step with another id is refused.
  """
  below = math.inf

  def newest_below() -> int | None:
    candidates = [step for step in steps.committed(root) if step < below]
    return max(candidates, default=None)

  def steps_and_bad_ones() -> list[str]:
    return sorted(filter(steps.is_step_or_bad, steps.listing(root)))

  while True:
    step = agreement.read_with_retries(
      lambda: agreement.on_main(newest_below), str(root)
    )
    if step is None:
      break
    path = root / str(step)
    try:
      return _restore(path, step, abstract, run), step
    except CorruptError as error:
      log.error('checkpoint %s is damaged and moved to *.bad: %s', path, error)
      agreement.read_with_retries(
        lambda step=step: agreement.on_main(steps.quarantine, root, step),
        f'renaming {path}',
      )
    below = step
  names = agreement.read_with_retries(
    lambda: agreement.on_main(steps_and_bad_ones), str(root)
  )
  # Only a run that never had a checkpoint may start from scratch.
  if names:
    raise UserError(
      f'no checkpoint in {root} is intact ({", ".join(names)}), see the log: '
      'repair one and rename it to its step, or give another --workdir to '
      'start from step 0.'
    )
  return None


def _restore(path: epath.Path, step: int, abstract: PyTree, run: str) -> PyTree:
  """Restores one step.

  Raises:
    CorruptError: the step is damaged, at least for one process.
    UserError, StorageError: see `agreement.read_with_retries`.
  """

  def attempt() -> PyTree:
    written, state = agreement.on_all(_read, path, step, abstract, run)
    # The checksums are a collective on all devices, so they are computed after
    # every process has read its part.
    agreement.on_all(manifest.compare, manifest.leaves(state), written.leaves)
    return state

  return agreement.read_with_retries(attempt, str(path))


def _read(
  path: epath.Path, step: int, abstract: PyTree, run: str
) -> tuple[Manifest, PyTree]:
  """Reads this process's part of a step, without verifying its arrays.

  Returns:
    The manifest, and the state.

  Raises:
    UserError: the step belongs to another run, another step or another model.
    Exception: the step is damaged, or cannot be read.
  """
  if not steps.listing(path):
    text = 'only the main process sees it (do all have the same file system?)'
    raise OSError(errno.ESTALE, text, str(path))
  written = manifest.read(path)
  if (written.step, written.run) != (step, run):
    raise UserError(
      f'{path} contains step {written.step} of run {written.run} (seed '
      f'{written.seed}), not step {step} of run {run}: move it away. Or, to '
      f'resume from it, rename it to {path.parent / str(written.step)}, and '
      f'remove the steps of other runs and their {path.parent / RUN_ID_FILE}.'
    )
  manifest.check_leaves(path, written.leaves, abstract)
  manifest.read_about(path, written)
  restored = {
    name: items.read_arrays(path / name, item)
    for name, item in items.split(abstract).items()
  }
  return written, items.join(restored, abstract)


def step_directory(path: str) -> epath.Path:
  """Returns the step directory that a path refers to.

  Args:
    path: workdir, directory of checkpoints, or step directory. WORKDIR means
      its newest step, WORKDIR@best the step with the best metric of
      `checkpoint.best`, and WORKDIR@1200 step 1200.

  Raises:
    UserError: the path is none of these, or contains no such checkpoint.
  """
  root = paths.locate(path)
  workdir, at, step = path.rpartition('@')
  if at and not root.exists():
    return _select_step(workdir, step)
  try:
    if {'params', 'about'} <= steps.listing(root):
      return root
    for folder in (root / 'checkpoints', root):
      found = steps.committed(folder)
      if found:
        return folder / str(found[-1])
  except OSError as error:
    raise UserError(f'{path} cannot be read: {error}.') from error
  problem = 'contains no checkpoint' if root.exists() else 'does not exist'
  raise UserError(
    f'{path} {problem}; give a workdir, a step directory, or weights (see '
    f'README).{"" if root.exists() else paths.nearest(path)}'
  )


def _select_step(workdir: str, step: str) -> epath.Path:
  """Returns the directory of a step that is given by number or as 'best'."""
  if paths.locate(workdir).is_file():
    raise UserError(
      f'{workdir} is a file, which has no steps: omit --step={step}, or the '
      f'@{step} of the path.'
    )
  newest = step_directory(workdir)
  available = steps.committed(newest.parent)
  if step == 'best':
    config = load_about(newest).get('config', {})
    metric = config.get('checkpoint', {}).get('best')
    sign = direction.of_best(config)
    if metric:
      best, _ = steps.best_step(newest.parent, available, metric, sign)
      if best is not None:
        best_step, _ = best
        step = str(best_step)
  if step not in map(str, available):
    raise UserError(
      f'{workdir}@{step} does not exist; give one of the steps {available}, or '
      'best if the metric of config.checkpoint.best was evaluated.'
    )
  return newest.parent / step


def load_about(step_dir: epath.Path) -> dict[str, Any]:
  """Reads config, class names and preprocessing of a step directory.

  Args:
    step_dir: step directory.

  Returns:
    The item `about`.

  Raises:
    UserError: the item is damaged, or there is no permission to read it.
    StorageError: the item cannot be read, even after retries.
  """
  return _read_intact(
    step_dir, lambda: manifest.read_about(step_dir, manifest.read(step_dir))
  )


def list_items(step_dir: epath.Path) -> set[str]:
  """Returns the items of a step directory: 'params', 'average', 'training', ….

  Raises:
    UserError, StorageError: see `load_about`.
  """
  leaves = _read_intact(step_dir, lambda: manifest.read(step_dir).leaves)
  return {path.partition('/')[0] for path in leaves}


def load_arrays(
  step_dir: epath.Path, abstract: PyTree, name: str = 'params'
) -> PyTree:
  """Loads an item of arrays, and verifies their checksums.

  Args:
    step_dir: step directory.
    abstract: shapes, dtypes and shardings of the result.
    name: 'params', 'extra' (the objective's own state) or 'average'.

  Raises:
    UserError: the step contains other arrays, or is damaged.
  """
  expected = {name: abstract}

  def read() -> tuple[dict[str, Any], PyTree]:
    leaves = manifest.read(step_dir).leaves
    written = {k: v for k, v in leaves.items() if k.startswith(f'{name}/')}
    manifest.check_leaves(step_dir, written, expected)
    nested = tree.unflatten(tree.flatten(abstract))  # as `items.split` does
    restored = items.read_arrays(step_dir / name, nested)
    return written, items.join({name: restored}, expected)

  def verify(result: tuple[dict[str, Any], PyTree]) -> PyTree:
    written, loaded = result
    agreement.on_all(manifest.compare, manifest.leaves(loaded), written)
    return loaded[name]

  return _read_intact(step_dir, read, verify)


def load_average(step_dir: epath.Path, abstract: PyTree) -> PyTree:
  """Loads the average of the parameters; see `load_arrays`."""
  mesh = jax.tree.leaves(abstract)[0].sharding.mesh
  count = jax.ShapeDtypeStruct(
    (), jnp.int32, sharding=sharding.replicated(mesh)
  )
  item = {'mean': abstract, 'count': count}  # the fields of `average.Average`
  return load_arrays(step_dir, item, 'average')['mean']


def _read_intact(
  step_dir: epath.Path,
  read: Callable[[], Any],
  verify: Callable[[Any], Any] = lambda value: value,
) -> Any:
  """Reads a part of a step for a command, and refuses a damaged step.

  If the storage fails, it tries again after pauses.

  Args:
    step_dir: step directory, for messages.
    read: function that reads; each process calls it by itself.
    verify: function of the result of `read`. All processes call it after all of
      them have succeeded in reading, so it may be a collective.

  Returns:
    The result of `verify`.

  Raises:
    UserError: the step is damaged, or there is no permission to read it.
    RemovedError: the step was removed.
    StorageError: the step cannot be read, even after retries.
  """

  def is_removed() -> bool:
    is_step_name = steps.parse_step(step_dir.name) is not None
    return is_step_name and not steps.is_step(step_dir)

  try:
    return agreement.read_with_retries(
      lambda: verify(agreement.on_all(read)), str(step_dir)
    )
  except agreement.CorruptError as error:
    if consensus.from_main(is_removed):
      raise RemovedError(
        f'{step_dir} was removed while it was read; a run that is training '
        'keeps its newest steps and its best step. Run the command again, or '
        'give the run a larger config.checkpoint.keep.'
      ) from error
    raise UserError(
      f'{step_dir} is damaged: {error}. Give another step directory of this '
      'run.'
    ) from error


def export_params(
  directory: epath.PathLike, params: PyTree, about: dict[str, Any]
) -> None:
  """Writes parameters as a step directory, without the state of the optimizer.

  Args:
    directory: step directory to create.
    params: parameters, sharded in any way.
    about: content of the item `about`.

  Raises:
    UserError: the directory exists.
  """
  root = paths.locate_new(directory)
  steps.check_path(root)
  with paths.new_folder(root) as unfinished:
    with ocp.StandardCheckpointer() as handler:
      handler.save(unfinished / 'params', params)
    written = manifest.make({'params': params}, about)
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as handler:
      handler.save(unfinished / 'about', about)
      handler.save(unfinished / 'manifest', written)


def find_run_id(root: epath.Path) -> str:
  """Returns the id of a directory's run, or a new id if it has none.

  All processes must call it, and it returns the same id on all of them.

  Args:
    root: directory of checkpoints.

  Raises:
    agreement.FailedError: the directory cannot be read.
  """

  def run() -> str:
    return (
      _run_id_in_file(root) or _run_id_of_newest_step(root) or uuid.uuid4().hex
    )

  return agreement.on_main(run)


def _run_id_in_file(root: epath.Path) -> str | None:
  """Reads the id from its file; returns None if that is missing or damaged."""
  try:
    content = items.read_json(root, RUN_ID_FILE)
    return manifest.verified(content, RUN_ID_FILE)['run']
  except CorruptError:
    return None


def _run_id_of_newest_step(root: epath.Path) -> str | None:
  """Reads the id from the newest manifest that contains one."""
  for step in reversed(steps.committed(root)):
    try:
      run = manifest.read(root / str(step)).run
    except CorruptError:
      continue
    if run is not None:
      return run
  return None


def record_run_id(root: epath.Path, run: str) -> None:
  """Writes the id to its file; must be called before the first save.

  Args:
    root: directory of checkpoints.
    run: id of the run.
  """
  if _run_id_in_file(root) != run:
    paths.write(root / RUN_ID_FILE, manifest.text_with_checksum({'run': run}))
