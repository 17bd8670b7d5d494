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

import functools
import json
import logging
import sys
from collections.abc import Sequence
from typing import Any

import jax
from absl import flags

from vit_jax.arrays import sharding
from vit_jax.cli import (
  batches,
  data_flags,
  preprocessing_flags,
  process,
  weights_flags,
)
from vit_jax.config import overrides, plugins
from vit_jax.config.completion import MAX_BATCH_SIZE, Config, flatten
from vit_jax.config.sections import EVALS, build_section
from vit_jax.data import matching
from vit_jax.data.pipeline import stream
from vit_jax.errors import UserError, check_range, closest
from vit_jax.files import atomic, paths
from vit_jax.objectives.contract import metric_suffix
from vit_jax.processes import runtime
from vit_jax.training.figures import Figures
from vit_jax.weights import pretrained

log = logging.getLogger('vit_jax')
_DEFAULTS = {'name': 'classification', 'split': ''}


def define_flags() -> None:
  """Defines the flags of this command."""
  flags.DEFINE_string(
    'checkpoint', None, 'Workdir, checkpoint step directory or weight file.'
  )
  flags.DEFINE_string(
    'evaluator',
    None,
    "Name of one of the run's evaluators in config.evals, or a kind of "
    "evaluator; default: all of the run's evaluators.",
  )
  flags.DEFINE_string(
    'dataset',
    None,
    "TFDS name, or a source (folder, tar, …); default: the run's own data.",
  )
  flags.DEFINE_string('split', None, "Split; default: the evaluator's.")
  flags.DEFINE_string(
    'data_dir', None, 'TFDS directory, or path of another source.'
  )
  weights_flags.define_step()
  weights_flags.define_image_size()
  preprocessing_flags.define_flag()
  batches.define_flag()
  flags.DEFINE_bool('json', False, 'Print one JSON object.')
  flags.DEFINE_string('out', None, 'File to which the JSON object is written.')
  flags.DEFINE_string(
    'tables',
    None,
    'Directory for the tables of evaluators that have any, such as confusion.',
  )
  flags.DEFINE_multi_string(
    'overrides',
    overrides.extract(sys.argv),
    'Set by --config.source.KEY=…, --config.reader.KEY=…, '
    '--config.preprocess.KEY=…, --config.evals.NAME.KEY=… and '
    '--config.train.leave_out=PATH.',
  )
  process.define_distributed_flags()


def run(
  checkpoint: str,
  *,
  evaluator: str | None = None,
  dataset: str | None = None,
  split: str | None = None,
  data_dir: str | None = None,
  batch_size: int | None = None,
  image_size: tuple[int, int] | None = None,
  preprocess: str | None = None,
  settings: Sequence[str] = (),
  tables: str | None = None,
) -> dict[str, Any]:
  """Evaluates all weights of a checkpoint.

  Args:
    checkpoint: workdir, step directory or weights of any format.
    evaluator: name in the run's `config.evals`, or a kind of evaluator; by
      default all evaluators of the run, see `_applicable`.
    dataset: TFDS name or kind of source; by default the checkpoint's own data.
    split: split of the data set; by default the evaluator's.
    data_dir: the TFDS directory, or the path of another source.
    batch_size: images per batch; rounded up to a multiple of the number of
      devices. By default 128, or fewer if these do not fit into memory.
    image_size: (height, width) of the images, pixels; by default that of the
      weights. Positions are interpolated, see `transfer.resized`.
    preprocess: name of a preset, see `data.augment.presets`; by default the
      preprocessing of the weights.
    settings: overrides of the source, reader, preprocessing or evaluator, such
      as '--config.source.KEY=value'. By default, bad records are treated as in
      the run.
    tables: directory for the evaluators' tables. The files are named
      <evaluator>_<table>.csv, and <evaluator>_ema_<table>.csv for an average of
      the weights.

  Returns:
    checkpoint, data, preprocess, accuracy, loss and count; if an average of the
    weights is stored, also ema/accuracy and so on, and similarly for other
    weights (teacher/accuracy). With several evaluators, the keys are those of
    metrics.jsonl: val/data, val/accuracy, val_ema/accuracy.

  Raises:
    UserError: the checkpoint or data does not exist, or no evaluator applies.
  """
  check_range('--batch_size', batch_size, at_least=1, at_most=MAX_BATCH_SIZE)
  found = pretrained.find(checkpoint, image_size=image_size)
  weights = preprocessing_flags.with_preset(found, preprocess)
  about = weights.about
  candidates = _evaluator_sections(about, evaluator)
  override = {'split': split} if split else {}
  sections = {
    'source': data_flags.source_section(about, dataset, data_dir),
    'reader': data_flags.reader_section(about),
    'preprocess': {'name': 'transforms', **about['preprocess']},
    'evals': {n: section | override for n, section in candidates.items()},
  }
  train = about.get('config', {}).get('train', {})
  if 'leave_out' in train:
    sections['train'] = train
  config = overrides.apply(sections, list(settings))
  names = _applicable(config, about, split)
  chosen = {name: _choose_split(config, name, about, split) for name in names}
  mesh = sharding.make_mesh(jax.devices())
  rows = batch_size or batches.fitting(weights, mesh)
  built = {name: _build(weights, config, name, mesh, rows) for name in names}
  several = len(names) > 1
  head = {'checkpoint': weights.path}
  described = {'preprocess': preprocessing_flags.describe(weights, config)}
  result: dict[str, Any] = {}
  with jax.set_mesh(mesh):
    for name in names:
      source = config.evals[name].get('source') or config.source
      data = f'{data_flags.title(source)}/{chosen[name]}'
      result[f'{name}/data' if several else 'data'] = data
      for kind, params in weights.weights(mesh).items():
        if several:
          prefix = f'{name}{metric_suffix(kind)}/'
        else:
          prefix = '' if kind == 'params' else f'{kind}/'
        scores = built[name].run(params)
        if tables and hasattr(built[name], 'tables'):
          file_name = name + metric_suffix(kind)
          _write_tables(tables, file_name, built[name].tables())
        result |= {prefix + key: value for key, value in scores.items()}
  return head | described | result


