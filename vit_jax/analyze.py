"""Draws figures of weights: python -m vit_jax.analyze --checkpoint=P --out=DIR.

The figures are those of the paper: filters, similarity of position embeddings,
attention distance, attention rollout and single heads; and DINOv2's principal
components of patch tokens. For a segmentation, masks, predictions and errors
are drawn, too. The figures are written as PNG, or as --format=pdf or svg, and
their arrays as .npz. The images are --images=FILE,…, all of which are drawn, or
images of the run's evaluation split, preprocessed as in the evaluation. Without
--out, the figures are written to the workdir and shown in its HTML report.

`python -m vit_jax.analyze report WORKDIR…` writes report.html of each run with
images and predictions (--nopredictions leaves them out).
"""

import dataclasses
import logging
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import flags
from etils import epath

from vit_jax.analysis import figures, gallery, plotting, report
from vit_jax.arrays import sharding
from vit_jax.cli import inputs, process
from vit_jax.config import loading, schema
from vit_jax.data.contract import Preprocess
from vit_jax.data.storage import files as storage
from vit_jax.errors import UserError
from vit_jax.evaluators.features import Spread, own_splits
from vit_jax.files import paths
from vit_jax.training import data, reporting
from vit_jax.training.experiment import Experiment
from vit_jax.weights import pretrained
from vit_jax.weights.contract import Pretrained

log = logging.getLogger('vit_jax')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request(inputs.Request):
  """Weights and images of which `analyze` draws figures.

  Attributes:
    images: image files, all of which are drawn; if empty, images of the run's
      evaluation split, of which the first 8 are drawn.
    num_images: number of images of the evaluation split, over which the
      attention distance is averaged.
  """

  images: Sequence[str] = ()
  num_images: int = 32


def define_flags() -> None:
  """Defines the flags of this command."""
  Request.define('checkpoint', 'step', 'weights', 'image_size')
  flags.DEFINE_list(
    'images', [], "Image files; default: images of the run's evaluation split."
  )
  flags.DEFINE_integer(
    'num_images',
    Request.num_images,
    "Number of images from the run's evaluation split; Figure 11 uses 128.",
    1,
  )
  flags.DEFINE_bool('predictions', True, 'Let `report` predict images again.')
  flags.DEFINE_enum(
    'format', plotting.PNG.name, plotting.FORMATS, 'Format of the figures.'
  )
  flags.DEFINE_integer(
    'dpi', plotting.PNG.dpi, 'Resolution of the figures, dots per inch.', 1
  )
  flags.DEFINE_string('out', None, 'Directory; default WORKDIR/figures.')


def run(
  checkpoint: str,
  out: epath.Path,
  request: Request,
  form: plotting.Format = plotting.PNG,
) -> figures.Findings:
  """Draws all figures that the model supports.

  Args:
    checkpoint: workdir, step directory or weights of any format.
    out: directory for the figures and figures.npz.
    request: weights and images.
    form: format of the figures.

  Raises:
    UserError: the weights or images do not exist.
  """
  source = inputs.open_weights(checkpoint, request)
  source.model().check(source.image_size)
  transform, files = source.description.transform(), request.images
  if files:
    images, masks = _read_images(files, transform), None
    origin, shown = 'given as files', len(files)
    names = [os.path.basename(file) for file in files]
  else:
    count = request.num_images
    (images, masks), origin = _evaluation_images(source, transform, count)
    names, shown = [], figures.SHOWN
  mesh = sharding.make_mesh(jax.local_devices()[:1])
  weights = source.load_weights(mesh)
  with jax.set_mesh(mesh):
    findings = figures.examine(
      source.objective(), weights, images, shown, masks
    )
  for line in findings.missing:
    log.info('no %s', line)
  kind = request.weights
  title = source.path + ('' if kind == 'params' else f', {kind}')
  metadata = {'weights': title, 'images': f'{len(images)} {origin}'}
  with paths.access(out, 'written'):
    for path in gallery.save(out, findings, metadata, names, form):
      log.info('wrote %s', path)
  return findings


