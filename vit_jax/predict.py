"""Predicts classes of images: python -m vit_jax.predict --checkpoint=P IMAGE...

IMAGE is a file, a directory, whose images are found at any depth, or a pattern
such as 'photos/*.jpg'. --json prints one JSON object per image, --csv one row
per class. A file that cannot be decoded is reported, and the others are
predicted; the exit code is then 2.

The probabilities are a softmax over the classes, or the sigmoid of each class
if the model was trained with it. For a model of numbers (the objective
regression), all its numbers are printed. --text='a photo of a cat,a photo of a
dog' compares the images with texts instead, by weights with a text tower.

With the weights of a segmentation (objective `segment`), the classes of pixels
are written as PNG masks of the size of the images into --out=DIR.

Images are preprocessed as in the evaluation of the weights; --preprocess=mae
(or another preset) and --config.preprocess.KEY=… change this.
"""

import concurrent.futures
import csv
import dataclasses
import functools
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags

from vit_jax.arrays import sharding
from vit_jax.cli import inputs, mask_files, process, results
from vit_jax.cli.fields import flag
from vit_jax.config import overrides
from vit_jax.config.schema import build_section
from vit_jax.data.storage import files
from vit_jax.errors import UserError
from vit_jax.evaluators.batch_size import largest_batch_size
from vit_jax.objectives import contrastive, losses

log = logging.getLogger('vit_jax')
_BATCH_SIZE = 32


class Prediction(NamedTuple):
  """The most likely classes, or the numbers, of one image.

  Attributes:
    image: path of the image.
    top: (class name, probability), most likely first; or (name, number).
    error: '' or the reason why the image cannot be used, which completes the
      sentence '{image} …'.
    unit: name of the values in `top`, 'probability' or 'number'.
  """

  image: str
  top: list[tuple[str, float]]
  error: str = ''
  unit: str = 'probability'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request(inputs.Request):
  """Weights and data of the command `predict`."""

  top: int = flag('Number of classes to print per image.', 5)


def define_flags() -> None:
  """Defines the flags of this command."""
  Request.define('checkpoint', 'step', 'weights')
  inputs.define_inputs('preprocess')
  flags.DEFINE_string('out', None, 'Directory for masks of segmentations.')
  flags.DEFINE_bool('csv', False, 'Print rows of image, class, probability.')
  flags.DEFINE_list('text', [], 'Texts in place of classes, between commas.')


def run(
  checkpoint: str,
  images: Sequence[str],
  request: Request,
  texts: Sequence[str] = (),
) -> Iterator[Prediction]:
  """Predicts the most likely classes of image files.

  Args:
    checkpoint: workdir, step directory or weights of any format.
    images: image files.
    request: weights and preprocessing.
    texts: texts to compare the images with, in place of classes.

  Yields:
    The prediction for each file, in order.

  Raises:
    UserError: the checkpoint does not exist, or a setting is invalid.
  """
  source = inputs.open_weights(checkpoint, request)
  objective = source.objective()
  names = [*texts] or [*source.description.class_names]
  if 'classes' in objective.results:
    raise UserError(
      f'{checkpoint} has classes of pixels: give --out=DIR for their masks.'
    )
  if not (objective.num_classes or texts):
    raise UserError(
      f'{checkpoint} has no head, so it cannot predict classes; with a text '
      "tower, give --text='a photo of a cat,a photo of a dog'."
    )
  preprocess = source.description.preprocess_section
  config = overrides.apply({'preprocess': preprocess}, [*request.settings])
  described = results.describe(source, config)
  log.info('preprocessing: %s', results.line(described))
  transform = build_section(config, 'preprocess', source.image_size)
  mesh = sharding.make_mesh(jax.local_devices()[:1])
  params = source.load_weights(mesh)
  batch_size = largest_batch_size(
    source, mesh, _BATCH_SIZE, examples=len(images)
  )
  predict = jax.jit(objective.predict, static_argnames='want')
  text_embeddings = {}
  if texts:
    tokens = contrastive.tokens_of(objective, transform, texts)
    text_embeddings = predict(params, {'tokens': tokens}, want=('text',))
  probabilities_of = losses.PROBABILITIES[objective.cross_entropy]
  unit = 'number' if objective.cross_entropy == 'squared' else 'probability'

  def top(outputs: np.ndarray) -> list[tuple[str, float]]:
    """Returns the names and values of the classes to print for one image."""
    chosen = np.argsort(-outputs, kind='stable')[: request.top]
    if unit == 'number':
      chosen = np.arange(len(outputs))
    top_names = [names[i] if i < len(names) else f'class {i}' for i in chosen]
    return list(zip(top_names, outputs[chosen].tolist(), strict=True))

  # Each result is the pixels of a file, or the reason why it cannot be used.
  load = functools.partial(files.loaded, load=transform.pixels)
  with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    for start in range(0, len(images), batch_size):
      part = images[start : start + batch_size]
      loaded = list(pool.map(load, part))
      usable = [i for i, x in enumerate(loaded) if not isinstance(x, str)]
      outputs: Any = None
      if usable:
        # A batch of constant size, so that the model is compiled only once.
        shape, dtype = transform.spec['image']
        batch = np.zeros((batch_size, *shape), dtype)
        for row in usable:
          batch[row] = loaded[row]
        logits = predict(params, {'image': batch, **text_embeddings})['logits']
        outputs = np.asarray(probabilities_of(logits))
      for row, path in enumerate(part):
        if row in usable:
          yield Prediction(path, top(outputs[row]), unit=unit)
        else:
          yield Prediction(path, [], loaded[row], unit)


