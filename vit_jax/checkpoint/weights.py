"""Reads the weights of a step directory without the state of the optimizer."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from vit_jax.arrays import sharding, tree
from vit_jax.checkpoint import items, manifest, steps
from vit_jax.errors import UserError
from vit_jax.files import paths

PyTree = Any


def step_directory(path: str) -> epath.Path:
  """Returns the step directory that a path refers to.

  Args:
    path: workdir, directory of checkpoints, or step directory. WORKDIR means
      its newest step, WORKDIR@best the step with the highest metric of
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
  newest = step_directory(workdir)
  available = steps.committed(newest.parent)
  if step == 'best':
    section = load_about(newest).get('config', {}).get('checkpoint', {})
    metric = section.get('best')
    best = metric and steps.best_step(newest.parent, available, metric)[0]
    step = str(best[0]) if best else step
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

  def about() -> dict[str, Any]:
    return manifest.read_about(step_dir, manifest.read(step_dir))

  return _read_with_retries(step_dir, about)


def list_items(step_dir: epath.Path) -> set[str]:
  """Returns the items of a step directory: 'params', 'average', 'training', ….

  Raises:
    UserError, StorageError: see `load_about`.
  """
  leaves = _read_with_retries(step_dir, lambda: manifest.read(step_dir).leaves)
  return {path.partition('/')[0] for path in leaves}


def load_arrays(
  step_dir: epath.Path, abstract: PyTree, name: str = 'params'
) -> PyTree:
  """Loads an item of arrays, and verifies their checksums.

  Args:
    step_dir: step directory.
    abstract: shapes, dtypes and shardings of the result.
    name: 'params' for the parameters, or 'extra' for the objective's own state.

  Raises:
    UserError: the step contains other arrays, or is damaged.
  """
  expected = {name: abstract}

  def read() -> tuple[dict[str, Any], PyTree]:
    leaves = manifest.read(step_dir).leaves
    written = {k: v for k, v in leaves.items() if k.startswith(f'{name}/')}
    manifest.check_leaves(step_dir, written, expected)
    nested = tree.unflatten(tree.flatten(abstract))
    restored = items.read_arrays(step_dir / name, nested)
    return written, items.join({name: restored}, expected)

  def verify(read: tuple[dict[str, Any], PyTree]) -> PyTree:
    written, loaded = read
    items.on_all(manifest.compare, manifest.leaves(loaded), written)
    return loaded[name]

  return _read_with_retries(step_dir, read, verify)


def load_average(step_dir: epath.Path, abstract: PyTree) -> PyTree:
  """Loads the average of the parameters; see `load_arrays`."""
  mesh = jax.tree.leaves(abstract)[0].sharding.mesh
  count = jax.ShapeDtypeStruct(
    (), jnp.int32, sharding=sharding.replicated(mesh)
  )
  item = {'mean': abstract, 'count': count}
  return load_arrays(step_dir, item, 'average')['mean']


def _read_with_retries(
  step_dir: epath.Path,
  read: Callable[[], Any],
  verify: Callable[[Any], Any] = lambda value: value,
) -> Any:
  """Reads a part of a step; tries again after pauses if the storage fails.

  Args:
    step_dir: step directory, for messages.
    read: function that reads; each process calls it by itself.
    verify: function of the result of `read`. All processes call it after all of
      them have succeeded in reading, so it may be a collective.

  Returns:
    The result of `verify`.

  Raises:
    UserError: the step is damaged, or there is no permission to read it.
    StorageError: the step cannot be read, even after retries.
  """
  try:
    return items.with_retries(lambda: verify(items.on_all(read)), str(step_dir))
  except items.CorruptError as error:
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
  root = paths.locate(directory)
  if root.exists():
    raise UserError(f'{directory} exists: give a new directory.')
  steps.check_path(root)
  with paths.new_folder(root) as unfinished:
    with ocp.StandardCheckpointer() as handler:
      handler.save(unfinished / 'params', params)
    written = manifest.make({'params': params}, about)
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as handler:
      handler.save(unfinished / 'about', about)
      handler.save(unfinished / 'manifest', written)
