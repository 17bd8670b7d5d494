"""Writes images and predictions for report.html.

Only the main process does this work, with all weights. A failure is logged and
does not end the run.
"""

import functools
import logging
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh
from jaxtyping import Int, UInt8

from vit_jax.analysis import report
from vit_jax.arrays import sharding
from vit_jax.arrays.tree import PyTree
from vit_jax.data.contract import target_key
from vit_jax.data.images import channels as channels_lib
from vit_jax.data.images.headers import DecodeError
from vit_jax.data.pipeline import stream
from vit_jax.evaluators import confusion, contract
from vit_jax.evaluators.contract import Batch, Setting
from vit_jax.evaluators.features import Spread, open_split, own_splits
from vit_jax.evaluators.figures import failures_logged, gather_to_main
from vit_jax.objectives import losses
from vit_jax.processes.consensus import from_main
from vit_jax.training.experiment import Experiment

log = logging.getLogger('vit_jax')
MAX_EXAMPLES = 10_000
_SHOWN = 24  # images of each kind in the report


def predict_examples(
  setting: Setting, weights: PyTree, split: str, count: int = MAX_EXAMPLES
) -> dict[str, Any]:
  """Classifies examples of a split and selects examples for the report.

  Args:
    setting: setting of the run's evaluators.
    weights: one set of weights of the objective, see `Trainer.weights`.
    split: split of the run's source.
    count: maximum number of examples to classify.

  Returns:
    JSON-able entries of the report: counts, accuracy, pictures of examples
    spread over the split, pictures of the most confident mistakes, and the
    most confused classes. For several labels, or numbers, there are neither
    accuracy nor confused classes, and the mistakes are the largest errors.

  Raises:
    UserError: no example can be read.
  """
  full_split = open_split(setting, split)
  source = Spread(full_split, count)
  function = setting.compiled(functools.partial(_predict, setting))
  joined = contract.joined(setting.sweep(weights, source, function))
  kept = np.flatnonzero(joined.pop('mask'))  # neither padding nor bad records
  if not len(kept):
    raise contract.no_example_error(source)
  values = {name: array[kept] for name, array in joined.items()}
  label, predicted = values['label'], values['predicted']
  # [n], or [n, outputs] of several labels or numbers.
  wrong = predicted != label
  # For several labels, or numbers, almost every example differs, and the order
  # is that of its largest error.
  order = np.argsort(-values['confidence'], kind='stable')
  mistakes = [i for i in order.tolist() if wrong[i].any()][:_SHOWN]
  spread = np.linspace(0, len(kept) - 1, min(_SHOWN, len(kept)))
  examples = np.unique(spread.round().astype(int)).tolist()
  show = functools.partial(_pictures, setting, source, kept, values)
  entries = {
    'source': source.name,
    'count': len(kept),
    'total': len(full_split),
    'accuracy': None,
    'examples': show(examples),
    'mistakes': show(mistakes),
  }
  if wrong.ndim == 1:
    entries['accuracy'] = float(1 - wrong.mean())
    entries |= confusion.summary(label, predicted, source.class_names)
  return entries


def _predict(setting: Setting, weights: PyTree, batch: Batch) -> PyTree:
  """Computes the predicted class of each example, and its probability.

  For several labels, `predicted` contains the probabilities of all classes, and
  for numbers all outputs; `confidence` is then the largest error.
  """
  logits = setting.predict(weights, batch)['logits'].astype(jnp.float32)
  kind = setting.objective.cross_entropy
  outputs = losses.PROBABILITIES[kind](logits)  # [n, classes]
  label, predicted = batch[target_key(batch)], outputs.argmax(-1)
  confidence = outputs.max(-1)
  if label.ndim > 1:
    predicted, confidence = outputs, jnp.abs(outputs - label).max(-1)
  found = {'predicted': predicted, 'confidence': confidence, 'label': label}
  return found | {'mask': batch['mask']}


