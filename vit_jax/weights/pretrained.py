"""Trained weights from anywhere: a workdir, a step directory, an `.npz`."""

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh

from vit_jax import checkpoint
from vit_jax.arrays import sharding, tree
from vit_jax.config import plugins
from vit_jax.config.completion import SECTIONS
from vit_jax.data.augment.transforms import EvalTransform, square
from vit_jax.errors import UserError
from vit_jax.models import vit
from vit_jax.models.layers import positions
from vit_jax.objectives.contract import Setting
from vit_jax.weights.formats import npz

log = logging.getLogger('vit_jax')
PyTree = Any
_FRESH = ('head/', 'pre_logits/')  # what fine-tuning does not take over


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
    section = dict(self.about['model'], **changes)
    section.setdefault('name', 'vit')
    constructor = plugins.resolve(SECTIONS['model'], section['name'])
    return plugins.build(constructor, section, self.about['num_classes'])

  def objective(self, **changes: Any) -> Any:
    """The objective with its model, for `predict`."""
    section = self.about['objective']
    constructor = plugins.resolve(SECTIONS['objective'], section['name'])
    setting = Setting(self.model(**changes), self.image_size)
    return plugins.build(constructor, section, setting)

  def preprocess(self) -> EvalTransform:
    """What evaluation does to images."""
    return plugins.build(
      EvalTransform, self.about['preprocess'], self.image_size
    )

  def abstract_params(self, mesh: Mesh) -> PyTree:
    """Shapes and shardings of the parameters on a mesh."""
    objective = self.objective()
    batch = {'image': jnp.zeros((1, *self.image_size, 3), jnp.uint8)}
    params, _ = jax.eval_shape(lambda: objective.init(jax.random.key(0), batch))
    return sharding.with_shardings(params, mesh, objective.sharding_rules)


def find(path: str) -> Pretrained:
  """Looks at weights without loading them.

  Raises:
    UserError: there is nothing there that can be loaded.
  """
  if path.endswith('.npz'):
    return _checked(_from_npz(path))
  if epath.Path(path).expanduser().is_file():
    raise UserError(
      f'{path} is a file, and of files only official .npz are read: give one, '
      'a workdir or a checkpoint step directory.'
    )
  step_dir = checkpoint.step_directory(path)
  about = checkpoint.load_about(step_dir)
  if about.get('format') not in checkpoint.READABLE:
    raise UserError(
      f'{step_dir} has the format {about.get("format")!r}, and this version '
      f'reads {checkpoint.READABLE}: use the version of vit_jax that wrote it.'
    )
  log.info('weights from %s', step_dir)
  return _checked(
    Pretrained(
      str(step_dir),
      about,
      functools.partial(checkpoint.load_params, step_dir),
      functools.partial(checkpoint.load_average, step_dir),
    )
  )


def _checked(source: Pretrained) -> Pretrained:
  """The same, refusing to load weights that are not finite numbers."""

  def checked(load: Callable[[PyTree], Any]) -> Callable[[PyTree], Any]:
    def load_and_check(abstract: PyTree) -> Any:
      params = load(abstract)
      if params is not None:
        _check_finite(source.path, params)
      return params

    return load_and_check

  return dataclasses.replace(
    source, load=checked(source.load), load_average=checked(source.load_average)
  )


def _check_finite(path: str, params: PyTree) -> None:
  """Raises UserError for NaN and infinities, naming their leaves."""
  flat = tree.flatten(params)
  mesh = next(iter(flat.values())).sharding.mesh
  count = jax.jit(  # on the devices, where other processes have their part
    lambda flat: {k: jnp.sum(~jnp.isfinite(leaf)) for k, leaf in flat.items()},
    out_shardings=sharding.replicated(mesh),
  )
  bad = {key: n for key, n in jax.device_get(count(flat)).items() if n}
  if bad:
    shown = [f'{key} ({n} of {flat[key].size})' for key, n in bad.items()]
    more = f' and {len(bad) - 3} more leaves' if len(bad) > 3 else ''
    raise UserError(
      f'{path} holds weights that are NaN or infinite: '
      f'{", ".join(shown[:3])}{more}. Take another step or file.'
    )


def _from_npz(path: str) -> Pretrained:
  weights = npz.load(path)
  rows, columns = positions.square_grid(weights.num_patches)
  patch = weights.sizes['patch_size']

  def load(abstract: PyTree) -> PyTree:
    wanted = {k: v.shape for k, v in tree.flatten(abstract).items()}
    came = {k: v.shape for k, v in tree.flatten(weights.params).items()}
    checkpoint.check_shapes(path, came, wanted)
    return jax.tree.map(place, weights.params, abstract)

  about = {
    'format': checkpoint.FORMAT,
    'model': {'name': 'vit', 'dtype': 'float32', **weights.sizes},
    'objective': {'name': 'supervised'},
    'num_classes': weights.num_classes,
    'image_size': [rows * patch, columns * patch],
    'preprocess': {},
    'class_names': [f'class {i}' for i in range(weights.num_classes)],
  }
  return Pretrained(path, about, load, lambda abstract: None)


