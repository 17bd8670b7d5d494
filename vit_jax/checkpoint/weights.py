"""Reads and writes only the weights of a step directory."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from vit_jax.arrays import sharding, tree
from vit_jax.checkpoint import agreement, items, manifest, retention, steps
from vit_jax.errors import UserError
from vit_jax.files import paths

PyTree = Any


def step_directory(path: str) -> epath.Path:
  """Returns a step directory: the path itself, or one of a workdir.

  Args:
    path: workdir, directory of checkpoints or step directory. A workdir stands
      for its newest step; WORKDIR@best for the one with the best metric of
      `checkpoint.best`, WORKDIR@1200 for step 1200.

  Raises:
    UserError: it is none of these, or holds no such checkpoint.
  """
  root = paths.locate(path)
  workdir, at, step = path.rpartition('@')
  if at and not root.exists():
    return _chosen(workdir, step)
  try:
    if {'params', 'about'} <= steps.listing(root):
      return root
    for folder in (root / 'checkpoints', root):
      found = steps.committed(folder)
      if found:
        return folder / str(found[-1])
  except OSError as error:
    raise UserError(f'{path} cannot be read: {error}.') from error
  what = 'holds no checkpoint' if root.exists() else 'does not exist'
  raise UserError(
    f'{path} {what}; give a workdir (with checkpoints/<step>/ in it), a step '
    'directory, or a file or directory of weights (see README).'
    f'{"" if root.exists() else paths.nearest(path)}'
  )


def _chosen(workdir: str, step: str) -> epath.Path:
  """Returns the directory of a step that is given by number or as 'best'."""
  newest = step_directory(workdir)
  folder = newest.parent
  there = steps.committed(folder)
  if step == 'best':
    metric = load_about(newest).get('config', {}).get('checkpoint', {})
    metric = metric.get('best')
    if metric is None:
      raise UserError(
        f'{workdir}@best: config.checkpoint.best of this run is not set, so no '
        f'checkpoint is the best; its steps are {_listed(there)}.'
      )
    found = retention.best(folder, there, metric)
    if found is None:
      raise UserError(
        f'{workdir}@best: none of the checkpoints {_listed(there)} has the '
        f'metric {metric!r} yet.'
      )
    return folder / str(found[0])
  if not step.isdigit() or int(step) not in there:
    raise UserError(
      f'{workdir}@{step}: there is no such checkpoint; give best or one of the '
      f'steps {_listed(there)}.'
    )
  return folder / step


def _listed(there: list[int]) -> str:
  return ', '.join(map(str, there))


def load_about(step_dir: epath.Path) -> dict[str, Any]:
  """Reads config, class names and preprocessing of a step directory.

  Args:
    step_dir: step directory.

  Returns:
    The item `about`.

  Raises:
    UserError: it is damaged, or may not be read.
    StorageError: it cannot be read, however often this is tried.
  """

  def about() -> dict[str, Any]:
    return manifest.read_about(step_dir, manifest.read(step_dir))

  return _reading(step_dir, about)


def held_items(step_dir: epath.Path) -> set[str]:
  """Returns the items of a step directory: 'params', 'average', 'training', ….

  Raises:
    UserError, StorageError: as `load_about`.
  """
  leaves = _reading(step_dir, lambda: manifest.read(step_dir).leaves)
  return {path.partition('/')[0] for path in leaves}


def load_params(step_dir: epath.Path, abstract: PyTree) -> PyTree:
  """Loads the parameters of a step, and verifies their checksums.

  Args:
    step_dir: step directory.
    abstract: shapes, dtypes and shardings of the result.

  Raises:
    UserError: the file holds other parameters, or is damaged.
  """
  return _load_item(step_dir, 'params', abstract)


def load_average(step_dir: epath.Path, abstract: PyTree) -> PyTree:
  """Loads the average of the parameters; see `load_params`."""
  mesh = jax.tree.leaves(abstract)[0].sharding.mesh
  count = jax.ShapeDtypeStruct(
    (), jnp.int32, sharding=sharding.replicated(mesh)
  )
  item = {'mean': abstract, 'count': count}
  return _load_item(step_dir, 'average', item)['mean']


def load_extra(step_dir: epath.Path, abstract: PyTree) -> PyTree:
  """Loads the objective's own state; see `load_params`."""
  return _load_item(step_dir, 'extra', abstract)


def _load_item(step_dir: epath.Path, name: str, abstract: PyTree) -> PyTree:
  """Loads an item of arrays, and verifies their checksums."""
  wanted = {name: abstract}

  def read() -> tuple[dict[str, Any], PyTree]:
    every = manifest.read(step_dir).leaves
    written = {k: v for k, v in every.items() if k.startswith(f'{name}/')}
    manifest.check_leaves(step_dir, written, wanted)
    nested = tree.unflatten(tree.flatten(abstract))
    restored = items.read_arrays(step_dir / name, nested)
    return written, items.join({name: restored}, wanted)

  def verify(read: tuple[dict[str, Any], PyTree]) -> PyTree:
    written, loaded = read
    agreement.together(manifest.compare, manifest.leaves(loaded), written)
    return loaded[name]

  return _reading(step_dir, read, verify)


def _reading(
  step_dir: epath.Path,
  read: Callable[[], Any],
  then: Callable[[Any], Any] = lambda value: value,
) -> Any:
  """Reads something of a step, again after pauses if the storage fails.

  Args:
    step_dir: step directory, for messages.
    read: function that each process calls by itself.
    then: function that all processes call with the result of `read`, if all of
      them could read.

  Returns:
    The result of `then`.
  """
  try:
    return agreement.with_retries(
      lambda: then(agreement.together(read)), str(step_dir), time.sleep
    )
  except items.CorruptError as error:
    raise UserError(
      f'{step_dir} is damaged: {error}. Give another step directory of this '
      'run.'
    ) from error


def export_params(
  directory: epath.PathLike, params: PyTree, about: dict[str, Any]
) -> None:
  """Writes only parameters, as a step directory that loads like any other.

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
  with ocp.StandardCheckpointer() as handler:
    handler.save(root / 'params', params)
  written = manifest.make({'params': params}, about)
  with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as handler:
    handler.save(root / 'about', about)
    handler.save(root / 'manifest', written)