def _pictures(
  setting: Setting,
  source: Spread,
  kept: Int[np.ndarray, ' n'],
  values: dict[str, np.ndarray],
  chosen: Sequence[int],
) -> list[dict[str, Any]]:
  """Returns pictures of the chosen examples, captioned with predictions.

  Args:
    setting: setting of the run's evaluators.
    source: source of the examples.
    kept: indices in `source` of the examples that were classified.
    values: predicted, confidence and label of these examples.
    chosen: positions in `kept`.
  """
  transform: Any = setting.transform
  entries, key = [], target_key(transform.spec)
  for i in chosen:
    index = int(kept[i])
    try:
      pixels = channels_lib.rgb(transform.pixels(source[index]['image']))
    except DecodeError:
      continue  # the file was changed after it was classified
    predicted, label = (
      ', '.join(caption(values[name][i], source.class_names, key))
      for name in ('predicted', 'label')
    )
    is_right = predicted == label
    if key == 'label':
      # Two classes may have the same name.
      is_right = values['predicted'][i] == values['label'][i]
      predicted += f' {100 * float(values["confidence"][i]):.1f} %'
    verdict = 'right' if is_right else f'is {label}'
    lines = [predicted, verdict, source.title(index)]
    entries.append(report.picture(pixels, lines))
  return entries


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
        values['judged'] = predict_examples(setting, weights, splits[0])
    with failures_logged('report.html has no pictures'):
      report.write_pictures(workdir, values)

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
  # The smallest batch with _SHOWN images that the devices can split.
  devices = sharding.batch_parts(mesh)
  batch_size = math.ceil(_SHOWN / devices) * devices
  first_step = 0
  with stream.train_batches(
    source,
    experiment.augment,
    batch_size,
    experiment.config.seed,
    first_step,
    mesh,
    reader=experiment.reader,
  ) as batches:
    shown = pictures(experiment, next(batches), 0, mesh, source.class_names)
  return [report.picture(*picture) for picture in shown]


def pictures(
  experiment: Experiment,
  batch: Batch,
  step: int,
  mesh: Mesh,
  class_names: Sequence[str],
) -> list[tuple[UInt8[np.ndarray, 'y x 3'], list[str]]]:
  """Returns pictures of a training batch, after mixing, with their captions.

  Args:
    experiment: experiment of the run.
    batch: batch of training examples.
    step: number of updates before this batch.
    mesh: mesh of the devices.
    class_names: names of the classes.
  """
  key = target_key(batch)
  if not {'image', key} <= batch.keys():  # such as crops without labels
    return _unlabelled(jax.device_get(batch), experiment.model.channels)
  with jax.set_mesh(mesh):
    seed = jax.random.key(experiment.config.seed)
    mix = jax.jit(experiment.setting.mix)
    images, targets = jax.device_get(mix(batch, jax.random.fold_in(seed, step)))
  # `mix` returns pixels in [-1, 1].
  pixels = channels_lib.rgb(
    channels_lib.pixels_of(images, batch['image'].dtype)
  )
  captions = [caption(target, class_names, key) for target in targets]
  return list(zip(pixels, captions, strict=True))


def _unlabelled(
  batch: dict[str, np.ndarray], channels: int
) -> list[tuple[UInt8[np.ndarray, 'y x 3'], list[str]]]:
  """Returns pictures of a batch without labels; the captions are entry names.

  An example may have several crops. Every array of 8 or 16 bits with four or
  more dimensions, `[n, …, y, x, channels]`, is taken as images.
  """
  shown = []
  for key, array in batch.items():
    is_pixels = array.dtype in (np.uint8, np.uint16)
    if is_pixels and array.ndim >= 4 and array.shape[-1] == channels:
      images = channels_lib.rgb(array.reshape(-1, *array.shape[-3:]))
      shown += [(image, [key]) for image in images[:_SHOWN]]
  return shown[: 2 * _SHOWN]


def caption(
  target: np.ndarray | np.integer, names: Sequence[str], key: str = 'label'
) -> list[str]:
  """Returns the caption of an image: its class, likely classes, or numbers.

  Args:
    target: label, probabilities of the classes `[classes]`, or numbers.
    names: names of the classes, or of the numbers.
    key: which of `data.contract.TARGETS` it is.

  Returns:
    The lines of the caption: ['cat'], ['cat 0.70', 'dog 0.30'] for mixed labels
    (at most two classes, or four of several labels, of which there may be
    none), or ['age 41.3'].
  """
  if target.ndim == 0:
    return [confusion.class_name(names, int(target))]
  if key == 'numbers':
    return [f'{name} {x:.4g}' for name, x in zip(names, target, strict=True)]
  longest = 2 if key == 'label' else 4
  most_likely = np.argsort(-target, kind='stable')[:longest].tolist()
  # Probabilities that would be shown as 0.00 are left out.
  return [
    f'{names[i]} {target[i]:.2f}' for i in most_likely if target[i] > 0.005
  ] or ['none']