def place(array: np.ndarray, leaf: jax.ShapeDtypeStruct) -> jax.Array:
  """Puts a host array (the same on every process) where a leaf lives."""
  cast = np.asarray(array, leaf.dtype)
  return jax.make_array_from_callback(
    leaf.shape, leaf.sharding, lambda index: cast[index]
  )


def to_host(array: jax.Array, mesh: Mesh) -> np.ndarray:
  """The whole of a global array, on every process."""
  gather = jax.jit(lambda x: x, out_shardings=sharding.replicated(mesh))
  return np.asarray(gather(array))


def resize_positions(
  params: PyTree,
  old_grid: tuple[int, int],
  new_grid: tuple[int, int],
  method: str,
  mesh: Mesh,
) -> PyTree:
  """Interpolates `position/embedding`; says which way, and both grids."""
  if tuple(old_grid) == tuple(new_grid):
    return params
  log.info(
    'position embedding interpolated (%s) from %dx%d to %dx%d patches',
    method,
    *old_grid,
    *new_grid,
  )
  old = to_host(params['position']['embedding'], mesh)
  new = positions.resize(old, old_grid, new_grid, method)
  shape = jax.eval_shape(lambda: jnp.asarray(new))
  leaf = sharding.with_shardings({'position': {'embedding': shape}}, mesh, ())
  return params | jax.tree.map(place, {'position': {'embedding': new}}, leaf)


def transfer(source: Pretrained, experiment: Any, method: str) -> PyTree:
  """Parameters for fine-tuning: the source's body, a fresh head.

  Args:
    source: of the weights.
    experiment: of the fine-tuning; its pre-logits and head are initialised.
    method: of resizing the position embedding.

  Raises:
    UserError: the body does not fit the experiment's model.
  """
  mesh = experiment.mesh
  params = source.load(source.abstract_params(mesh))
  old_grid = source.model().grid(source.image_size)
  new_grid = experiment.model.grid(experiment.image_size)
  params = resize_positions(params, old_grid, new_grid, method, mesh)
  wanted = tree.flatten(experiment.abstract_state().params)
  body = {
    key: leaf
    for key, leaf in tree.flatten(params).items()
    if not key.startswith(_FRESH)
  }
  fresh_keys = [key for key in wanted if key.startswith(_FRESH)]

  def fresh(key: jax.Array) -> dict[str, jax.Array]:
    objective = experiment.trainer.objective
    init = objective.init(key, experiment.abstract_batch())[0]
    return {
      key: leaf for key, leaf in tree.flatten(init).items() if key in fresh_keys
    }

  places = {key: wanted[key].sharding for key in fresh_keys}
  flat = body | jax.jit(fresh, out_shardings=places)(experiment.key())
  checkpoint.check_shapes(
    source.path,
    {key: leaf.shape for key, leaf in flat.items()},
    {key: leaf.shape for key, leaf in wanted.items()},
  )
  log.info(
    'weights taken over: %s; fresh: %s',
    f'{tree.size(body):,}',
    ', '.join(fresh_keys),
  )
  return tree.unflatten(flat)


def load_pretrained(
  path: str,
  *,
  image_size: int | tuple[int, ...] | None = None,
  gelu: str | None = None,
  dtype: str = 'float32',
  remainder: str | None = None,
  position_resize: str = 'aligned',
) -> tuple[vit.ViT, PyTree]:
  """Loads a model and its parameters; the architecture follows from the file.

  >>> model, params = load_pretrained('B_16.npz', image_size=384)
  >>> logits = model.apply({'params': params}, images)  # in [-1, 1], NHWC

  Args:
    path: an official .npz, a workdir or a checkpoint step directory.
    image_size: pixels, one number or (height, width); by default what the
      weights were made for. Position embeddings are interpolated to it.
    gelu: 'tanh' (default for .npz) or 'exact'.
    dtype: of computation, 'float32' or 'bfloat16'.
    remainder: 'error' or 'drop', see `models.vit.Model`.
    position_resize: 'aligned' or 'bicubic', see `positions.resize`.

  Returns:
    The Flax module and its parameters (float32).

  Raises:
    UserError: the file cannot be loaded, or the size does not fit the patch.
  """
  source = find(path)
  changes: dict[str, Any] = {'dtype': dtype}
  changes |= {'gelu': gelu} if gelu else {}
  changes |= {'remainder': remainder} if remainder else {}
  model = source.model(**changes)
  mesh = sharding.make_mesh(jax.local_devices()[:1])
  params = source.load(source.abstract_params(mesh))
  if image_size is not None:
    as_tuple = (image_size,) if isinstance(image_size, int) else image_size
    params = resize_positions(
      params,
      source.model().grid(source.image_size),
      model.grid(square(as_tuple)),
      position_resize,
      mesh,
    )
  return model, params
