"""What a run shows of itself: its pictures for report.html."""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh

from vit_jax.analysis.report import parts
from vit_jax.config.sections import build_section
from vit_jax.data.pipeline import stream
from vit_jax.evaluators import predictions
from vit_jax.evaluators.alone import on_main
from vit_jax.evaluators.contract import Setting
from vit_jax.evaluators.spread import own_splits
from vit_jax.processes.consensus import from_main
from vit_jax.processes.preemption import StopRequested
from vit_jax.training.experiment import Experiment

log = logging.getLogger('vit_jax')
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
  """Makes the pictures of report.html; what goes wrong ends no run.

  Of several processes the main one looks at images, alone, and the others
  wait for it.

  Args:
    workdir: of the run.
    experiment: of the run.
    setting: of its evaluators.
    weights: to be judged.
    source: of the training.
    step: of these weights.
  """
  setting, weights = on_main(setting, weights)

  def make() -> None:
    values: dict[str, Any] = {'step': step, 'training': []}
    with _carefully('training images'):
      values['training'] = training_images(experiment, source, setting.mesh)
    splits = own_splits(experiment.config.evals)
    if splits and experiment.config.num_classes:
      with _carefully('predictions'), jax.set_mesh(setting.mesh):
        values['judged'] = predictions.judge(setting, weights, splits[0])
    with _carefully('pictures'):
      parts.write(workdir, values)

  from_main(make)


@contextlib.contextmanager
def _carefully(what: str) -> Iterator[None]:
  try:
    yield
  except StopRequested:
    log.info('report.html is left without %s: a signal came', what)
  except Exception as error:  # noqa: BLE001 (a page is not worth a run)
    log.warning('report.html has no %s: %s', what, error)


def training_images(
  experiment: Experiment, source: stream.Source, mesh: Mesh
) -> list[dict[str, Any]]:
  """The first images of the training as the step gets them.

  They are those of the first batch; where images are mixed, each is mixed with
  another one of these, not of the whole batch.

  Args:
    experiment: of the run.
    source: of the training.
    mesh: devices of this process.
  """
  config = experiment.config
  split = mesh.shape['data'] * mesh.shape['fsdp']
  batch_size = -(-_IMAGES // split) * split
  mix = jax.jit(experiment.setting.mix)
  with stream.train_batches(
    source,
    experiment.augment(),
    batch_size,
    config.seed,
    0,
    mesh,
    reader=build_section(config, 'reader'),
  ) as batches:
    batch = next(batches)
    if not {'image', 'label'} <= batch.keys():  # of an objective of its own
      return _unlabelled(jax.device_get(batch))
    with jax.set_mesh(mesh):
      key = jax.random.fold_in(jax.random.key(config.seed), 0)
      images, targets = jax.device_get(mix(batch, key))
  pixels = np.clip(np.round(images * 127.5 + 127.5), 0, 255).astype(np.uint8)
  return [
    parts.picture(image, caption(target, source.class_names))
    for image, target in zip(pixels[:_IMAGES], targets, strict=False)
  ]


def _unlabelled(batch: dict[str, np.ndarray]) -> list[dict[str, Any]]:
  """All images of the first examples, several crops of each perhaps."""
  entries = []
  for key, array in batch.items():
    if array.dtype == np.uint8 and array.ndim >= 4 and array.shape[-1] == 3:
      images = array.reshape(-1, *array.shape[-3:])
      entries += [parts.picture(image, [key]) for image in images[:_IMAGES]]
  return entries[: 2 * _IMAGES]


def caption(target: np.ndarray | np.integer, names: Sequence[str]) -> list[str]:
  """['cat'], or ['cat 0.70', 'dog 0.30'] where labels are mixed."""
  if target.ndim == 0:
    return [names[int(target)]]
  largest = np.argsort(-target, kind='stable')[:2]
  return [f'{names[i]} {target[i]:.2f}' for i in largest if target[i] > 0.005]
