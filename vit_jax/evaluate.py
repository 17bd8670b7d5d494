"""Evaluates a checkpoint exactly: python -m vit_jax.evaluate --checkpoint=PATH.

All evaluators of the run are used, or one: --evaluator=NAME. Preprocessing,
data, number of classes and the policy for bad records are those of the
checkpoint. To evaluate on other data, give --dataset=NAME (of TFDS), or
--dataset=folder --data_dir=photos --split=train, or any other source. Keys of
the source and the reader are set as in training:
--config.source.class_map=names.txt --config.reader.on_bad_record=skip.
--preprocess=mae or --config.preprocess.KEY=… changes the preprocessing, which
is part of the result. If the checkpoint contains an average of the weights or a
teacher, these are evaluated, too.
"""

import dataclasses
import functools
import json
import logging
import os
from typing import Any

import jax
from absl import flags

from vit_jax.arrays import sharding
from vit_jax.cli import inputs, process, results
from vit_jax.cli.fields import flag
from vit_jax.config import overrides, schema
from vit_jax.config.completion import flatten
from vit_jax.config.schema import EVALS, Config, Section, build_section
from vit_jax.data import filters
from vit_jax.data.pipeline import stream
from vit_jax.errors import UserError, closest
from vit_jax.evaluators.batch_size import largest_batch_size
from vit_jax.evaluators.contract import Setting
from vit_jax.files import paths
from vit_jax.objectives.contract import metric_suffix
from vit_jax.processes import runtime
from vit_jax.weights.contract import Pretrained

log = logging.getLogger('vit_jax')
_DEFAULTS = {'name': 'classification', 'split': ''}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request(inputs.Request):
  """Weights and data of the command `evaluate`."""

  evaluator: str | None = flag(
    "Name of one of the run's evaluators in config.evals, or a kind of "
    "evaluator; default: all of the run's evaluators."
  )
  tables: str | None = flag(
    'Directory for the tables of evaluators that have any, such as confusion.'
  )


def define_flags() -> None:
  """Defines the flags of this command."""
  Request.define_data()
  inputs.define_inputs(
    'source, reader, preprocess and evals.NAME, and for train.leave_out'
  )
  flags.DEFINE_string('out', None, 'File to which the JSON object is written.')


def run(checkpoint: str, request: Request) -> dict[str, Any]:
  """Evaluates all weights of a checkpoint.

  Args:
    checkpoint: workdir, step directory or weights of any format.
    request: data and evaluators. By default, data, preprocessing and the policy
      for bad records are those of the checkpoint, and the split is that of the
      evaluator.

  Returns:
    checkpoint, data, preprocess, accuracy, loss and count; if an average of the
    weights is stored, also ema/accuracy and so on, and similarly for other
    weights (teacher/accuracy). With several evaluators, the keys are those of
    metrics.jsonl: val/data, val/accuracy, val_ema/accuracy.

  Raises:
    UserError: the checkpoint or data does not exist, or no evaluator applies.
  """
  weights = inputs.open_weights(checkpoint, request)
  config, names = _config(weights, request)
  mesh = sharding.make_mesh(jax.devices())
  batch_size = request.batch_size or largest_batch_size(weights, mesh)
  open_source = functools.partial(_open, config, weights)
  setting = inputs.evaluation_setting(
    weights, config, open_source, mesh, batch_size
  )._replace(leave_out=_leave_out(config, weights.description.source))
  # All are built before one is run, which may take hours.
  built = {name: _build(weights, config, name, setting) for name in names}
  several = len(names) > 1
  result: dict[str, Any] = {
    'checkpoint': weights.path,
    'preprocess': results.describe(weights, config),
  }
  with jax.set_mesh(mesh):
    for name in names:
      section = config.evals[name]
      source = section.get('source') or config.source
      title = source.get('dataset') or source.get('path') or source.name
      # Evaluators of plug-ins may have no split.
      data = f'{title}/{section.get("split", "all")}'
      result[f'{name}/data' if several else 'data'] = data
      for kind, params in weights.weights(mesh).items():
        if several:
          prefix = f'{name}{metric_suffix(kind)}/'
        else:
          prefix = '' if kind == 'params' else f'{kind}/'
        scores = built[name].run(params)
        if request.tables and runtime.is_main():
          for file, text in built[name].tables().items():
            path = f'{name}{metric_suffix(kind)}_{file}'
            paths.save(paths.locate(request.tables) / path, text)
        result |= {prefix + key: value for key, value in scores.items()}
  return result


def _config(weights: Pretrained, request: Request) -> tuple[Config, list[str]]:
  """Returns a config of the completed sections, and the evaluators to run.

  On the run's own data and splits, all evaluators are run. On other data only
  classification is run, if the run has such evaluators, because others may
  depend on the run's training data. With --split or other data, evaluators that
  differ only in their split are run once.

  Raises:
    UserError: there is no such evaluator, or --split is missing.
  """
  description, split = weights.description, request.split
  run_evals = description.config.get('evals', {})
  override = {'split': split} if split else {}
  evals = _chosen(run_evals, request.evaluator)
  sections = {
    **inputs.sections(weights),
    'source': inputs.source_section(description.source, request),
    'evals': {name: section | override for name, section in evals.items()},
  }
  if 'leave_out' in description.config.get('train', {}):
    sections['train'] = description.config['train']
  config = overrides.apply(sections, [*request.settings])
  is_run_data = _is_run_data(config, description.source)
  names = list(config.evals)
  if not is_run_data:
    kinds = [n for n in names if config.evals[n].name == _DEFAULTS['name']]
    names = kinds or names
  if split or not is_run_data:
    names = _distinct(config, names)
  run_splits = {name: each.get('split', '') for name, each in run_evals.items()}
  for name in names:
    section = config.evals[name]
    if 'split' not in section:  # possible for a plug-in
      continue
    if not section.split and is_run_data:
      # The run has no such evaluator: use the split of its other evaluators.
      section.split = next(filter(None, run_splits.values()), '')
    # The split of the run is the default only for the data of the run.
    run_split = run_splits.get(name, '')
    is_default = not split and section.split == run_split
    if not section.split or (is_default and not is_run_data):
      raise UserError(
        f'--split is missing, as in --split=test. {name} of the run uses '
        f'{run_split!r} of its own data.'
      )
  return config, names