def _read_images(files: Sequence[str], transform: Preprocess) -> np.ndarray:
  """Reads and preprocesses image files."""
  images = []
  for file in files:
    image = storage.loaded(file, transform.pixels)
    if isinstance(image, str):
      raise UserError(f'{file} {image} Give JPEG or PNG files.')
    images.append(image)
  return np.stack(images)


def _evaluation_images(
  source: Pretrained, transform: Preprocess, count: int
) -> tuple[Any, str]:
  """Returns images of the evaluation split with their masks, and their origin.

  Args:
    source: weights of the run.
    transform: preprocessing of the images.
    count: number of images, spread evenly over the split.

  Raises:
    UserError: the weights do not specify the evaluation data of a run.
  """
  description = source.description
  splits = own_splits(description.config.get('evals', {}))
  if not description.source or not splits:
    raise UserError(
      f'{source.path} does not contain the data it was evaluated on: give '
      '--images=FILE,….'
    )
  split = schema.build('source', description.source, splits[0])
  return Spread(split, count).images(transform), f'of {split.name}'


def _report(workdirs: list[str], predictions: bool) -> None:
  """Writes the HTML report of each run.

  Args:
    workdirs: workdirs of the runs.
    predictions: whether to draw images and predictions first.

  Raises:
    UserError: a path is not a workdir, or cannot be written.
  """
  for folder in map(paths.locate, workdirs):
    values = report.read(folder)  # raises UserError if it is not a workdir
    if predictions:
      _write_predictions(folder)
      values = report.read(folder)
    paths.save(folder / report.NAME, report.render(values))
    log.info('wrote %s', folder / report.NAME)


def _write_predictions(workdir: epath.Path) -> None:
  """Writes training images of a run, and predictions of its newest weights."""
  try:
    weights = pretrained.find(str(workdir))
    config = loading.load(str(workdir / 'config.json'))
    experiment = Experiment.build(config, jax.devices())
    with jax.set_mesh(experiment.mesh):
      source = data.open_train(experiment)
      setting = data.evaluation_setting(experiment, source.class_names)
      params = weights.load_weights(experiment.mesh)
      step = int(weights.path.rpartition('/')[2])
      reporting.write(workdir, experiment, setting, params, source, step)
  except UserError as error:
    log.warning('no images and predictions: %s', error)


def _output_directory(checkpoint: str, out: str | None) -> epath.Path:
  """Returns the directory for figures.

  Raises:
    UserError: --out is missing, and the weights are not those of a workdir.
  """
  if out is not None:
    return paths.locate(out)
  workdir = paths.locate(checkpoint)
  if not (workdir / 'config.json').exists():
    pretrained.find(checkpoint)  # raises UserError if there are no weights
    raise UserError(
      f'--out=DIR is missing: {checkpoint} is not a workdir, so figures have '
      'no default directory.'
    )
  return workdir / gallery.FOLDER


def main(arguments: list[str]) -> None:
  """Draws figures of weights, or writes the reports of runs."""
  values = flags.FLAGS
  form = plotting.Format(values.format, values.dpi)
  if values.out:
    endings = ' or --format='.join(plotting.FORMATS)
    paths.check_folder_name(
      values.out, f'a directory, into which --format={endings} writes figures'
    )
  kind, *workdirs = arguments or ['']
  if kind == 'report' and workdirs:
    if values.out is not None:
      raise UserError(
        f'--out is {values.out}, but a report is written into the workdir of '
        'its run; omit --out.'
      )
    _report(workdirs, values.predictions)
    return
  if arguments or not values.checkpoint:
    raise process.usage(
      'analyze --checkpoint=PATH [--images=FILE,…] [--out=DIR], or report '
      'WORKDIR…'
    )
  out = _output_directory(values.checkpoint, values.out)
  run(inputs.weights_path(values), out, Request.of_flags(), form)
  if values.out is None:
    report.write(out.parent)


if __name__ == '__main__':
  process.run(main, define_flags)
