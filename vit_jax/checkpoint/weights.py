"""Weights alone, from a step directory and into one."""

from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from vit_jax import sharding, storage, tree
from vit_jax.checkpoint import items
from vit_jax.errors import UserError

PyTree = Any


def step_directory(path: str) -> epath.Path:
  """The step directory that a path means: itself, or a workdir's newest.

  Raises:
    UserError: neither a workdir with a checkpoint nor a step directory.
  """
  root = storage.locate(path)
  if (root / 'params').is_dir() and (root / 'about').is_dir():
    return root
  for folder in (root / 'checkpoints', root):
    if folder.is_dir():
      steps = [int(p.name) for p in folder.iterdir() if p.name.isdigit()]
      if steps:
        return folder / str(max(steps))
  what = 'holds no checkpoint' if root.exists() else 'does not exist'
  raise UserError(
    f'{path} {what}; give a workdir (with checkpoints/<step>/ in it), a step '
    'directory, or an official .npz file.'
  )


def load_about(step_dir: epath.Path) -> dict[str, Any]:
  """Config, class names and preprocessing of a step directory.

  Raises:
    UserError: it is damaged.
  """
  try:
    return items.read_json(step_dir / 'about')
  except items.CorruptError as error:
    raise _damaged(step_dir, error) from error


def load_params(step_dir: epath.Path, abstract: PyTree) -> PyTree:
  """Parameters only, verified, onto the shardings of `abstract`.

  Raises:
    UserError: the file holds other parameters, or is damaged.
  """
  return _load_item(step_dir, 'params', abstract)


def load_average(step_dir: epath.Path, abstract: PyTree) -> PyTree | None:
  """The average of parameters, verified; None where none was kept.

  Raises:
    UserError: as `load_params`.
  """
  if not (step_dir / 'average').is_dir():
    return None
  mesh = jax.tree.leaves(abstract)[0].sharding.mesh
  count = jax.ShapeDtypeStruct(
    (), jnp.int32, sharding=sharding.replicated(mesh)
  )
  item = {'mean': abstract, 'count': count}
  return _load_item(step_dir, 'average', item)['mean']


def _load_item(step_dir: epath.Path, name: str, abstract: PyTree) -> PyTree:
  wanted = {name: abstract}
  try:
    manifest = items.read_json(step_dir / 'manifest')
    written = {k: v for k, v in manifest.items() if k.startswith(f'{name}/')}
    items.check_shapes(
      str(step_dir), items.manifest_shapes(written), items.shapes(wanted)
    )
    nested = tree.unflatten(tree.flatten(abstract))
    with ocp.StandardCheckpointer() as handler:
      restored = handler.restore(step_dir / name, nested)
    loaded = items.join({name: restored}, wanted)
    items.verify(loaded, written)
  except UserError:
    raise
  except Exception as error:  # noqa: BLE001 (damage raises anything)
    raise _damaged(step_dir, error) from error
  return loaded[name]


def _damaged(step_dir: epath.Path, error: Exception) -> UserError:
  return UserError(
    f'{step_dir} is damaged: {items.root_cause(error)}. Give another step '
    'directory of that run.'
  )


def export_params(
  directory: epath.PathLike, params: PyTree, about: dict[str, Any]
) -> None:
  """Writes parameters alone, as a step directory that loads like any other.

  Raises:
    UserError: the directory exists.
  """
  root = storage.locate(directory)
  if root.exists():
    raise UserError(f'{directory} exists: give a new directory.')
  with ocp.StandardCheckpointer() as handler:
    handler.save(root / 'params', params)
  manifest = items.manifest({'params': params})
  with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as handler:
    handler.save(root / 'about', about)
    handler.save(root / 'manifest', manifest)
