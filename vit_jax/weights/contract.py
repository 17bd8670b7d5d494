"""Trained weights, and what is asked of a format that holds them."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from vit_jax.arrays import sharding
from vit_jax.config import plugins, sections
from vit_jax.data.augment.transforms import square
from vit_jax.data.contract import Preprocess
from vit_jax.errors import UserError, closest
from vit_jax.objectives.contract import Setting

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Pretrained:
  """Weights that can be loaded, and what is known about them.

  Attributes:
    path: where they come from.
    about: model and objective (config sections), num_classes, image_size,
      preprocess (config section), class_names; for a checkpoint also the whole
      config.
    load: (shapes with shardings) → parameters.
    load_average: the same for the average of parameters, None if there is none.
  """

  path: str
  about: dict[str, Any]
  load: Callable[[PyTree], PyTree]
  load_average: Callable[[PyTree], PyTree | None]

  @property
  def image_size(self) -> tuple[int, int]:
    """(height, width) that the position embedding is made for, pixels."""
    return square(tuple(self.about['image_size']))

  def model(self, **changes: Any) -> Any:
    """The model the weights belong to, with changes to its section."""
    section = {'name': 'vit', **self.about['model'], **changes}
    constructor = sections.constructor('model', section)
    unknown = [key for key in changes if key not in plugins.keys(constructor)]
    if unknown:
      raise UserError(
        f'the model {section["name"]!r} has no {unknown[0]!r}; '
        f'{closest(unknown[0], plugins.keys(constructor))}.'
      )
    return plugins.build(constructor, section, self.about['num_classes'])

  def objective(self, **changes: Any) -> Any:
    """The objective with its model, for `predict`."""
    section = self.about['objective']
    setting = Setting(self.model(**changes), self.image_size)
    return sections.build('objective', section, setting)

  def backbone(self, params: PyTree) -> PyTree:
    """The model's own parameters among the objective's."""
    return self.objective().backbone(params)

  def preprocess(self) -> Preprocess:
    """What evaluation does to examples."""
    return sections.build(
      'preprocess', self.about['preprocess'], self.image_size
    )

  def abstract_params(self, mesh: Mesh) -> PyTree:
    """Shapes and shardings of the parameters on a mesh."""
    objective = self.objective()
    batch = {'image': jnp.zeros((1, *self.image_size, 3), jnp.uint8)}
    params, _ = jax.eval_shape(lambda: objective.init(jax.random.key(0), batch))
    return sharding.with_shardings(params, mesh, objective.sharding_rules)


class Format(NamedTuple):
  """The functions of a format: a module of `weights.formats`, or your own.

  A path is read and written by the first format that it matches; a path
  'my_lab.my_format:PATH' by the module that it names.

  Attributes:
    matches: (path) → whether the path, which need not exist, is of this format.
    load: (path) → what is known about the weights there; their arrays may be
      read now or when they are asked for. Raises UserError: no such path,
      another format, damage.
    save: (path, parameters, about) writes weights: those of the objective that
      `about` names (see `Pretrained.about`), in this package's layout. Raises
      UserError: the format cannot hold them, or cannot be written.
  """

  matches: Callable[[str], bool]
  load: Callable[[str], Pretrained]
  save: Callable[[str, PyTree, dict[str, Any]], None]

  @classmethod
  def of(cls, module: Any) -> 'Format':
    """The format that a module defines."""
    return cls(module.matches, module.load, module.save)
