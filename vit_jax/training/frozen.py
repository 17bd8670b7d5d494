"""Opens the frozen models of an objective, and loads them onto the devices."""

import logging
from typing import Any

import jax
from jax.sharding import Mesh

from vit_jax.arrays import checksum, sharding, tree
from vit_jax.data import filters
from vit_jax.data.contract import Source
from vit_jax.errors import UserError
from vit_jax.objectives.contract import Frozen
from vit_jax.weights import pretrained

log = logging.getLogger('vit_jax')
PyTree = Any


def open_frozen(path: str) -> Frozen:
  """Opens weights in any format; see `objectives.contract.Frozen`.

  Args:
    path: workdir, checkpoint step directory or weight file.

  Raises:
    UserError: the path contains no weights that can be read.
  """
  source = pretrained.find(path)

  def load(mesh: Mesh) -> PyTree:
    return source.backbone(source.load(source.abstract_params(mesh)))

  names = source.description.class_names
  return Frozen(source.model(), source.image_size, load, names)


def check_classes(models: dict[str, Frozen], source: Source) -> None:
  """Checks that the first classes of frozen models are those of the data.

  If the model or the data have no class names, this is only logged.

  Args:
    models: frozen models of an objective, by name.
    source: source of the training examples.

  Raises:
    UserError: a model whose logits are compared with labels has other classes,
      or the same classes in another order.
  """
  for name, model in models.items():
    if not model.judges_labels:
      continue
    data_names, model_names = list(source.class_names), list(model.class_names)
    unnamed = filters.numbered(data_names) or filters.numbered(model_names)
    if not model_names or unnamed:
      log.info(
        'the class names of the frozen model %r cannot be compared with those '
        'of %s, because one of them has none; the classes are assumed to be '
        'the same, in the same order',
        name,
        source.name,
      )
    elif data_names != model_names[: len(data_names)]:
      sides = 'in the model', 'in the data'
      raise UserError(
        f'the frozen model {name!r} has other classes than {source.name}: '
        f'{filters.names_differ(model_names, data_names, sides)}. Rename the '
        "data's classes (source.class_map), or fine-tune the model first."
      )


def abstract(models: dict[str, Frozen], mesh: Mesh) -> dict[str, PyTree]:
  """Returns the shapes and shardings of the models' parameters, by name."""
  found = {}
  for name, each in models.items():
    params, rules = tree.unflatten(each.shapes()), each.model.sharding_rules
    found[name] = sharding.with_shardings(params, mesh, rules)
  return found


def load(models: dict[str, Frozen], mesh: Mesh) -> dict[str, PyTree]:
  """Loads the models' parameters onto the devices; returns them by name.

  Raises:
    UserError: the weights of a model cannot be read, or have other shapes.
  """
  shapes = abstract(models, mesh)
  return {
    name: jax.tree.map(
      lambda leaf, shape: jax.device_put(leaf, shape.sharding),
      each.load(mesh),
      shapes[name],
    )
    for name, each in models.items()
  }


def digests(params: dict[str, PyTree]) -> dict[str, str]:
  """Computes a digest of each model's parameters, independent of the mesh.

  Args:
    params: parameters by the name of the model.

  Returns:
    Digests of 16 hexadecimal digits, by the name of the model.
  """
  return {name: checksum.digest(each) for name, each in params.items()}