def _applicable(
  config: Config, about: dict[str, Any], split: str | None
) -> list[str]:
  """Returns the names of the evaluators in the config that are run.

  On the run's own data and splits, all evaluators are run. On other data only
  classification is run, if the run has such evaluators, because others may
  depend on the run's training data. With --split or other data, evaluators that
  differ only in their split are run once.

  Args:
    config: config with the sections source and evals.
    about: description of the weights.
    split: value of --split; None if it is not set.
  """
  names = list(config.evals)
  is_run_data = _is_run_data(config, about)
  if not is_run_data:
    kinds = [n for n in names if config.evals[n].name == _DEFAULTS['name']]
    names = kinds or names
  if is_run_data and not split:
    return names
  distinct: dict[str, str] = {}
  for name in names:
    section = config.evals[name].to_dict()
    keys = {k: v for k, v in section.items() if k not in ('split', 'every')}
    distinct.setdefault(repr(keys), name)
  return list(distinct.values())


def _build(
  weights: pretrained.Pretrained,
  config: Config,
  name: str,
  mesh: Any,
  batch_size: int,
) -> Any:
  """Builds an evaluator of the config.

  An evaluator that does not use the head, such as few-shot regression, takes
  its classes from the data.

  Raises:
    UserError: the evaluator draws figures, or cannot be built.
  """
  open_source = functools.partial(_open, config, weights)
  setting = data_flags.setting(weights, config, open_source, mesh, batch_size)
  setting = setting._replace(leave_out=_leave_out(config, weights.about))
  section = config.evals[name]
  kind = plugins.resolve(EVALS, section.name)
  if kind is Figures:
    raise UserError(
      f'the evaluator {section.name!r} draws into the workdir of a training. '
      '`python -m vit_jax.analyze --checkpoint=PATH` draws figures of any '
      'weights.'
    )
  if getattr(kind, 'own_classes', False) and section.source is None:
    section = {**section, 'source': config.source.to_dict()}
    if section.get('train_split', '') is None and _is_run_data(
      config, weights.about
    ):
      section['train_split'] = _train_split(weights.about)
  return plugins.build(kind, section, setting)


def _evaluator_sections(
  about: dict[str, Any], evaluator: str | None
) -> dict[str, dict[str, Any]]:
  """Returns the sections of one evaluator, or of all in the run, by name."""
  evals = about.get('config', {}).get('evals', {})
  names = (
    [evaluator] if evaluator else _without_figures(evals) or [_DEFAULTS['name']]
  )
  return dict(_evaluator_section(evals, name) for name in names)


def _without_figures(evals: dict[str, Any]) -> list[str]:
  """Returns the names of the evaluators that do not draw figures."""
  return [
    name
    for name, section in evals.items()
    if plugins.resolve(EVALS, section['name']) is not Figures
  ]


