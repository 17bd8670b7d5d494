"""Weights and data of a command: their flags, and functions that open them.

A command has the flags that its class `Request` declares, and shared flags that
it names in `Request.define`. `open_weights` and `open_data` open the weights
and the data that a request specifies.
"""

import dataclasses
import glob
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from absl import flags
from jax.sharding import Mesh
from jaxtyping import Int

from vit_jax.cli import fields, process
from vit_jax.cli.fields import flag
from vit_jax.config import identity, loading, overrides, schema
from vit_jax.config.keys import MAX_BATCH_SIZE
from vit_jax.config.schema import SECTIONS, Config, Section, build_section
from vit_jax.data import filters
from vit_jax.data.augment import presets
from vit_jax.data.contract import Source
from vit_jax.data.pipeline import stream
from vit_jax.data.storage import class_folders
from vit_jax.data.storage.files import IMAGES
from vit_jax.errors import UserError, check_range
from vit_jax.evaluators.contract import Setting
from vit_jax.weights import pretrained, resizing
from vit_jax.weights.contract import Pretrained

log = logging.getLogger('vit_jax')
# Keys of the section `reader` that do not depend on the machine.
_READER_KEYS = ('on_bad_record', 'max_bad_share')
# Help of the flags that are not attributes of a `Request`; see `weights_path`.
_PATH_FLAGS = {
  'checkpoint': 'Workdir, checkpoint step directory or weight file.',
  'step': (
    'Checkpoint of a workdir: its number, or best for that of '
    'config.checkpoint.best; default: the newest.'
  ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """Weights and data that a command uses, and how.

  The attributes with a help text are flags, some of which a command has. A
  command may derive a class with further flags, all of which it has.

  Attributes:
    settings: overrides such as '--config.source.KEY=value', also for reader and
      preprocess.
  """

  settings: Sequence[str] = ()
  config: str | None = flag('Config whose data is used.')
  dataset: str | None = flag(
    'TFDS name, or a source (folder, tar, …); default: the data of the '
    'checkpoint.'
  )
  split: str | None = flag(
    'Split; default: that of the evaluator, or the training split of --config.'
  )
  data_dir: str | None = flag('TFDS directory, or the path of another source.')
  weights: str = flag(
    'Weights of the checkpoint: params, ema (their average), or another set '
    'that the objective keeps, for example teacher.',
    'params',
  )
  preprocess: str | None = flag(
    'Preprocessing of a family of weights: '
    f'{", ".join(presets.PRESETS)}; default: that of the weights. '
    '--config.preprocess.KEY=… overrides it.'
  )
  batch_size: int | None = flag(
    'Images per batch on all devices; default: 128, or fewer if memory is '
    'scarce.'
  )
  image_size: tuple[int, int] | None = flag(
    'Side of the images in pixels, or HEIGHT,WIDTH; positions are interpolated '
    'to another size than that of the weights, which is the default.'
  )

  def __post_init__(self):
    check_range(
      '--batch_size', self.batch_size, at_least=1, at_most=MAX_BATCH_SIZE
    )

  @classmethod
  def define(cls, *names: str) -> None:
    """Defines flags, with the defaults of the class.

    Args:
      *names: names of flags of the base class, checkpoint and step. All flags
        of a derived class are defined.
    """
    not_named = {field.name for field in dataclasses.fields(Request)} - {*names}
    for field in dataclasses.fields(cls):
      if field.metadata and field.name not in not_named:
        fields.define(field)
    for name in _PATH_FLAGS.keys() & names:
      flags.DEFINE_string(name, None, _PATH_FLAGS[name])

  @classmethod
  def define_data(cls, *names: str) -> None:
    """Defines the flags of commands that apply weights to a split.

    Args:
      *names: names of further flags, see `define`.
    """
    cls.define(
      'checkpoint', 'step', 'dataset', 'split', 'data_dir', 'batch_size', *names
    )
    process.define_distributed_flags()

  @classmethod
  def of_flags(cls, **more: Any) -> Self:
    """Returns the request that flags specify.

    Args:
      **more: values of attributes that are not those of the flags.
    """
    values = flags.FLAGS
    keys = [f.name for f in dataclasses.fields(cls) if f.name in values]
    from_flags = {key: getattr(values, key) for key in keys}
    if 'overrides' in values:
      from_flags['settings'] = values.overrides
    from_flags['image_size'] = image_size(values)
    return cls(**from_flags | more)


def define_inputs(sections: str) -> None:
  """Defines the flags for preprocessing, --config.KEY=… and --json.

  Args:
    sections: sections that --config.SECTION.KEY=… changes, for the help.
  """
  Request.define('image_size', 'preprocess')
  flags.DEFINE_bool('json', False, 'Print JSON objects.')
  flags.DEFINE_multi_string(
    'overrides',
    overrides.extract(sys.argv),
    f'Set by --config.SECTION.KEY=…, for the sections {sections}.',
  )


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
  return int(sides[0]), int(sides[-1])  # of a square, these are the same


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
    raise UserError(f'{checkpoint} has a step; remove --step={values.step}.')
  return f'{checkpoint}@{values.step}'


def image_paths(arguments: Sequence[str]) -> list[str]:
  """Returns the paths of all image files that arguments specify.

  Args:
    arguments: files, local directories, and local patterns.

  Raises:
    UserError: a directory contains no images, or a pattern matches no file.
  """
  found = []
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
    found += files
  return found


def open_weights(checkpoint: str, request: Request) -> Pretrained:
  """Loads the requested weights with their preprocessing.

  Raises:
    UserError: the weights do not exist, or the preset is unknown.
  """
  found = pretrained.find(checkpoint, request.weights, request.image_size)
  return with_preset(found, request.preprocess)


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
  own = source.description.preprocess
  kept = {key: own[key] for key in ('channels', 'bits') if key in own}
  section = preset.section(source.image_size) | kept
  changed = dataclasses.replace(source.description, preprocess=section)
  source = dataclasses.replace(source, description=changed)
  old, new = changed.statistics, preset.normalization
  if (old or presets.NONE) == new:
    return source
  if old is None:
    text = '%s expects pixels in [-1, 1]: the preset changes only the resizing'
    log.warning(text, source.path)
    return source
  return resizing.renormalized(source, *new)


def sections(weights: Pretrained) -> dict[str, Any]:
  """Returns the reader and preprocess sections that belong to the weights."""
  reader = weights.description.config.get('reader', {})
  return {
    'reader': {key: reader[key] for key in _READER_KEYS if key in reader},
    'preprocess': weights.description.preprocess_section,
  }


def source_section(own: Section, request: Request) -> dict[str, Any]:
  """Returns the config section of the requested data.

  Args:
    own: section of the data of the weights, which are used by default; {} if
      it is not known.
    request: the request, whose `dataset` and `data_dir` specify other data.

  Raises:
    UserError: the flags do not specify the data, or do not fit together.
  """
  dataset, data_dir = request.dataset, request.data_dir
  section = dict(own or {'name': 'tfds'})
  if dataset:
    # A name of TFDS is not a kind of source, and has no dot before its version.
    kinds = schema.names(SECTIONS['source'])
    is_kind = '.' in dataset.partition(':')[0] or dataset in kinds
    if is_kind and dataset != section['name']:
      section = {'name': dataset}
    if not is_kind and dataset != section.get('dataset'):
      section = {'name': 'tfds', 'dataset': dataset}
  if data_dir:
    keys = schema.config_keys(
      schema.resolve(SECTIONS['source'], section['name'])
    )
    path_key = next((key for key in ('data_dir', 'path') if key in keys), None)
    if path_key is None:
      raise UserError(
        f'--data_dir={data_dir} is not used by the source {section["name"]}; '
        f'its keys are {", ".join(keys)}.'
      )
    section[path_key] = data_dir
  if section['name'] == 'tfds' and not section.get('dataset'):
    raise UserError(
      'these weights do not name their data. Give --dataset=NAME of TFDS, or '
      '--dataset=folder and --data_dir=DIR.'
    )
  return section


class Data(NamedTuple):
  """Examples to which weights are applied.

  Attributes:
    config: config with the completed sections reader and preprocess, and of
      the source, unless the examples are image files.
    source: source of the examples.
    split: split of the source; '' for image files.
    left_out: indices of the examples that training with a config leaves out.
  """

  config: Config
  source: Source
  split: str = ''
  left_out: Int[np.ndarray, ' n'] = np.zeros(0, np.int64)


def open_data(weights: Pretrained, request: Request) -> Data:
  """Opens the data that a request specifies.

  Args:
    weights: weights, whose data, reader and preprocessing are the defaults.
    request: weights, data and batch sizes of the command.

  Raises:
    UserError: the data or the split does not exist, or is empty.
  """
  own, split, leave_out = weights.description.source, request.split, None
  if request.config is not None:
    config = loading.load(request.config)
    own = config.source.to_dict()
    split = split or config.train.split
    leave_out = config.train.leave_out
  if split is None:
    raise UserError(
      '--split is missing; give the split to use (train for a folder without '
      'splits), or --config=FILE.py to use its training split.'
    )
  source = source_section(own, request)
  completed = overrides.apply(
    sections(weights) | {'source': source}, [*request.settings]
  )
  completed = identity.absolute(completed)
  data = build_section(completed, 'source', split)
  if not len(data):
    raise UserError(f'{data.name} is empty; give another --split or --dataset.')
  # The list is of the config's data: other data may contain none of its files.
  left_out = filters.listed(data, leave_out, strict=False)
  return Data(completed, data, split, left_out)


def evaluation_setting(
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
  return Setting(
    open_source=open_source,
    transform=build_section(config, 'preprocess', weights.image_size),
    objective=weights.objective(),
    mesh=mesh,
    batch_size=-(-batch_size // mesh.size) * mesh.size,
    reader=build_section(config, 'reader'),
    preprocess=config.preprocess.to_dict(),
  )
