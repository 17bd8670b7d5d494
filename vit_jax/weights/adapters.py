"""Opens LoRA together with the frozen weights that it was trained on."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from vit_jax.arrays import checksum, tree
from vit_jax.errors import UserError
from vit_jax.models.contract import Model, Size
from vit_jax.objectives.contract import Frozen
from vit_jax.weights import transfer
from vit_jax.weights.contract import Pretrained

PyTree = Any
Find = Callable[[str, str], Pretrained]  # `pretrained.find`


def base(find: Find, config: Any, model: Model, image_size: Size) -> Frozen:
  """Returns the weights that a run starts from, as a frozen model.

  They are the parameters that fine-tuning takes from `init_from`.

  Args:
    find: function from a path and the name of a set of weights to weights.
    config: completed config, or a dict with its values.
    model: model of the run.
    image_size: (height, width) of the images, pixels.
  """

  def load(mesh: Mesh) -> PyTree:
    if not config['init_from']:
      raise UserError(
        'lora.rank is set, but config.init_from is not: set '
        '--config.init_from=PATH, the weights that stay frozen.'
      )
    try:
      source = find(config['init_from'], config['init_weights'])
    except UserError as error:
      raise UserError(
        f'LoRA needs the weights that it was trained on, config.init_from='
        f'{config["init_from"]}: {error} Put them back at this path.'
      ) from error
    target = transfer.Base(model, image_size, mesh)
    taken = transfer.body(source, target, config['position_resize'])
    return tree.unflatten(taken)

  return Frozen(model, image_size, load, without=model.fresh)


def unmerged(source: Pretrained, find: Find) -> Pretrained:
  """Returns the weights of a run with LoRA as they are, and others unchanged.

  The description of the former has `frozen`.

  Args:
    source: weights of any kind.
    find: see `base`.
  """
  config = source.description.config
  if not config.get('lora', {}).get('rank'):
    return source
  frozen = base(find, config, source.model(), source.image_size)
  description = dataclasses.replace(source.description, frozen=frozen)
  return dataclasses.replace(source, description=description)


def merged(source: Pretrained) -> Pretrained:
  """Returns a model without LoRA; weights are merged when they are loaded.

  Loading raises UserError if LoRA was trained on other frozen weights.

  Args:
    source: result of `unmerged`.
  """
  adapter, base_model = source.description, source.description.frozen
  if base_model is None:
    return source
  section = dict(adapter.config['lora'], rank=0)
  description = dataclasses.replace(
    adapter, config=dict(adapter.config, lora=section), frozen=None
  )

  def load(
    load_trained: Callable[[PyTree], PyTree], abstract: PyTree
  ) -> PyTree:
    mesh = jax.tree.leaves(abstract)[0].sharding.mesh
    frozen = base_model.load(mesh)
    # The record of the run contains a checksum of the weights it started from.
    expected = adapter.further['record']['frozen']['base']
    if checksum.digest(frozen) != expected:
      raise UserError(
        f'{source.path} contains LoRA for the weights of '
        f'{adapter.config["init_from"]}, which have changed since (checksum '
        f'{expected}): restore them at this path.'
      )
    trained = load_trained(source.abstract_params(mesh))
    with jax.set_mesh(mesh):
      whole = adapter.built_objective.whole(trained, {'base': frozen})
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.device_put(whole, shardings)

  average = source.load_average
  return dataclasses.replace(
    source,
    description=description,
    load=functools.partial(load, source.load),
    load_average=average and functools.partial(load, average),
  )