def _evaluator_section(
  evals: dict[str, Any], name: str
) -> tuple[str, dict[str, Any]]:
  """Returns the name and the section of an evaluator, by its name or kind."""
  if name in evals:
    section = dict(evals[name])
  elif '.' in name or name in plugins.names(EVALS):
    section = {'name': name}
    name = name.rpartition('.')[2]
  else:
    near = closest(name, [*evals, *plugins.names(EVALS)])
    raise UserError(f'--evaluator={name} is not an evaluator; {near}.')
  section.pop('batch_size', None)  # it was chosen for the devices of the run
  return name, _DEFAULTS | section


def _choose_split(
  config: Config, name: str, about: dict[str, Any], split: str | None
) -> str:
  """Sets and returns the split of an evaluator.

  Args:
    config: config with the sections source and evals.
    name: name of the evaluator in `config.evals`.
    about: description of the weights.
    split: value of --split; None if it is not set.

  Raises:
    UserError: --split is missing. The run's split is the default only with the
      run's own data.
  """
  section = config.evals[name]
  if 'split' not in section:  # possible for a plug-in
    return 'all'
  evals = about.get('config', {}).get('evals', {})
  run_split = evals.get(name, {}).get('split', '')
  is_run_data = _is_run_data(config, about)
  if not section.split and is_run_data:
    # The run has no such evaluator: use the split of its other evaluators.
    splits = (other.get('split', '') for other in evals.values())
    section.split = next(filter(None, splits), '')
  is_default = not split and section.split == run_split
  if not section.split or (not is_run_data and is_default):
    hint = (
      f' (on its own data, the run uses {run_split!r} for {name})'
      if run_split
      else ''
    )
    raise UserError(
      '--split is missing: give the split to evaluate on, for example '
      f'--split=test{hint}.'
    )
  return section.split


def _is_run_data(config: Config, about: dict[str, Any]) -> bool:
  """Returns whether the config reads the data set of the run."""
  old, new = flatten(about.get('source', {})), flatten(config.source)
  return all(
    new[key] == old.get(key)
    for key in new
    if key.rpartition('.')[2] in ('name', 'dataset', 'path')
  )


def _leave_out(config: Config, about: dict[str, Any]) -> str | None:
  """Returns the list of examples that the run leaves out of its training."""
  path = config.train.leave_out if 'train' in config else None
  if (
    path and not _is_run_data(config, about) and not paths.locate(path).exists()
  ):
    log.warning(
      'train.leave_out: %s does not exist, so no example is left out. If these '
      'are the data of the run at another place, give '
      '--config.train.leave_out=PATH.',
      path,
    )
    return None
  return path


def _train_split(about: dict[str, Any]) -> str:
  """Returns the training split of a run; 'train' for foreign weights."""
  return about.get('config', {}).get('train', {}).get('split', 'train')


def _open(
  config: Config, weights: pretrained.Pretrained, split: str
) -> stream.Source:
  """Opens the data, and maps its labels to the classes of the head.

  Raises:
    UserError: the data has more classes than the head, or other classes.
  """
  num_classes = weights.about['num_classes']
  source = build_section(config, 'source', split)
  if 0 < num_classes < source.num_classes:
    raise UserError(
      f'{source.name} has {source.num_classes} classes, but the head has '
      f'{num_classes}: fine-tune on these data first.'
    )
  names = weights.about['class_names']
  return matching.matched(source, names, weights.path)


def _write_tables(directory: str, name: str, tables: dict[str, str]) -> None:
  """Writes the tables of an evaluator, on the main process only."""
  if runtime.is_main():
    for file, text in tables.items():
      atomic.save(paths.locate(directory) / f'{name}_{file}', text)


def main(arguments: list[str]) -> None:
  """Prints the result as lines or as JSON, and writes it with --out."""
  values = flags.FLAGS
  if arguments or not values.checkpoint:
    raise UserError(
      'usage: python -m vit_jax.evaluate --checkpoint=PATH [--evaluator=NAME '
      '--dataset=NAME --split=S --json], without other arguments; got '
      f'--checkpoint={values.checkpoint} and {arguments}.'
    )
  process.start_process()
  result = run(
    weights_flags.path(values),
    evaluator=values.evaluator,
    dataset=values.dataset,
    split=values.split,
    data_dir=values.data_dir,
    batch_size=values.batch_size,
    image_size=weights_flags.image_size(values),
    preprocess=values.preprocess,
    settings=values.overrides,
    tables=values.tables,
  )
  if not runtime.is_main():
    return
  if values.out:
    atomic.save(paths.locate(values.out), json.dumps(result))
  if values.json:
    print(json.dumps(result))
  else:
    result['preprocess'] = preprocessing_flags.line(result['preprocess'])
    for name, value in result.items():
      text = f'{value:.6g}' if isinstance(value, float) else value
      print(f'{name}: {text}')


if __name__ == '__main__':
  process.run(main, define_flags)
