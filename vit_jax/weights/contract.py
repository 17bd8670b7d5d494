"""Trained weights, and the interface of a format that stores them."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from vit_jax.arrays import sharding
from vit_jax.errors import UserError, check_choice
from vit_jax.models.contract import Size
from vit_jax.weights.description import Description

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Pretrained:
  """Weights that can be loaded, and their description.

  Attributes:
    path: path of the weights.
    description: what the weights are.
    load: function from shapes with shardings to the parameters.
    load_average: the same function for the average of the parameters; None if
      the weights contain no average.
    load_extra: the same function for the extra state of the objective, such as
      a teacher; None if the weights contain only parameters.
    sets: functions that describe other models in the same file, by name.
  """

  path: str
  description: Description
  load: Callable[[PyTree], PyTree]
  load_average: Callable[[PyTree], PyTree] | None = None
  load_extra: Callable[[PyTree], PyTree] | None = None
  sets: Mapping[str, Callable[[], 'Pretrained']] = dataclasses.field(
    default_factory=dict
  )

  @property
  def image_size(self) -> Size:
    """(height, width) of the images that the weights are for, pixels."""
    return self.description.image_size

  def changed(self, **changes: Any) -> 'Pretrained':
    """Returns the same weights with changes to the model's section.

    Args:
      **changes: keys of the section and their new values.

    Raises:
      UserError: the model has no such key.
    """
    changed = self.description.with_model(**changes)
    return dataclasses.replace(self, description=changed)

  def model(self) -> Any:
    """Returns the model of the weights."""
    return self.description.built_model

  def objective(self) -> Any:
    """Returns the objective with its model, for `predict`."""
    return self.description.built_objective

  def backbone(self, params: PyTree) -> PyTree:
    """Returns the parameters of the model among those of the objective."""
    return self.objective().backbone(params)

  def abstract_params(self, mesh: Mesh | None = None) -> PyTree:
    """Returns shapes and shardings of the parameters on a mesh.

    Args:
      mesh: mesh of the devices; by default, that of one device of this process.
    """
    return self._sharded(self.description.shapes[0], mesh)

  def _sharded(self, shapes: PyTree, mesh: Mesh | None) -> PyTree:
    """Adds the shardings of the objective to shapes."""
    if mesh is None:
      mesh = sharding.make_mesh(jax.local_devices()[:1])
    rules = self.objective().sharding_rules
    return sharding.with_shardings(shapes, mesh, rules)

  def abstract_weights(self, mesh: Mesh | None = None) -> PyTree:
    """Returns shapes and shardings of the result of `load_weights`."""
    sets = jax.eval_shape(self._named, *self.description.shapes, None)
    return self._sharded(sets['params'], mesh)

  def load_weights(self, mesh: Mesh) -> PyTree:
    """Loads the parameters and the state that `Objective.predict` needs.

    An example of such state are the running statistics of a linear probe.

    Args:
      mesh: mesh of the devices.

    Raises:
      UserError: the weights do not contain this state.
    """
    abstract, extra = self._sharded(self.description.shapes, mesh)
    # The parameters as `predict` expects them, with parts of the extra state
    needed = jax.eval_shape(self._named, abstract, extra, None)['params']
    if needed.keys() == abstract.keys():
      return self.load(abstract)
    if self.load_extra is None:
      missing = sorted(needed.keys() - abstract.keys())
      raise UserError(
        f'{self.path} has parameters only, as `convert` writes them; '
        f'predictions also need {", ".join(missing)}: use the workdir of the '
        'run.'
      )
    params = self.load(abstract)
    return self._named(params, self.load_extra(extra), None)['params']

  def weights(self, mesh: Mesh) -> dict[str, PyTree]:
    """Loads all sets of weights, by name as in `Trainer.weights`.

    If the extra state of the objective is missing, the sets are 'params' and,
    if there is an average, 'ema'.

    Args:
      mesh: mesh of the devices.
    """
    abstract, extra = self._sharded(self.description.shapes, mesh)
    if not jax.tree.leaves(extra):
      params = self.load(abstract)
    elif self.load_extra is None:
      # This raises an error if `predict` needs the missing state.
      params, extra = self.load_weights(mesh), None
    else:
      params, extra = self.load(abstract), self.load_extra(extra)
    average = self.load_average and self.load_average(abstract)
    return self._named(params, extra, average)

  def _named(
    self, params: PyTree, extra: PyTree | None, average: PyTree | None
  ) -> dict[str, PyTree]:
    """Returns the sets of weights that are not None, by name."""
    sets = {'params': params}
    if extra is not None:
      sets = self.objective().weights(params, extra)
    if average is None:
      return sets
    # An average has the same parts of the extra state as the parameters.
    return sets | {'ema': self._named(average, extra, None)['params']}

  def chosen(self, name: str) -> 'Pretrained':
    """Returns a copy whose parameters are the named set of weights.

    Args:
      name: 'params' for the parameters themselves, 'ema' for their average, or
        another key of `Objective.weights`, such as 'teacher', or of `sets`.

    Raises:
      UserError: there is no set of that name.
    """
    if name in self.sets:
      return self.sets[name]()
    if name == 'params':
      return self
    check_choice(f'the choice of weights of {self.path}', name, self._names())
    if name == 'ema' and self.load_average:
      return dataclasses.replace(self, load=self.load_average)

    def load(abstract: PyTree) -> PyTree:
      mesh = jax.tree.leaves(abstract)[0].sharding.mesh
      return self.weights(mesh)[name]

    return dataclasses.replace(self, load=load)

  def _names(self) -> list[str]:
    """Returns the names of `weights` without loading any."""
    params, extra = self.description.shapes
    if jax.tree.leaves(extra) and self.load_extra is None:
      extra = None  # it is missing in the file
    average = params if self.load_average else None
    return [*jax.eval_shape(self._named, params, extra, average), *self.sets]


class SeveralModels(NamedTuple):
  """A file with several models, none of which is the default.

  Attributes:
    path: path of the file.
    sets: functions that describe the models, by name.
  """

  path: str
  sets: Mapping[str, Callable[[], Pretrained]]

  def chosen(self, name: str) -> Pretrained:
    """Returns the model of a name.

    Raises:
      UserError: there is no model of that name.
    """
    several = f'{self.path} contains several models: that of --weights=NAME'
    check_choice(several, name, self.sets)
    return self.sets[name]()


class Format(NamedTuple):
  """The functions of a format: a module of `weights.formats`, or your own.

  A path is read and written by the first format that it matches, but a path
  'my_lab.my_format:PATH' by the module `my_lab.my_format`.

  Attributes:
    matches: function that returns None if a path, which may not exist, does not
      have this format, and otherwise what it has read to find out, or True.
    load: function from a path and the result of `matches` (None if the user has
      named the format) to the description of its weights, whose arrays may be
      read immediately or when they are loaded. It raises UserError if the path
      does not exist, has another format or is damaged.
    save: function of (path, parameters, description) that writes weights: the
      parameters of the described objective, in the layout of this package. It
      raises UserError if they cannot be stored in this format, and OSError if
      they cannot be written.
    adapters: whether `save` writes LoRA without the frozen weights: parameters
      and description are those of `adapters.unmerged`.
  """

  matches: Callable[[str], Any]
  load: Callable[[str, Any], Pretrained | SeveralModels]
  save: Callable[[str, PyTree, Description], None]
  adapters: bool = False

  @classmethod
  def of(cls, module: Any) -> 'Format':
    """Returns the format that a module defines."""
    return cls(module.matches, module.load, module.save)
