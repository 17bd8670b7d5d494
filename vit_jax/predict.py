"""Predicts classes of images: python -m vit_jax.predict --checkpoint=P IMAGE...

Images are preprocessed as in the evaluation of the weights; --preprocess=mae
(or another preset) and --config.preprocess.KEY=… change this.
"""

import json
import logging
import sys
from collections.abc import Sequence

import jax
import numpy as np
from absl import flags

from vit_jax.arrays import sharding
from vit_jax.cli import preprocessing_flags, process, weights_flags
from vit_jax.config import overrides
from vit_jax.config.sections import build_section
from vit_jax.data.contract import Preprocess
from vit_jax.data.images.headers import DecodeError
from vit_jax.errors import UserError
from vit_jax.files import paths
from vit_jax.weights import pretrained

log = logging.getLogger('vit_jax')
_BATCH_SIZE = 32


def define_flags() -> None:
  """Defines the flags of this command."""
  weights_flags.define_flags()
  flags.DEFINE_integer('top', 5, 'Number of classes to print per image.')
  preprocessing_flags.define_flag()
  flags.DEFINE_bool('json', False, 'Print one JSON object per line.')
  flags.DEFINE_multi_string(
    'overrides', overrides.take(sys.argv), 'Set by --config.preprocess.KEY=….'
  )


def run(
  checkpoint: str,
  paths: list[str],
  top: int = 5,
  settings: Sequence[str] = (),
  preprocess: str | None = None,
  weights: str = 'params',
) -> list[list[tuple[str, float]]]:
  """Predicts the most likely classes of image files.

  Args:
    checkpoint: workdir, step directory or weights of any format.
    paths: image files.
    top: number of classes per image.
    settings: overrides such as '--config.preprocess.KEY=value'.
    preprocess: a preset; by default the preprocessing of the weights, which is
      logged.
    weights: which weights of the checkpoint, see `Pretrained.chosen`.

  Returns:
    For each file its (class name, softmax probability), most likely first.

  Raises:
    UserError: there is no such checkpoint, or a file is not an image.
  """
  found = pretrained.find(checkpoint, weights)
  source = preprocessing_flags.by_preset(found, preprocess)
  names = source.about['class_names']
  if not source.about['num_classes']:
    raise UserError(f'{checkpoint} has no head, so it cannot predict classes.')
  section = {'name': 'transforms', **source.about['preprocess']}
  config = overrides.apply({'preprocess': section}, list(settings))
  described = preprocessing_flags.described(source, config)
  log.info('preprocessing: %s', preprocessing_flags.line(described))
  transform = build_section(config, 'preprocess', source.image_size)
  images = [_read(path, transform) for path in paths]
  mesh = sharding.make_mesh(jax.local_devices()[:1])
  params = source.load(source.abstract_params(mesh))
  predict = jax.jit(source.objective().predict)
  results = []
  for start in range(0, len(images), _BATCH_SIZE):
    batch = np.zeros((_BATCH_SIZE, *images[0].shape), np.uint8)
    part = images[start : start + _BATCH_SIZE]
    batch[: len(part)] = part
    logits = predict(params, {'image': batch})['logits']
    shares = np.asarray(jax.nn.softmax(logits))[: len(part)]
    for row in shares:
      best = np.argsort(-row, kind='stable')[:top]
      named = [names[i] if i < len(names) else f'class {i}' for i in best]
      results.append(list(zip(named, row[best].tolist(), strict=True)))
  return results


def _read(path: str, transform: Preprocess) -> np.ndarray:
  try:
    return transform.pixels(paths.locate(path).read_bytes())
  except OSError as error:
    files = ', such as its *.jpg' if paths.locate(path).is_dir() else ''
    raise UserError(
      f'the image {path} cannot be read: {error}. Give image files{files}.'
      f'{paths.nearest(path)}'
    ) from error
  except DecodeError as error:
    raise UserError(
      f'{path} is not an image that can be decoded: {error}. Give JPEG or PNG '
      'files.'
    ) from error


def main(arguments: list[str]) -> None:
  """Prints the top classes of each image."""
  values = flags.FLAGS
  if not values.checkpoint or not arguments or values.top < 1:
    raise UserError(
      'usage: python -m vit_jax.predict --checkpoint=PATH [--top=5] [--json] '
      f'IMAGE...; got checkpoint {values.checkpoint!r}, {len(arguments)} '
      f'image(s), top {values.top}.'
    )
  results = run(
    weights_flags.path(values),
    arguments,
    values.top,
    values.overrides,
    preprocess=values.preprocess,
    weights=values.weights,
  )
  for path, classes in zip(arguments, results, strict=True):
    if values.json:
      top = [{'class': name, 'probability': p} for name, p in classes]
      print(json.dumps({'image': path, 'top': top}))
    else:
      print(path)
      for name, probability in classes:
        print(f'  {100 * probability:5.1f}%  {name}')


if __name__ == '__main__':
  process.run(main, define_flags)
