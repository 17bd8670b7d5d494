"""Evaluates a checkpoint exactly: python -m vit_jax.evaluate --checkpoint=PATH.

Preprocessing, data set and class count come from the checkpoint; flags override
the data. Where an average of weights was kept, it is evaluated too.
"""

import functools
import json
import logging
from typing import Any

import jax
from absl import flags

from vit_jax.arrays import sharding
from vit_jax.cli import process
from vit_jax.config import plugins
from vit_jax.config.completion import EVALS, MAX_BATCH_SIZE, SECTIONS
from vit_jax.data import matching
from vit_jax.data.pipeline import stream
from vit_jax.errors import UserError, check_range
from vit_jax.run import runtime
from vit_jax.training.experiment import EvalSetting
from vit_jax.weights import pretrained

log = logging.getLogger('vit_jax')


def define_flags() -> None:
  """The flags of this command."""
  flags.DEFINE_string(
    'checkpoint', None, 'Workdir, checkpoint step directory or .npz.'
  )
  flags.DEFINE_string('dataset', None, "TFDS name; default: the checkpoint's.")
  flags.DEFINE_string('split', None, 'Split; default: that of the first eval.')
  flags.DEFINE_string('data_dir', None, 'The TFDS directory.')
  flags.DEFINE_integer('batch_size', 128, 'Images at once, on all devices.')
  flags.DEFINE_bool('json', False, 'Print one JSON object.')
  process.define_distributed_flags()


def run(
  checkpoint: str,
  *,
  dataset: str | None = None,
  split: str | None = None,
  data_dir: str | None = None,
  batch_size: int = 128,
) -> dict[str, Any]:
  """Evaluates all weights of a checkpoint.

  Args:
    checkpoint: workdir, step directory or .npz.
    dataset: TFDS name; the checkpoint's own data by default.
    split: of the data set; by default that of the run's first evaluator.
    data_dir: the TFDS directory.
    batch_size: rounded up to a multiple of the number of devices.

  Returns:
    checkpoint, data, accuracy, loss, count; with an average kept besides,
    ema/accuracy and so on.

  Raises:
    UserError: no such checkpoint or data, or no head to evaluate.
  """
  check_range('--batch_size', batch_size, at_least=1, at_most=MAX_BATCH_SIZE)
  source = pretrained.find(checkpoint)
  about = source.about
  if not about['num_classes']:
    raise UserError(f'{checkpoint} has no head: there is nothing to evaluate.')
  section = _source_section(about, dataset, data_dir)
  evaluator = _evaluator_section(about, dataset)
  if split:
    evaluator['split'] = split
  if 'split' not in evaluator:
    raise UserError('--split is missing: which split to evaluate on.')
  mesh = sharding.make_mesh(jax.devices())
  built = _build(source, section, evaluator, mesh, batch_size)
  abstract = source.abstract_params(mesh)
  result: dict[str, Any] = {
    'checkpoint': source.path,
    'data': f'{section.get("dataset", section["name"])}/{evaluator["split"]}',
  }
  with jax.set_mesh(mesh):
    result |= built.run(source.load(abstract))
    average = source.load_average(abstract)
    if average is not None:
      scores = built.run(average)
      result |= {f'ema/{name}': value for name, value in scores.items()}
  return result


def _build(
  source: pretrained.Pretrained,
  section: dict[str, Any],
  evaluator: dict[str, Any],
  mesh: Any,
  batch_size: int,
) -> Any:
  """The evaluator on its data."""
  constructor = plugins.resolve(SECTIONS['source'], section['name'])
  setting = EvalSetting(
    open_source=functools.partial(_open, constructor, section, source),
    transform=source.preprocess(),
    predict=source.objective().predict,
    mesh=mesh,
    batch_size=-(-batch_size // mesh.size) * mesh.size,
    reader=stream.Reader(),
  )
  evaluator.pop('batch_size', None)
  kind = plugins.resolve(EVALS, evaluator['name'])
  return plugins.build(kind, evaluator, setting)


def _source_section(
  about: dict[str, Any], dataset: str | None, data_dir: str | None
) -> dict[str, Any]:
  """The config section of the data to evaluate on."""
  section = dict(about.get('source', {'name': 'tfds'}))
  if dataset:
    section = {'name': 'tfds', 'dataset': dataset}
  if data_dir:
    section['data_dir'] = data_dir
  if section['name'] == 'tfds' and not section.get('dataset'):
    raise UserError(
      '--dataset is missing: these weights do not say what to evaluate on.'
    )
  return section


def _evaluator_section(
  about: dict[str, Any], dataset: str | None
) -> dict[str, Any]:
  """The run's first evaluator, without its split if the data are others."""
  evals = about.get('config', {}).get('evals', {})
  section = dict(next(iter(evals.values()), {'name': 'classification'}))
  if dataset and dataset != about.get('source', {}).get('dataset'):
    section.pop('split', None)
  return section


def _open(
  constructor: Any,
  section: dict[str, Any],
  weights: pretrained.Pretrained,
  split: str,
) -> stream.Source:
  """The data, with the labels that the head knows its classes by."""
  num_classes = weights.about['num_classes']
  source = plugins.build(constructor, section, split)
  if source.num_classes > num_classes:
    raise UserError(
      f'{source.name} has {source.num_classes} classes and the head '
      f'{num_classes}: fine-tune on it first.'
    )
  names = weights.about['class_names']
  return matching.matched(source, names, weights.path)


def main(arguments: list[str]) -> None:
  """Prints the result as a line or as JSON."""
  values = flags.FLAGS
  if arguments or not values.checkpoint:
    raise UserError(
      '--checkpoint=PATH is needed, and flags only; got '
      f'{arguments or "no checkpoint"}.'
    )
  process.start_process()
  result = run(
    values.checkpoint,
    dataset=values.dataset,
    split=values.split,
    data_dir=values.data_dir,
    batch_size=values.batch_size,
  )
  if not runtime.is_main():
    return
  if values.json:
    print(json.dumps(result))
  else:
    for name, value in result.items():
      shown = f'{value:.6g}' if isinstance(value, float) else value
      print(f'{name}: {shown}')


if __name__ == '__main__':
  process.run(main, define_flags)
