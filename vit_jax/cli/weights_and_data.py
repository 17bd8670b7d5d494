"""Defines and reads the flags for weights, data and batch sizes."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from absl import flags
from jaxtyping import Int

from vit_jax.cli import (
  batches,
  data_flags,
  preprocessing_flags,
  process,
  weights_flags,
)
from vit_jax.config import loading, overrides
from vit_jax.config.completion import MAX_BATCH_SIZE, Config
from vit_jax.config.sections import build_section
from vit_jax.data import exclusion
from vit_jax.data.contract import Source
from vit_jax.errors import UserError, check_range
from vit_jax.processes import runtime
from vit_jax.weights import pretrained
from vit_jax.weights.contract import Pretrained


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """Weights, data and batch sizes of a command.

  Attributes:
    config: path of a config file whose data are used.
    dataset: TFDS name or kind of source; by default that of the checkpoint.
    split: split of the data; by default the training split of `config`.
    data_dir: TFDS directory, or the path of another source.
    weights: set of weights of the checkpoint, see `Pretrained.chosen`.
    preprocess: name of a preset; by default the preprocessing of the weights.
    batch_size: images per batch on all devices; by default 128, or fewer if
      these do not fit into memory.
    image_size: (height, width) of the images, pixels; by default that of the
      weights.
    part_examples: examples per written part; rounded up to whole batches.
    settings: overrides such as '--config.source.KEY=value', also for reader and
      preprocess.
  """

  config: str | None = None
  dataset: str | None = None
  split: str | None = None
  data_dir: str | None = None
  weights: str = 'params'
  preprocess: str | None = None
  batch_size: int | None = None
  image_size: tuple[int, int] | None = None
  part_examples: int = 8192
  settings: Sequence[str] = ()

  def __post_init__(self):
    for key in ('batch_size', 'part_examples'):
      value = getattr(self, key)
      check_range(f'--{key}', value, at_least=1, at_most=MAX_BATCH_SIZE)

  @classmethod
  def of_flags(cls, **more: Any) -> Self:
    """Returns the request that flags specify.

    Args:
      **more: values of attributes that are not those of the flags.
    """
    values = flags.FLAGS
    keys = [f.name for f in dataclasses.fields(cls) if f.name in values]
    from_flags = {key: getattr(values, key) for key in keys}
    from_flags['image_size'] = weights_flags.image_size(values)
    return cls(**from_flags | more, settings=values.overrides)


def define_flags(endings: str) -> None:
  """Defines the flags that features and pseudo_label share.

  Args:
    endings: allowed endings of --out, for its help.
  """
  weights_flags.define_flags()
  flags.DEFINE_string('config', None, 'Config whose data is used.')
  flags.DEFINE_string(
    'dataset',
    None,
    'TFDS name or kind of source; default: that of the checkpoint.',
  )
  flags.DEFINE_string(
    'split', None, 'Split; default: the training split of --config.'
  )
  flags.DEFINE_string(
    'data_dir', None, 'TFDS directory, or the path of another source.'
  )
  weights_flags.define_image_size()
  preprocessing_flags.define_flag()
  batches.define_flag()
  flags.DEFINE_integer('part_examples', 8192, 'Images per written part.')
  flags.DEFINE_string('out', None, f'Path of the result: {endings}.')
  flags.DEFINE_bool('json', False, 'Print one JSON object.')
  flags.DEFINE_multi_string(
    'overrides',
    overrides.extract(sys.argv),
    'Set by --config.source.KEY=…, --config.reader.KEY=… and '
    '--config.preprocess.KEY=….',
  )
  process.define_distributed_flags()


def sections(weights: Pretrained) -> dict[str, Any]:
  """Returns the reader and preprocess sections that belong to the weights."""
  return {
    'reader': data_flags.reader_section(weights.about),
    'preprocess': {'name': 'transforms', **weights.about['preprocess']},
  }


def open_data(
  weights: Pretrained, request: Request
) -> tuple[Config, Source, str, Int[np.ndarray, ' n']]:
  """Opens the data that a request specifies.

  Args:
    weights: weights, whose data, reader and preprocessing are the defaults.
    request: weights, data and batch sizes of the command.

  Returns:
    A config of the completed sections, the source, its split, and the indices
    of the examples that training with `request.config` leaves out.

  Raises:
    UserError: the data or the split does not exist, or is empty.
  """
  about, split, leave_out = weights.about, request.split, None
  if request.config is not None:
    config = loading.load(request.config)
    about = {'source': config.source.to_dict()}
    split = split or config.train.split
    leave_out = config.train.leave_out
  if split is None:
    raise UserError(
      '--split is missing; give the split to use (train for a folder without '
      'splits), or --config=FILE.py to use its training split.'
    )
  source = data_flags.source_section(about, request.dataset, request.data_dir)
  completed = overrides.apply(
    sections(weights) | {'source': source}, [*request.settings]
  )
  data = build_section(completed, 'source', split)
  if not len(data):
    raise UserError(f'{data.name} is empty; give another --split or --dataset.')
  left_out = exclusion.listed(data, leave_out, strict=False)
  return completed, data, split, left_out


def open_weights(checkpoint: str, request: Request) -> Pretrained:
  """Loads the requested weights with their preprocessing.

  Raises:
    UserError: the weights do not exist, or the preset is unknown.
  """
  found = pretrained.find(checkpoint, request.weights, request.image_size)
  return preprocessing_flags.with_preset(found, request.preprocess)


def print_result(out: str, result: dict[str, Any], keys: Sequence[str]) -> None:
  """Prints the description of a result, on the main process only.

  Args:
    out: path of the result.
    result: description of the result.
    keys: keys of the description that are printed without --json.
  """
  if not runtime.is_main():
    return
  result = {'out': out, **result, 'classes': len(result['class_names'])}
  del result['class_names']
  if flags.FLAGS.json:
    print(json.dumps(result))
    return
  for key in ('out', 'checkpoint', 'data', *keys, 'classes'):
    print(f'{key}: {result[key]}')
  print(f'preprocess: {preprocessing_flags.line(result["preprocess"])}')
