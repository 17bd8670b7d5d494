"""The format of this package: workdirs and step directories of checkpoints."""

import functools
import logging
from typing import Any

import jax
from etils import epath
from jax.sharding import NamedSharding

from vit_jax import checkpoint
from vit_jax.arrays import sharding
from vit_jax.errors import UserError
from vit_jax.files import paths
from vit_jax.processes import consensus
from vit_jax.weights.contract import Pretrained
from vit_jax.weights.description import Description
from vit_jax.weights.formats import damage

log = logging.getLogger('vit_jax')
PyTree = Any


def matches(path: str) -> bool:
  """Returns True, because this format is tried last, for all other paths."""
  del path
  return True


def load(path: str, matched: Any = None) -> Pretrained:
  """Describes the weights in a step directory or in a workdir's newest step.

  Args:
    path: path of the directory, local or gs://.
    matched: not used.

  Raises:
    UserError: the directory does not exist, is damaged or has an unknown
      format.
  """
  del matched
  if paths.locate(path).is_file():
    raise UserError(
      f'{path} has an unknown ending. {damage.describe(path)} '
      f'{damage.SUPPORTED}.'
    )
  try:
    step_dir, about, items = _open(path)
  except checkpoint.RemovedError:  # a run that is training has saved another
    step_dir, about, items = _open(path)
  if about.get('format') != checkpoint.FORMAT:
    raise UserError(
      f'{step_dir} has the format {about.get("format")!r}; this version reads '
      f'{checkpoint.FORMAT}: use the version of vit_jax that wrote it.'
    )
  log.info('weights from %s', step_dir)

  def loader(item: str, load: Any) -> Any:
    return functools.partial(load, step_dir) if item in items else None

  load_extra = functools.partial(checkpoint.load_arrays, name='extra')
  return Pretrained(
    str(step_dir),
    Description.of_json(about),
    functools.partial(checkpoint.load_arrays, step_dir),
    load_average=loader('average', checkpoint.load_average),
    load_extra=loader('extra', load_extra),
  )


def _open(path: str) -> tuple[epath.Path, dict[str, Any], set[str]]:
  """Returns a step directory, its item `about` and the names of its items."""
  newest = checkpoint.step_directory(path)
  # Another process may have seen a newer step; all use that of the main one.
  step_dir = newest.parent / consensus.from_main(lambda: newest.name)
  about = checkpoint.load_about(step_dir)
  return step_dir, about, checkpoint.list_items(step_dir)


def save(path: str, params: PyTree, description: Description) -> None:
  """Writes a step directory that contains only parameters.

  Args:
    path: path of the directory, which must not exist.
    params: parameters of the objective that is described, on a mesh, or all in
      the memory of this process.
    description: what the weights are.

  Raises:
    UserError: the directory exists or cannot be written, or the path has the
      ending of a format that is not supported.
  """
  paths.check_folder_name(
    path,
    '.npz, .safetensors, huggingface:DIR, big_vision:FILE.npz, or a directory '
    'without such an ending. For servers: python -m vit_jax.export',
  )
  placed = [getattr(x, 'sharding', None) for x in jax.tree.leaves(params)]
  if not all(isinstance(each, NamedSharding) for each in placed):
    mesh = sharding.make_mesh(jax.local_devices()[:1])
    params = jax.device_put(params, sharding.replicated(mesh))
  checkpoint.export_params(path, params, description.to_json())