def main(arguments: list[str]) -> None:
  """Prints the top classes of each image."""
  values = flags.FLAGS
  both = values.json and values.csv
  if not values.checkpoint or not arguments or values.top < 1 or both:
    raise process.usage(
      'predict --checkpoint=PATH [--top=5] [--text=A,B] [--json|--csv] IMAGE…'
    )
  images = inputs.image_paths(arguments)
  request = Request.of_flags()
  if values.out:
    return _write_masks(images, values, request)
  table = csv.writer(sys.stdout, lineterminator='\n')
  failed = []
  path = inputs.weights_path(values)
  predictions = run(path, images, request, values.text)
  for index, prediction in enumerate(predictions):
    unit = prediction.unit
    if values.csv and not index:
      table.writerow(('image', 'class', unit))
    if prediction.error:
      failed.append(f'{prediction.image} {prediction.error}')
      log.warning('%s', failed[-1])
    elif values.csv:
      table.writerows((prediction.image, *pair) for pair in prediction.top)
    elif values.json:
      top = [{'class': name, unit: value} for name, value in prediction.top]
      print(json.dumps({'image': prediction.image, 'top': top}))
    else:
      print(prediction.image)
      for name, value in prediction.top:
        text = f'{value:9.5g}' if unit == 'number' else f'{100 * value:5.1f}%'
        print(f'  {text}  {name}')
  _check_all_usable(failed, images)


def _write_masks(images: list[str], values: Any, request: Request) -> None:
  """Writes the mask of each image, and prints its path."""
  if values.csv or values.text:
    raise UserError(
      '--out writes masks of pixels, to which --csv and --text do not apply: '
      'remove these flags, or --out.'
    )
  path = inputs.weights_path(values)
  source, failed = inputs.open_weights(path, request), []
  if 'classes' not in source.objective().results:
    raise UserError(
      f'--out is for masks, but {path} does not have classes of pixels (the '
      'objective segment): remove --out.'
    )
  for image, mask, error in mask_files.write(
    source, images, values.out, request
  ):
    if error:
      failed.append(f'{image} {error}')
      log.warning('%s', failed[-1])
    else:
      pair = {'image': image, 'mask': mask}
      print(json.dumps(pair) if values.json else f'{image}: {mask}')
  _check_all_usable(failed, images)


def _check_all_usable(failed: list[str], images: list[str]) -> None:
  """Raises UserError if images could not be used; `failed` has their errors."""
  if failed:
    count = f'{len(failed)} of {len(images)} images cannot be used'
    raise UserError(f'{count}: {failed[0]}')


if __name__ == '__main__':
  process.run(main, define_flags)
