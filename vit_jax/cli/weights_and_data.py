"""What a sweep with weights over a split is asked for by flags."""

import sys
from typing import Any

from absl import flags
from jax.sharding import Mesh

from vit_jax.config import loading, overrides
from vit_jax.config.completion import Config
from vit_jax.config.sections import build_section
from vit_jax.data.contract import Source
from vit_jax.errors import UserError
from vit_jax.weights import data, preprocessing
from vit_jax.weights.contract import Pretrained

PyTree = Any


def define_flags() -> None:
  """The flags that such commands share."""
  flags.DEFINE_string(
    'checkpoint', None, 'Workdir, checkpoint step directory or weight file.'
  )
  flags.DEFINE_string('config', None, 'A config, whose data is taken.')
  flags.DEFINE_string(
    'dataset', None, "TFDS name, or a source; default: the checkpoint's."
  )
  flags.DEFINE_string('split', None, "Split; default: a config's for training.")
  flags.DEFINE_string(
    'data_dir', None, 'The TFDS directory, or the path of another source.'
  )
  flags.DEFINE_string(
    'weights', 'params', 'Which weights: params, ema, or another name.'
  )
  preprocessing.define_flag()
  flags.DEFINE_integer('batch_size', 128, 'Images at once, on all devices.')
  flags.DEFINE_integer('part_examples', 8192, 'Images written at once.')
  flags.DEFINE_bool('json', False, 'Print one JSON object.')
  flags.DEFINE_multi_string(
    'overrides',
    overrides.take(sys.argv),
    'Set by --config.source.KEY=…, --config.reader.KEY=… and '
    '--config.preprocess.KEY=….',
  )


def sections(weights: Pretrained) -> dict[str, Any]:
  """How images are read and preprocessed, as the weights say."""
  return {
    'reader': data.reader_section(weights.about),
    'preprocess': {'name': 'transforms', **weights.about['preprocess']},
  }


def open_data(
  weights: Pretrained,
  *,
  config: str | None,
  dataset: str | None,
  split: str | None,
  data_dir: str | None,
  settings: list[str],
) -> tuple[Config, Source, str]:
  """The completed sections, the data, and its split.

  Args:
    weights: that know a source, and preprocessing.
    config: a config file whose data it is.
    dataset: TFDS name, or a source; by default the checkpoint's.
    split: of the data; by default what the config trains on.
    data_dir: the TFDS directory, or the path of another source.
    settings: '--config.source.KEY=value', reader and preprocess likewise.

  Raises:
    UserError: no such data, no split, or nothing in it.
  """
  about = weights.about
  if config is not None:
    whole = loading.load(config)
    about = {'source': whole.source.to_dict()}
    split = split or whole.train.split
  if split is None:
    raise UserError(
      '--split is missing: which split to take. Or give --config=FILE.py for '
      'what it trains on.'
    )
  source = data.source_section(about, dataset, data_dir)
  completed = overrides.apply(sections(weights) | {'source': source}, settings)
  opened = build_section(completed, 'source', split)
  if not len(opened):
    raise UserError(f'{opened.name} is empty: there is nothing to do.')
  return completed, opened, split


def open_params(weights: Pretrained, name: str, mesh: Mesh) -> PyTree:
  """Those weights of a checkpoint that are wanted.

  Raises:
    UserError: there are none of that name.
  """
  found = {
    ending.lstrip('_') or 'params': params
    for ending, params in weights.weights(mesh).items()
  }
  if name not in found:
    raise UserError(
      f'{weights.path} holds no weights {name!r}; it has {", ".join(found)}: '
      'give one of them as --weights.'
    )
  return found[name]
