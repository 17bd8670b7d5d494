"""Draws the first batches of a config: python -m vit_jax.preview --config=….

python -m vit_jax.preview --config=configs/l16_i21k.py --out=grid.png draws
training images after augmentation; --evaluator=val draws preprocessed images of
that evaluation.
"""

import logging
import os
import sys

import cv2
import jax
import numpy as np
from absl import flags
from jaxtyping import UInt8

from vit_jax.cli import process
from vit_jax.config import overrides
from vit_jax.config.schema import Config, build, build_section
from vit_jax.data.contract import require
from vit_jax.data.images import channels
from vit_jax.data.images.channels import Pixels
from vit_jax.data.pipeline import stream
from vit_jax.errors import UserError, check_choice, check_range
from vit_jax.training import data
from vit_jax.training.experiment import Experiment
from vit_jax.training.reporting import caption

log = logging.getLogger('vit_jax')
_LABEL_HEIGHT = 18  # height in pixels of a line of text above an image
_LETTER_WIDTH = 8  # width in pixels of the widest common letters
_MIN_SIDE = 128  # smaller images are enlarged to this many pixels


def define_flags() -> None:
  """Defines the flags of this command."""
  flags.DEFINE_string('out', 'grid.png', 'Image file to write.')
  flags.DEFINE_integer('images', 32, 'Number of images.')
  flags.DEFINE_string(
    'evaluator',
    None,
    'Name in config.evals; draws its images instead of training images.',
  )
  flags.DEFINE_integer(
    'start_step', 0, 'Number of updates before the first batch drawn.'
  )
  overrides.define_flag(sys.argv)


def run(config: Config, images: int, start_step: int) -> np.ndarray:
  """Draws augmented training images with their labels.

  Args:
    config: completed config.
    images: number of images.
    start_step: number of updates before the first batch to draw.

  Returns:
    The picture, uint8 `[height, width, 3]`, RGB.
  """
  experiment = Experiment.build(config, jax.devices())
  source = data.open_train(config)
  log.info(
    'training: %s, %s examples, %d classes, %.1f steps per epoch, %s steps',
    source.name,
    f'{len(source):,}',
    source.num_classes,
    len(source) / config.batch_size,
    f'{experiment.total_steps:,}',
  )
  require(experiment.augment.spec, 'image', 'label', who='preview')
  augment = jax.jit(experiment.setting.mix)
  key, step, tiles = experiment.key(), start_step, []
  with data.train_batches(experiment, source, start_step) as batches:
    while len(tiles) < images:
      batch = next(batches)
      mixed, targets = augment(batch, jax.random.fold_in(key, step))
      pixels = channels.pixels_of(np.asarray(mixed), batch['image'].dtype)
      for image, target in zip(pixels, np.asarray(targets), strict=True):
        label = np.asarray(target)
        tiles.append(_tile(image, label, source.class_names))
      step += 1
  return _grid(tiles[:images])


def run_evaluation(config: Config, name: str, images: int) -> np.ndarray:
  """Draws the first images of an evaluation with their labels.

  Args:
    config: completed config.
    name: name of the evaluator in `config.evals`.
    images: maximum number of images.

  Returns:
    The picture, uint8 `[height, width, 3]`, RGB.

  Raises:
    UserError: the evaluator does not exist, or no image of its split can be
      used.
  """
  check_choice('--evaluator', name, config.evals)
  experiment = Experiment.build(config, jax.devices())
  section = config.evals[name].to_dict()
  if section.get('source'):  # an evaluator with a source of its own
    source = build('source', section['source'], section['split'])
  else:
    names = data.open_source(config, config.train.split).class_names
    source = data.open_source(config, section['split'], names)
  log.info(
    'evaluation %s: %s, %s examples, %d classes',
    name,
    source.name,
    f'{len(source):,}',
    source.num_classes,
  )
  reader, mesh = build_section(config, 'reader'), experiment.mesh
  tiles: list[np.ndarray] = []
  with stream.eval_batches(
    source, experiment.preprocess, config.batch_size, mesh, reader=reader
  ) as batches:
    for batch in map(jax.device_get, batches):
      for row in np.flatnonzero(batch['mask']):
        label = np.asarray(batch['label'][row])
        tiles.append(_tile(batch['image'][row], label, source.class_names))
      if len(tiles) >= images:
        break
  if not tiles:
    raise UserError(f'{source.name} has no image that can be shown.')
  return _grid(tiles[:images])


def _tile(
  image: Pixels, target: np.ndarray, names: list[str]
) -> UInt8[np.ndarray, 'h w 3']:
  """Returns an image as RGB (see `channels.rgb`), with its label above."""
  pixels = channels.rgb(image)
  scale = max(1, -(-_MIN_SIDE // min(pixels.shape[:2])))
  pixels = pixels.repeat(scale, axis=0).repeat(scale, axis=1)
  width, font = pixels.shape[1], cv2.FONT_HERSHEY_SIMPLEX
  lines = caption(target, names, width // _LETTER_WIDTH)
  lines += [''] * (target.ndim + 1 - len(lines))  # all tiles have the same size
  bar = np.full((_LABEL_HEIGHT * len(lines), width, 3), 255, np.uint8)
  for number, line in enumerate(lines, 1):
    text = line.encode('ascii', 'replace').decode()
    position = (2, _LABEL_HEIGHT * number - 5)
    cv2.putText(bar, text, position, font, 0.4, (0, 0, 0), 1, cv2.LINE_AA)
  return np.concatenate([bar, pixels])


def _grid(tiles: list[np.ndarray]) -> np.ndarray:
  """Arranges tiles in an approximately square grid."""
  columns = max(1, round(len(tiles) ** 0.5))
  rows = -(-len(tiles) // columns)
  blank = np.full_like(tiles[0], 255)
  tiles = tiles + [blank] * (rows * columns - len(tiles))
  return np.concatenate(
    [
      np.concatenate(tiles[row * columns : (row + 1) * columns], axis=1)
      for row in range(rows)
    ]
  )


def _check_output(path: str) -> None:
  """Checks, before drawing, that the path can be written.

  Raises:
    UserError: the path does not end like an image, or has no directory.
  """
  folder = os.path.dirname(path) or '.'
  if not cv2.haveImageWriter(path) or not os.path.isdir(folder):
    raise UserError(
      f'--out={path} must end in .png or .jpg, in an existing directory.'
    )


def main(arguments: list[str]) -> None:
  """Draws images and writes the picture to --out."""
  process.refuse_arguments(arguments)
  values = flags.FLAGS
  check_range('--images', values.images, at_least=1)
  check_range('--start_step', values.start_step, at_least=0)
  _check_output(values.out)
  if values.evaluator:
    picture = run_evaluation(values.config, values.evaluator, values.images)
  else:
    picture = run(values.config, values.images, values.start_step)
  if not cv2.imwrite(values.out, cv2.cvtColor(picture, cv2.COLOR_RGB2BGR)):
    raise UserError(f'--out={values.out} cannot be written: give a .png path.')
  log.info('wrote %s, %dx%d pixels', values.out, *picture.shape[1::-1])


if __name__ == '__main__':
  process.run(main, define_flags)
