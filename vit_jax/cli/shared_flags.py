"""Flags that commands share, and their conversion: weights, data, images."""

import dataclasses
import glob
import logging
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags
from jax.sharding import Mesh

from vit_jax.config import schema
from vit_jax.config.schema import SECTIONS, Config, build_section
from vit_jax.data.augment import presets
from vit_jax.data.pipeline import stream
from vit_jax.data.storage import class_folders
from vit_jax.data.storage.files import IMAGES
from vit_jax.errors import UserError
from vit_jax.evaluators.contract import Setting
from vit_jax.weights import transfer
from vit_jax.weights.contract import Pretrained

log = logging.getLogger('vit_jax')
# (function that defines it, default, help) of each flag that several commands
# have.
FLAGS: dict[str, tuple[Callable[..., Any], Any, str]] = {
  'checkpoint': (
    flags.DEFINE_string,
    None,
    'Workdir, checkpoint step directory or weight file.',
  ),
  'step': (
    flags.DEFINE_string,
    None,
    'Checkpoint of a workdir: its number, or best for that of '
    'config.checkpoint.best; default: the newest.',
  ),
  'weights': (
    flags.DEFINE_string,
    'params',
    'Weights of the checkpoint: params, ema (their average), or another set '
    'that the objective keeps, for example teacher.',
  ),
  'dataset': (
    flags.DEFINE_string,
    None,
    'TFDS name, or a source (folder, tar, …); default: the data of the '
    'checkpoint.',
  ),
  'split': (
    flags.DEFINE_string,
    None,
    'Split; default: that of the evaluator, or the training split of --config.',
  ),
  'data_dir': (
    flags.DEFINE_string,
    None,
    'TFDS directory, or the path of another source.',
  ),
  'image_size': (
    flags.DEFINE_list,
    [],
    'Side of the images in pixels, or HEIGHT,WIDTH; positions are interpolated '
    'to another size than that of the weights, which is the default.',
  ),
  'preprocess': (
    flags.DEFINE_string,
    None,
    'Preprocessing of a family of weights: '
    f'{", ".join(presets.PRESETS)}; default: that of the weights. '
    '--config.preprocess.KEY=… overrides it.',
  ),
  'batch_size': (
    flags.DEFINE_integer,
    None,
    'Images per batch on all devices; default: 128, or fewer if memory is '
    'scarce.',
  ),
  'json': (flags.DEFINE_bool, False, 'Print JSON objects.'),
}
# Keys of the section `reader` that do not depend on the machine.
_READER_KEYS = ('on_bad_record', 'max_bad_share')


def source_section(
  about: dict[str, Any], dataset: str | None, data_dir: str | None
) -> dict[str, Any]:
  """Returns the config section of the data to evaluate on.

  Args:
    about: item `about` of the weights; by default, their data are used.
    dataset: --dataset, a TFDS name or a kind of source.
    data_dir: --data_dir, a directory or path of the data.

  Raises:
    UserError: the flags do not specify the data, or do not fit together.
  """
  section = dict(about.get('source', {'name': 'tfds'}))
  if dataset and _is_source(dataset):
    if dataset != section['name']:
      section = {'name': dataset}
  elif dataset and dataset != section.get('dataset'):
    section = {'name': 'tfds', 'dataset': dataset}
  if data_dir:
    keys = schema.config_keys(
      schema.resolve(SECTIONS['source'], section['name'])
    )
    path_key = next((key for key in ('data_dir', 'path') if key in keys), None)
    if path_key is None:
      raise UserError(
        f'--data_dir={data_dir} does not fit the source {section["name"]}; '
        f'give --config.source.KEY=…, with KEY one of {", ".join(keys)}.'
      )
    section[path_key] = data_dir
  if section['name'] == 'tfds' and not section.get('dataset'):
    raise UserError(
      'these weights do not contain the data to evaluate on. Give '
      '--dataset=NAME of TFDS, or --dataset=folder and --data_dir=DIR.'
    )
  return section


def _is_source(name: str) -> bool:
  """Returns whether a name is a kind of source, and not a TFDS data set."""
  return '.' in name or name in schema.names(SECTIONS['source'])


