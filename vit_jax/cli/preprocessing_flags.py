"""Selects the preprocessing of images: that of the weights, or a preset."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from absl import flags

from vit_jax.arrays import host, tree
from vit_jax.config.completion import Config
from vit_jax.data.augment import presets
from vit_jax.weights import patch_embedding
from vit_jax.weights.contract import Pretrained

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


def with_preset(source: Pretrained, name: str | None) -> Pretrained:
  """Returns the same weights with the preprocessing of a preset.

  Mean and standard deviation change only for weights of another project,
  because models trained by this program expect pixels in [-1, 1].

  Args:
    source: weights.
    name: key of `presets.PRESETS`; None for the preprocessing of the weights.

  Raises:
    UserError: the preset is unknown.
  """
  if name is None:
    return source
  preset = presets.find(name)
  # A preset determines neither the channels nor the bits of the images.
  kind = {
    key: value
    for key, value in source.about.get('preprocess', {}).items()
    if key in ('channels', 'bits')
  }
  section = preset.section(source.image_size) | kind
  source = dataclasses.replace(
    source, about={**source.about, 'preprocess': section}
  )
  old, new = mean_and_std(source), preset.normalization
  if old == new:
    return source
  if 'normalization' not in source.about:
    log.warning(
      '%s expects pixels in [-1, 1], so the preset %s changes only the '
      'resizing',
      source.path,
      name,
    )
    return source
  mean, std = new
  section = {'mean': list(mean), 'std': list(std)}
  return dataclasses.replace(
    source,
    about=source.about | {'normalization': section},
    load=_renormalize(source.load, old, new),
    load_average=source.load_average
    and _renormalize(source.load_average, old, new),
  )


def _renormalize(
  load: Callable[[PyTree], PyTree], old: Any, new: Any
) -> Callable[[PyTree], PyTree]:
  """Changes the normalization that is folded into the patch embedding.

  Args:
    load: function that loads parameters.
    old: mean and standard deviation that are folded into these parameters.
    new: mean and standard deviation to fold instead.

  Returns:
    A function that loads the changed parameters.
  """

  def load_and_fold(abstract: PyTree) -> PyTree:
    params = load(abstract)
    flat, targets = tree.flatten(params), tree.flatten(abstract)
    keys = patch_embedding.KERNEL, patch_embedding.BIAS
    arrays = {key: np.asarray(flat[key]) for key in keys}
    arrays = patch_embedding.converted(arrays, presets.NONE, old)
    arrays = patch_embedding.converted(arrays, new)
    placed = {key: host.place(arrays[key], targets[key]) for key in keys}
    return tree.unflatten(flat | placed)

  return load_and_fold


def mean_and_std(source: Pretrained) -> tuple[Any, Any]:
  """Returns mean and standard deviation per channel of pixels in [0, 1]."""
  section = source.about.get('normalization')
  if section is None:
    return presets.NONE
  return tuple(section['mean']), tuple(section['std'])


def describe(source: Pretrained, config: Config) -> dict[str, Any]:
  """Returns all settings of the preprocessing of an image.

  Args:
    source: weights.
    config: config with the completed section `preprocess`.
  """
  mean, std = mean_and_std(source)
  if 'normalization' not in source.about:
    mean, std = source.model().normalization
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
