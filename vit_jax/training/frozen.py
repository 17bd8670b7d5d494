"""Frozen models of an objective: opened, placed, and known again."""

import hashlib
import json
import logging
from typing import Any

import jax
from jax.sharding import Mesh

from vit_jax.arrays import checksum, sharding
from vit_jax.data import matching
from vit_jax.data.contract import Source
from vit_jax.errors import UserError
from vit_jax.models.contract import abstract_params
from vit_jax.objectives.contract import Frozen
from vit_jax.weights import pretrained

log = logging.getLogger('vit_jax')
PyTree = Any


def open_frozen(path: str) -> Frozen:
  """Looks at weights in any format; see `objectives.contract.Frozen`.

  Raises:
    UserError: there are none.
  """
  source = pretrained.find(path)

  def load(mesh: Mesh) -> PyTree:
    return source.backbone(source.load(source.abstract_params(mesh)))

  names = tuple(source.about.get('class_names') or ())
  return Frozen(source.model(), source.image_size, load, names)


def check_classes(models: dict[str, Frozen], source: Source) -> None:
  """Raises UserError if a teacher's classes are not those of the training.

  Args:
    models: of an objective.
    source: of the training.
  """
  for name, each in models.items():
    if not each.judges_labels:
      continue
    own, known = list(source.class_names), list(each.class_names)
    if not known or matching.numbered(own) or matching.numbered(known):
      log.info(
        'the class names of the frozen model %r cannot be compared with those '
        'of %s: one of both has none; its classes are taken to be the same, '
        'in the same order',
        name,
        source.name,
      )
    elif own != known[: len(own)]:
      raise UserError(
        f'the frozen model {name!r} has other classes than {source.name}, or '
        f'the same in another order: {matching.names_differ(known, own)}. Its '
        "logits would be held against the wrong labels: rename the data's "
        'classes (source.class_map names them for most sources), or fine-tune '
        'the model on these data first.'
      )


def abstract(models: dict[str, Frozen], mesh: Mesh) -> dict[str, PyTree]:
  """Shapes and shardings of their parameters."""
  return {
    name: sharding.with_shardings(
      abstract_params(each.model, each.image_size),
      mesh,
      each.model.sharding_rules,
    )
    for name, each in models.items()
  }


def load(models: dict[str, Frozen], mesh: Mesh) -> dict[str, PyTree]:
  """Their parameters, on the devices.

  Raises:
    UserError: they cannot be read, or are others than the model's.
  """
  places = abstract(models, mesh)
  return {
    name: jax.tree.map(
      lambda leaf, place: jax.device_put(leaf, place.sharding),
      each.load(mesh),
      places[name],
    )
    for name, each in models.items()
  }


def digests(params: dict[str, PyTree]) -> dict[str, str]:
  """By what each of them is known again, on any mesh."""
  found = {}
  for name, each in params.items():
    mesh = jax.tree.leaves(each)[0].sharding.mesh
    sums = checksum.checksums(each, sharding.replicated(mesh))
    text = json.dumps(sums, sort_keys=True)
    found[name] = hashlib.sha256(text.encode()).hexdigest()[:16]
  return found
