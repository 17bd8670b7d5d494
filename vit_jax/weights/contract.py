"""Trained weights, and what is asked of a format that holds them."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax.arrays import sharding
from vit_jax.config import plugins, sections
from vit_jax.data import contract
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
      config; for weights of another project `normalization`, the mean and std
      of pixels in [0, 1] that are folded into the patch embedding.
    load: (shapes with shardings) → parameters.
    load_average: the same for the average of parameters; None: none was kept.
    load_extra: the same for the objective's own state (a teacher, say); None:
      there are parameters alone.
  """

  path: str
  about: dict[str, Any]
  load: Callable[[PyTree], PyTree]
  load_average: Callable[[PyTree], PyTree] | None = None
  load_extra: Callable[[PyTree], PyTree] | None = None

  @property
  def image_size(self) -> tuple[int, int]:
    """(height, width) that the position embedding is made for, pixels."""
    return square(tuple(self.about['image_size']))

  def changed(self, **changes: Any) -> 'Pretrained':
    """The same weights, with changes to the model's section.

    Raises:
      UserError: the model has no such key.
    """
    section = {'name': 'vit', **self.about['model'], **changes}
    constructor = sections.constructor('model', section)
    unknown = [key for key in changes if key not in plugins.keys(constructor)]
    if unknown:
      raise UserError(
        f'the model {section["name"]!r} has no {unknown[0]!r}; '
        f'{closest(unknown[0], plugins.keys(constructor))}.'
      )
    return dataclasses.replace(self, about={**self.about, 'model': section})

  def model(self, **changes: Any) -> Any:
    """The model the weights belong to, with changes to its section."""
    section = self.changed(**changes).about['model']
    constructor = sections.constructor('model', section)
    return plugins.build(constructor, section, self.about['num_classes'])

  def objective(
    self, image_size: tuple[int, int] | None = None, **changes: Any
  ) -> Any:
    """The objective with its model, for `predict`.

    Args:
      image_size: (height, width), pixels; by default the weights' own.
      **changes: to the model's section.
    """
    section = self.about['objective']
    setting = Setting(self.model(**changes), image_size or self.image_size)
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
    return self._abstract(mesh)[0]

  def _abstract(self, mesh: Mesh) -> tuple[PyTree, PyTree]:
    """Shapes and shardings of the parameters and of the extra state."""
    objective, batch = self.objective(), self._abstract_batch()
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(objective.init, key, batch)
    return sharding.with_shardings(state, mesh, objective.sharding_rules)

  def _abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
    """One example's shapes, as the transform of the training declares them."""
    augment = self.about.get('config', {}).get('augment')
    if augment is None:  # weights alone, of a classification
      spec = {'image': ((*self.image_size, 3), np.dtype(np.uint8))}
    else:
      spec = contract.check_spec(
        sections.build('augment', augment, self.image_size)
      )
    return {
      key: jax.ShapeDtypeStruct(shape, dtype)
      for key, (shape, dtype) in contract.layout(spec, 1).items()
    }

  def weights(self, mesh: Mesh) -> dict[str, PyTree]:
    """All that is worth evaluating, by the names of `Trainer.weights`.

    Weights alone, without the objective's own state, are one set: ''.
    """
    abstract, extra = self._abstract(mesh)
    params = self.load(abstract)
    if jax.tree.leaves(extra):
      extra = self.load_extra and self.load_extra(extra)
    average = self.load_average and self.load_average(abstract)
    return self._named(params, extra, average)

  def _named(
    self, params: PyTree, extra: PyTree | None, average: PyTree | None
  ) -> dict[str, PyTree]:
    """What `weights` returns; None is what is not there."""
    found = {'': params}
    if extra is not None:
      found = self.objective().weights(params, extra)
    return found if average is None else found | {'_ema': average}

  def chosen(self, name: str) -> 'Pretrained':
    """The same with other weights of the training as its parameters.

    Args:
      name: 'params' for the parameters themselves, 'ema' for their average, or
        another name of `Objective.weights` without its underscore ('teacher').

    Raises:
      UserError: there are none of that name.
    """
    if name == 'params':
      return self
    names = self._names()
    if f'_{name}' not in names:
      shown = ', '.join(ending.lstrip('_') or 'params' for ending in names)
      raise UserError(
        f'{self.path} holds no weights {name!r}; it has {shown}: give one of '
        'them.'
      )

    def load(abstract: PyTree) -> PyTree:
      mesh = jax.tree.leaves(abstract)[0].sharding.mesh
      return self.weights(mesh)[f'_{name}']

    return dataclasses.replace(self, load=load)

  def _names(self) -> list[str]:
    """The names of `weights`, without loading any."""
    params, extra = self._abstract(sharding.make_mesh(jax.local_devices()[:1]))
    if jax.tree.leaves(extra) and self.load_extra is None:
      extra = None
    average = params if self.load_average else None
    return [*jax.eval_shape(self._named, params, extra, average)]


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