def _distinct(config: Config, names: list[str]) -> list[str]:
  """Returns the first of those evaluators that differ only in their split."""
  distinct: dict[str, str] = {}
  for name in names:
    section = config.evals[name].to_dict()
    keys = {k: v for k, v in section.items() if k not in ('split', 'every')}
    distinct.setdefault(repr(keys), name)
  return list(distinct.values())


def _build(
  weights: Pretrained, config: Config, name: str, setting: Setting
) -> Any:
  """Builds an evaluator of the config.

  An evaluator that does not use the head, such as few-shot regression, takes
  its classes from the data.

  Raises:
    UserError: the evaluator draws figures, or cannot be built.
  """
  section = config.evals[name]
  kind: Any = schema.resolve(EVALS, section.name)
  if not kind.measures:
    raise UserError(
      f'the evaluator {section.name!r} has no metrics: use python -m '
      'vit_jax.analyze --checkpoint=PATH for figures.'
    )
  if kind.own_classes and section.get('source', ...) is None:
    section = {**section, 'source': config.source.to_dict()}
    train = weights.description.config.get('train', {})
    is_run_data = _is_run_data(config, weights.description.source)
    if is_run_data and section.get('train_split', '') is None:
      section['train_split'] = train.get('split', 'train')
  return schema.construct(kind, section, setting.for_section(section))


def _chosen(evals: Section, evaluator: str | None) -> dict[str, dict]:
  """Returns the sections of one evaluator, or of all in the run, by name.

  Args:
    evals: section `evals` of the run.
    evaluator: name in the run's `config.evals`, or a kind of evaluator; None
      for all evaluators of the run that do not draw figures.

  Raises:
    UserError: there is no such evaluator.
  """
  if evaluator is None:
    found = {
      name: section
      for name, section in evals.items()
      if _measures(section['name'])
    } or {_DEFAULTS['name']: {}}
  elif evaluator in evals:
    found = {evaluator: evals[evaluator]}
  elif '.' in evaluator or evaluator in schema.names(EVALS):
    found = {evaluator.rpartition('.')[2]: {'name': evaluator}}
  else:
    near = closest(evaluator, [*evals, *schema.names(EVALS)])
    raise UserError(f'--evaluator={evaluator} is not an evaluator; {near}.')
  # The batch size was chosen for the devices of the run.
  return {
    name: {k: v for k, v in (_DEFAULTS | section).items() if k != 'batch_size'}
    for name, section in found.items()
  }


def _measures(name: str) -> bool:
  """Returns whether a kind of evaluator has metrics."""
  kind: Any = schema.resolve(EVALS, name)
  return kind.measures


def _is_run_data(config: Config, own: Section) -> bool:
  """Returns whether the config reads the data set of the run, `own`."""

  def identity(section: Any) -> dict[str, Any]:
    # The config of a run contains absolute paths, a flag may be relative.
    return {
      key: os.path.abspath(value) if value and key.endswith('path') else value
      for key, value in flatten(section).items()
      if key.rpartition('.')[2] in ('name', 'dataset', 'path')
    }

  old, new = identity(own), identity(config.source)
  return all(old.get(key) == value for key, value in new.items())


def _leave_out(config: Config, own: Section) -> str | None:
  """Returns the list of examples that the run leaves out of its training."""
  path = config.train.leave_out if 'train' in config else None
  if path and not _is_run_data(config, own) and not paths.locate(path).exists():
    log.warning(
      'train.leave_out: %s does not exist, so no example is left out. If these '
      'are the data of the run at another place, give '
      '--config.train.leave_out=PATH.',
      path,
    )
    return None
  return path


def _open(config: Config, weights: Pretrained, split: str) -> stream.Source:
  """Opens the data, and maps its labels to the classes of the head.

  Raises:
    UserError: the data has more classes than the head, or other classes.
  """
  num_classes = weights.objective().num_classes
  source = build_section(config, 'source', split)
  if 0 < num_classes < source.num_classes:
    raise UserError(
      f'{source.name} has {source.num_classes} classes, but the head has '
      f'{num_classes}: fine-tune on these data first.'
    )
  names = weights.description.class_names
  return filters.matched(source, names, weights.path)


def main(arguments: list[str]) -> None:
  """Prints the result as lines or as JSON, and writes it with --out."""
  values = flags.FLAGS
  if arguments or not values.checkpoint:
    raise process.usage(
      'evaluate --checkpoint=PATH [--evaluator=NAME --dataset=NAME --split=S]'
    )
  process.start_process()
  result = run(inputs.weights_path(values), Request.of_flags())
  if values.out and runtime.is_main():
    paths.save(paths.locate(values.out), json.dumps(result))
  results.print_result(result)


if __name__ == '__main__':
  process.run(main, define_flags)
