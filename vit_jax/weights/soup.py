"""Uniform averages of weights, known as model soups."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.arrays import sharding, tree
from vit_jax.errors import UserError
from vit_jax.weights import pretrained
from vit_jax.weights.contract import Pretrained

PyTree = Any


def average(sources: Sequence[Pretrained]) -> Pretrained:
  """Returns the mean of several weights, with the description of the first.

  The weights are read when the mean is loaded, one after another, and added in
  float32, so that two of them are in memory at a time.

  Args:
    sources: at least one description of weights.

  Raises:
    UserError: the weights differ in architecture, image size or classes. The
      message contains the first difference. The mean raises it when it is
      loaded if a sum is not finite.

  Reference: uniform soup, Wortsman et al., arXiv 2203.05482, Table 2.
  """
  first = sources[0]
  expected = _properties(first)
  for other in sources[1:]:
    actual = _properties(other)
    for key in {**expected, **actual}:
      if actual.get(key) != expected.get(key):
        raise UserError(
          f'{other.path} cannot be averaged with {first.path}: its {key} is '
          f'{actual.get(key)!r}, not {expected.get(key)!r}.'
        )

  paths = ', '.join(source.path for source in sources)

  def load(abstract: PyTree) -> PyTree:
    total = first.load(abstract)
    for other in sources[1:]:
      total = jax.tree.map(jnp.add, total, other.load(abstract))
    pretrained.check_finite(f'the float32 sum of {paths}', total)
    return jax.tree.map(lambda leaf: leaf / len(sources), total)

  return dataclasses.replace(
    first,
    path=f'the average of {paths}',
    load=load,
    load_average=None,
    load_extra=None,
  )


def _properties(source: Pretrained) -> dict[str, Any]:
  """Returns the properties that averaged weights must share, in this order."""
  about, model = source.about, source.model()
  mesh = sharding.make_mesh(jax.local_devices()[:1])
  params = tree.flatten(source.abstract_params(mesh))
  names = enumerate(about.get('class_names', ()))
  return {
    'model.name': about['model'].get('name', 'vit'),
    **{f'model.{key}': value for key, value in model.architecture.items()},
    'mean and std of pixels': model.normalization,
    'num_classes': about['num_classes'],
    'image_size': source.image_size,
    **{f'name of class {i}': name for i, name in names},
    **{f'shape of {path}': leaf.shape for path, leaf in params.items()},
  }
