"""Preprocessing of images: that of the weights, or a preset."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from absl import flags

from vit_jax.arrays import host, tree
from vit_jax.config.completion import Config
from vit_jax.data.augment import presets
from vit_jax.weights.contract import Pretrained
from vit_jax.weights.formats import normalization

log = logging.getLogger('vit_jax')
PyTree = Any


def define_flag() -> None:
  """Defines --preprocess."""
  flags.DEFINE_string(
    'preprocess',
    None,
    'Preprocessing of a family of weights: '
    f'{", ".join(presets.PRESETS)}; default: that of the weights. '
    '--config.preprocess.KEY=… overrides it.',
  )


def by_preset(source: Pretrained, name: str | None) -> Pretrained:
  """Returns the same weights with the preprocessing of a preset.

  Mean and standard deviation change only for weights of another project:
  models trained here expect pixels in [-1, 1].

  Args:
    source: the weights.
    name: key of `presets.PRESETS`; None for the weights' own preprocessing.

  Raises:
    UserError: the preset is unknown.
  """
  if name is None:
    return source
  preset = presets.find(name)
  section = preset.section(source.image_size)
  source = dataclasses.replace(
    source, about={**source.about, 'preprocess': section}
  )
  known, wanted = mean_and_std(source), preset.normalization
  if known == wanted:
    return source
  if 'normalization' not in source.about:
    log.warning(
      '%s expects pixels in [-1, 1]; the preset %s only sets the resizing',
      source.path,
      name,
    )
    return source
  mean, std = wanted
  said = {'mean': list(mean), 'std': list(std)}
  return dataclasses.replace(
    source,
    about=source.about | {'normalization': said},
    load=_refolded(source.load, known, wanted),
    load_average=source.load_average
    and _refolded(source.load_average, known, wanted),
  )


def _refolded(
  load: Callable[[PyTree], PyTree], known: Any, wanted: Any
) -> Callable[[PyTree], PyTree]:
  """Loads parameters for pixels with another normalisation."""

  def load_and_fold(abstract: PyTree) -> PyTree:
    params = load(abstract)
    flat, places = tree.flatten(params), tree.flatten(abstract)
    keys = normalization.KERNEL, normalization.BIAS
    arrays = {key: np.asarray(flat[key]) for key in keys}
    arrays = normalization.unfold(arrays, *known)
    arrays = normalization.fold(arrays, *wanted)
    placed = {key: host.place(arrays[key], places[key]) for key in keys}
    return tree.unflatten(flat | placed)

  return load_and_fold


def mean_and_std(source: Pretrained) -> tuple[Any, Any]:
  """Returns mean and standard deviation per channel of pixels in [0, 1]."""
  said = source.about.get('normalization')
  if said is None:
    return presets.NONE
  return tuple(said['mean']), tuple(said['std'])


def described(source: Pretrained, config: Config) -> dict[str, Any]:
  """Describes everything that is done to an image before the model.

  Args:
    source: the weights.
    config: config with the completed section `preprocess`.
  """
  mean, std = mean_and_std(source)
  return {
    **config.preprocess.to_dict(),
    'image_size': list(source.image_size),
    'mean': list(mean),
    'std': list(std),
  }


def line(description: dict[str, Any]) -> str:
  """Formats a description as one line: 'resize=squash image_size=224,224 …'."""

  def text(value: Any) -> str:
    if isinstance(value, list | tuple):
      return ','.join(map(text, value))
    return f'{value:.6g}' if isinstance(value, float) else str(value)

  return ' '.join(f'{key}={text(value)}' for key, value in description.items())