def reader_section(about: dict[str, Any]) -> dict[str, Any]:
  """Returns the settings for bad records of the run that wrote the weights."""
  reader = about.get('config', {}).get('reader', {})
  return {key: reader[key] for key in _READER_KEYS if key in reader}


def title(source: Any) -> str:
  """Returns a readable name of the data of a source section."""
  return source.get('dataset') or source.get('path') or source.name


def setting(
  weights: Pretrained,
  config: Config,
  open_source: Callable[[str], stream.Source],
  mesh: Mesh,
  batch_size: int,
) -> Setting:
  """Returns the `Setting` that applies a model to every example of a source.

  Args:
    weights: the model and its parameters.
    config: config with the sections preprocess and reader.
    open_source: function that opens a split.
    mesh: mesh of the devices.
    batch_size: images per batch; rounded up to a multiple of the number of
      devices.
  """
  objective = weights.objective()
  return Setting(
    open_source=open_source,
    transform=build_section(config, 'preprocess', weights.image_size),
    predict=objective.predict,
    num_classes=objective.num_classes,
    mesh=mesh,
    batch_size=-(-batch_size // mesh.size) * mesh.size,
    reader=build_section(config, 'reader'),
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
  own = source.about.get('preprocess', {})
  kept = {key: own[key] for key in ('channels', 'bits') if key in own}
  section = preset.section(source.image_size) | kept
  source = dataclasses.replace(
    source, about={**source.about, 'preprocess': section}
  )
  old, new = source.normalization, preset.normalization
  if (old or presets.NONE) == new:
    return source
  if old is None:
    log.warning(
      '%s expects pixels in [-1, 1], so the preset %s changes only the '
      'resizing',
      source.path,
      name,
    )
    return source
  return transfer.renormalized(source, *new)


def describe(source: Pretrained, config: Config) -> dict[str, Any]:
  """Returns all settings of the preprocessing of an image.

  Args:
    source: weights.
    config: config with the completed section `preprocess`.
  """
  mean, std = source.normalization or source.model().normalization
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


def define(*names: str) -> None:
  """Defines some of the flags in `FLAGS`."""
  for name in names:
    function, default, text = FLAGS[name]
    function(name, default, text)


def image_size(values: Any) -> tuple[int, int] | None:
  """Returns (height, width) of --image_size, pixels; None if it is not given.

  Raises:
    UserError: the flag does not contain one or two positive integers.
  """
  sides = values.image_size
  if not sides:
    return None
  if len(sides) > 2 or not all(
    re.fullmatch('[1-9][0-9]{0,5}', s) for s in sides
  ):
    raise UserError(
      f'--image_size is {",".join(sides)!r}; give the side of the images in '
      'pixels (--image_size=384) or HEIGHT,WIDTH (--image_size=256,192).'
    )
  return int(sides[0]), int(sides[-1])


def weights_path(values: Any, given: str | None = None) -> str:
  """Returns the path of the weights, with the step if --step is given.

  Args:
    values: parsed flags.
    given: path of the weights; by default --checkpoint.

  Raises:
    UserError: both the path and --step specify a step.
  """
  checkpoint = values.checkpoint if given is None else given
  if values.step is None:
    return checkpoint
  if '@' in checkpoint.rpartition('/')[2]:
    raise UserError(
      f'{checkpoint} already contains a step; remove --step={values.step}.'
    )
  return f'{checkpoint}@{values.step}'


def image_paths(arguments: Sequence[str]) -> list[str]:
  """Returns the paths of all image files that arguments specify.

  Args:
    arguments: files, local directories, and local patterns.

  Raises:
    UserError: a directory contains no images, or a pattern matches no file.
  """
  paths = []
  for argument in arguments:
    if os.path.isdir(argument):
      files = sorted(class_folders.images(argument))
    elif glob.has_magic(argument) and not os.path.exists(argument):
      files = sorted(glob.glob(argument, recursive=True))
    else:
      files = [argument]
    if not files:
      raise UserError(
        f'{argument} matches no image; give image files, a directory with '
        f'files that end in {", ".join(IMAGES)}, or a pattern.'
      )
    paths += files
  return paths
