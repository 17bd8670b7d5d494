"""Writes training images and predictions of a run for report.html."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh

from vit_jax.analysis.report import parts
from vit_jax.data.images import display
from vit_jax.data.pipeline import stream
from vit_jax.evaluators.contract import Setting
from vit_jax.evaluators.spread import own_splits
from vit_jax.processes.consensus import from_main
from vit_jax.training import predictions
from vit_jax.training.experiment import Experiment
from vit_jax.training.main_process import failures_logged, gather_to_main

PyTree = Any
_IMAGES = 24


def write(
  workdir: epath.Path,
  experiment: Experiment,
  setting: Setting,
  weights: PyTree,
  source: stream.Source,
  step: int,
) -> None:
  """Writes training images and predictions for report.html.

  Failures are logged and do not end the run. With several processes, the main
  one reads and classifies images, and the others wait for it.

  Args:
    workdir: directory of the run.
    experiment: experiment of the run.
    setting: setting of the run's evaluators.
    weights: weights whose predictions are shown.
    source: source of the training examples.
    step: number of updates completed.
  """
  setting, weights = gather_to_main(setting, weights)

  def make() -> None:
    values: dict[str, Any] = {'step': step, 'training': []}
    with failures_logged('report.html has no training images'):
      values['training'] = training_images(experiment, source, setting.mesh)
    splits = own_splits(experiment.config.evals)
    if splits and experiment.objective.num_classes:
      with (
        failures_logged('report.html has no predictions'),
        jax.set_mesh(setting.mesh),
      ):
        values['judged'] = predictions.predict_examples(
          setting, weights, splits[0]
        )
    with failures_logged('report.html has no pictures'):
      parts.write(workdir, values)

  from_main(make)


def training_images(
  experiment: Experiment, source: stream.Source, mesh: Mesh
) -> list[dict[str, Any]]:
  """Returns pictures of the first training images, augmented and mixed.

  They are the first images of the first batch. Images to mix are taken from
  these pictures only, not from the whole batch.

  Args:
    experiment: experiment of the run.
    source: source of the training examples.
    mesh: mesh of the devices of this process.
  """
  config = experiment.config
  split = mesh.shape['data'] * mesh.shape['fsdp']
  batch_size = -(-_IMAGES // split) * split
  mix = jax.jit(experiment.setting.mix)
  with stream.train_batches(
    source,
    experiment.augment,
    batch_size,
    config.seed,
    0,
    mesh,
    reader=experiment.reader,
  ) as batches:
    batch = next(batches)
    if not {'image', 'label'} <= batch.keys():  # such as crops without labels
      channels = experiment.model.channels
      return _unlabelled(jax.device_get(batch), channels)
    with jax.set_mesh(mesh):
      key = jax.random.fold_in(jax.random.key(config.seed), 0)
      images, targets = jax.device_get(mix(batch, key))
  # `mix` returns pixels in [-1, 1].
  pixels = display.rgb(display.pixels_of(images, batch['image'].dtype))
  return [
    parts.picture(image, caption(target, source.class_names))
    for image, target in zip(pixels[:_IMAGES], targets, strict=False)
  ]


def _unlabelled(
  batch: dict[str, np.ndarray], channels: int
) -> list[dict[str, Any]]:
  """Returns pictures of a batch without labels; the captions are entry names.

  An example may have several crops. Every array of 8 or 16 bits with four or
  more dimensions, `[n, …, y, x, channels]`, is taken as images.
  """
  entries = []
  for key, array in batch.items():
    is_pixels = array.dtype in (np.uint8, np.uint16)
    if is_pixels and array.ndim >= 4 and array.shape[-1] == channels:
      images = display.rgb(array.reshape(-1, *array.shape[-3:]))
      entries += [parts.picture(image, [key]) for image in images[:_IMAGES]]
  return entries[: 2 * _IMAGES]


def caption(
  target: np.ndarray | np.integer,
  names: Sequence[str],
  max_chars: int | None = None,
) -> list[str]:
  """Returns the caption of a training image: its class or most likely classes.

  Args:
    target: label, or probabilities of the classes `[classes]`.
    names: names of the classes.
    max_chars: maximum length of a line; longer names are shortened. None for
      no limit.

  Returns:
    The lines of the caption: ['cat'], or ['cat 0.70', 'dog 0.30'] for mixed
    labels (at most two classes).
  """
  if target.ndim == 0:
    return [names[int(target)][:max_chars]]
  lines = []
  for i in np.argsort(-target, kind='stable')[:2]:
    if target[i] > 0.005:
      probability = f' {target[i]:.2f}'
      length = None if max_chars is None else max_chars - len(probability)
      lines.append(names[int(i)][:length] + probability)
  return lines
