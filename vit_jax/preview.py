"""Draws the first batches of a config: python -m vit_jax.preview --config=….

python -m vit_jax.preview --config=configs/l16_i21k.py --out=grid.png draws
training images after augmentation.
"""

import logging
import os
import sys
import textwrap

import jax
import numpy as np
from absl import flags
from jaxtyping import UInt8

from vit_jax.analysis import gallery
from vit_jax.cli import process
from vit_jax.config import overrides
from vit_jax.config.schema import Config
from vit_jax.errors import UserError
from vit_jax.training import data, reporting
from vit_jax.training.experiment import Experiment

log = logging.getLogger('vit_jax')
_DPI = 100
_MIN_SIDE = 1.3  # smaller images are enlarged to this many inches
_LETTERS_PER_INCH = 15
# Images `[y, x, 3]`, RGB, with the lines of their captions.
Pictures = list[tuple[UInt8[np.ndarray, 'y x 3'], list[str]]]


def define_flags() -> None:
  """Defines the flags of this command."""
  flags.DEFINE_string('out', 'grid.png', 'Image file to write.')
  flags.DEFINE_integer('images', 32, 'Number of images.', 1)
  flags.DEFINE_integer(
    'start_step', 0, 'Number of updates before the first batch drawn.', 0
  )
  overrides.define_flag(sys.argv)


def run(config: Config, images: int, start_step: int) -> Pictures:
  """Returns augmented training images with their labels.

  Args:
    config: completed config.
    images: number of images.
    start_step: number of updates before the first batch to draw.
  """
  experiment = Experiment.build(config, jax.devices())
  source = data.open_train(experiment)
  log.info(
    '%s, %d examples, %d classes', source.name, len(source), source.num_classes
  )
  step, shown = start_step, []
  with data.train_batches(experiment, source, start_step) as batches:
    while len(shown) < images:
      shown += reporting.pictures(
        experiment, next(batches), step, experiment.mesh, source.class_names
      )
      step += 1
  return shown[:images]


def draw(pictures: Pictures, path: str) -> None:
  """Draws pictures in an approximately square grid, and writes a file."""
  count = max(1, round(len(pictures) ** 0.5))
  pixels = [each for each, _ in pictures]
  height, width, _ = pixels[0].shape
  side = width * max(1 / _DPI, _MIN_SIDE / min(height, width))  # inches
  captions = [
    '\n'.join(
      textwrap.fill(line, int(_LETTERS_PER_INCH * side)) for line in lines
    )
    for _, lines in pictures
  ]
  # Rows are filled one after another, so a column has every count-th picture.
  columns = [
    gallery.Column('', pixels[i::count], captions[i::count])
    for i in range(count)
  ]
  # All rows are on one page, so there is one figure.
  [figure] = gallery.grid('', columns, side, len(pictures))
  figure.savefig(path, dpi=_DPI)


def main(arguments: list[str]) -> None:
  """Draws images and writes the picture to --out."""
  process.refuse_arguments(arguments)
  values = flags.FLAGS
  folder, ending = os.path.dirname(values.out), values.out.lower()[-4:]
  if not os.path.isdir(folder or '.') or ending not in ('.png', '.jpg'):
    raise UserError(
      f'--out is {values.out!r}; give a path in an existing directory, which '
      'ends in .png or .jpg.'
    )
  shown = run(values.config, values.images, values.start_step)
  draw(shown, values.out)
  log.info('wrote %s, %d images', values.out, len(shown))


if __name__ == '__main__':
  process.run(main, define_flags)
