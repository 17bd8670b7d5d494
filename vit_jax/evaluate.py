"""Evaluates a checkpoint exactly: python -m vit_jax.evaluate --checkpoint=PATH.

Preprocessing, data, class count and what to do about bad records come from the
checkpoint. Other data: --dataset=NAME (of TFDS), or --dataset=folder
--data_dir=photos --split=train, or any other source; further keys of the source
and the reader as in training: --config.source.class_map=names.txt
--config.reader.on_bad_record=skip. Preprocessing of another family of weights:
--preprocess=mae, or --config.preprocess.KEY=…; the result says which it was.
Where an average of weights was kept, or a teacher, it is evaluated too.
"""

import functools
import json
import logging
import sys
from collections.abc import Sequence
from typing import Any

import jax
from absl import flags
from etils import epath

from vit_jax.arrays import sharding
from vit_jax.cli import data_flags, preprocessing_flags, process, weights_flags
from vit_jax.config import overrides, plugins
from vit_jax.config.completion import (
  EVALS,
  MAX_BATCH_SIZE,
  Config,
  flatten,
)
from vit_jax.config.sections import build_section
from vit_jax.data import matching
from vit_jax.data.pipeline import stream
from vit_jax.errors import UserError, check_range, closest
from vit_jax.files import atomic, jsonl, paths
from vit_jax.processes import runtime
from vit_jax.training.figures import Figures
from vit_jax.weights import pretrained

log = logging.getLogger('vit_jax')
_UNSAID = {'name': 'classification', 'split': ''}


def define_flags() -> None:
  """Defines the flags of this command."""
  flags.DEFINE_string(
    'checkpoint', None, 'Workdir, checkpoint step directory or weight file.'
  )
  flags.DEFINE_string(
    'evaluator',
    None,
    "One of the run's evaluators by its name in config.evals, or a kind of "
    "evaluator; default: the run's first.",
  )
  flags.DEFINE_string(
    'dataset',
    None,
    "TFDS name, or a source (folder, tar, …); default: the checkpoint's.",
  )
  flags.DEFINE_string('split', None, "Split; default: the evaluator's.")
  flags.DEFINE_string(
    'data_dir', None, 'The TFDS directory, or the path of another source.'
  )
  weights_flags.define_step()
  preprocessing_flags.define_flag()
  flags.DEFINE_integer('batch_size', 128, 'Images at once, on all devices.')
  flags.DEFINE_bool('json', False, 'Print one JSON object.')
  flags.DEFINE_string('out', None, 'File for the same object, written whole.')
  flags.DEFINE_multi_string(
    'overrides',
    overrides.take(sys.argv),
    'Set by --config.source.KEY=…, --config.reader.KEY=…, '
    '--config.preprocess.KEY=… and --config.evals.NAME.KEY=….',
  )
  process.define_distributed_flags()


def run(
  checkpoint: str,
  *,
  evaluator: str | None = None,
  dataset: str | None = None,
  split: str | None = None,
  data_dir: str | None = None,
  batch_size: int = 128,
  preprocess: str | None = None,
  settings: Sequence[str] = (),
) -> dict[str, Any]:
  """Evaluates all weights of a checkpoint.

  Args:
    checkpoint: workdir, step directory or weights of any format.
    evaluator: name in the run's `config.evals`, or a kind; by default the first
      one that evaluates weights.
    dataset: TFDS name or kind of source; by default the checkpoint's own data.
    split: split of the data set; by default the evaluator's.
    data_dir: the TFDS directory, or the path of another source.
    batch_size: images per batch; rounded up to a multiple of the number of
      devices.
    preprocess: a preset; by default the preprocessing of the weights.
    settings: overrides such as '--config.source.KEY=value', also for the reader
      (by default, the run's settings for bad records apply), preprocessing and
      the evaluator.

  Returns:
    checkpoint, data, preprocess, accuracy, loss and count; if an average of the
    weights is stored, also ema/accuracy and so on, and similarly for other
    weights (teacher/accuracy).

  Raises:
    UserError: there is no such checkpoint or data, or no evaluator applies.
  """
  check_range('--batch_size', batch_size, at_least=1, at_most=MAX_BATCH_SIZE)
  found = pretrained.find(checkpoint)
  weights = preprocessing_flags.by_preset(found, preprocess)
  about = weights.about
  name, section = _evaluator_section(about, evaluator)
  sections = {
    'source': data_flags.source_section(about, dataset, data_dir),
    'reader': data_flags.reader_section(about),
    'preprocess': {'name': 'transforms', **about['preprocess']},
    f'evals.{name}': section | ({'split': split} if split else {}),
  }
  config = overrides.apply(sections, list(settings))
  chosen = _choose_split(config, name, about, split)
  mesh = sharding.make_mesh(jax.devices())
  built = _build(weights, config, name, mesh, batch_size)
  source = config.source
  result: dict[str, Any] = {
    'checkpoint': weights.path,
    'data': f'{data_flags.title(source)}/{chosen}',
    'preprocess': preprocessing_flags.described(weights, config),
  }
  with jax.set_mesh(mesh):
    for ending, params in weights.weights(mesh).items():
      prefix = f'{ending.lstrip("_")}/' if ending else ''
      scores = built.run(params)
      result |= {prefix + key: value for key, value in scores.items()}
  return result


def _build(
  weights: pretrained.Pretrained,
  config: Config,
  name: str,
  mesh: Any,
  batch_size: int,
) -> Any:
  """Builds the evaluator on its data.

  An evaluator that needs no head, such as few-shot regression, uses the classes
  of the data.
  """
  opened = functools.partial(_open, config, weights)
  setting = data_flags.setting(weights, config, opened, mesh, batch_size)
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
    if section.get('train_split', '') is None and _is_own_data(
      config, weights.about
    ):
      section['train_split'] = _train_split(weights.about)
  return plugins.build(kind, section, setting)


def _evaluator_section(
  about: dict[str, Any], wanted: str | None
) -> tuple[str, dict[str, Any]]:
  """Returns the name and the section of the evaluator."""
  evals = about.get('config', {}).get('evals', {})

  def judges(name: str) -> bool:
    return plugins.resolve(EVALS, evals[name]['name']) is not Figures

  name = wanted or next(filter(judges, evals), _UNSAID['name'])
  if name in evals:
    section = dict(evals[name])
  elif '.' in name or name in plugins.names(EVALS):
    section = {'name': name}
    name = name.rpartition('.')[2]
  else:
    near = closest(name, [*evals, *plugins.names(EVALS)])
    raise UserError(f'--evaluator={name} is no evaluator; {near}.')
  section.pop('batch_size', None)  # of the run's devices
  return name, _UNSAID | section


def _choose_split(
  config: Config, name: str, about: dict[str, Any], given: str | None
) -> str:
  """Returns the split.

  The run's own split is used only with the run's own data.
  """
  section = config.evals[name]
  if 'split' not in section:  # an evaluator of one's own, perhaps
    return 'all'
  evals = about.get('config', {}).get('evals', {})
  own = evals.get(name, {}).get('split', '')
  is_own = _is_own_data(config, about)
  if not section.split and is_own:
    # Another kind of evaluator than the run's: the split that the run's use.
    splits = (each.get('split', '') for each in evals.values())
    section.split = next(filter(None, splits), '')
  if not section.split or (not is_own and not given and section.split == own):
    hint = f" (on its own data the run's {name} takes {own!r})" if own else ''
    raise UserError(
      '--split is missing: which split to evaluate on, as in --split=test'
      f'{hint}.'
    )
  return section.split


def _is_own_data(config: Config, about: dict[str, Any]) -> bool:
  """Returns whether the source is that of the run."""
  before, now = flatten(about.get('source', {})), flatten(config.source)
  return all(
    now[key] == before.get(key)
    for key in now
    if key.rpartition('.')[2] in ('name', 'dataset', 'path')
  )


def _train_split(about: dict[str, Any]) -> str:
  """Returns the training split of a run; 'train' for foreign weights."""
  return about.get('config', {}).get('train', {}).get('split', 'train')


def _open(
  config: Config, weights: pretrained.Pretrained, split: str
) -> stream.Source:
  """Opens the data, with labels that are numbers of the head's classes."""
  num_classes = weights.about['num_classes']
  source = build_section(config, 'source', split)
  if 0 < num_classes < source.num_classes:
    raise UserError(
      f'{source.name} has {source.num_classes} classes and the head '
      f'{num_classes}: fine-tune on it first.'
    )
  names = weights.about['class_names']
  return matching.matched(source, names, weights.path)


def _write(path: epath.Path, result: dict[str, Any]) -> None:
  with jsonl.access(path, 'written'):
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write(path, json.dumps(result))


def main(arguments: list[str]) -> None:
  """Prints the result, as lines or as JSON, and writes it if asked to."""
  values = flags.FLAGS
  if arguments or not values.checkpoint:
    raise UserError(
      'usage: python -m vit_jax.evaluate --checkpoint=PATH [--evaluator=NAME '
      '--dataset=NAME --split=S --json]: flags only; got checkpoint '
      f'{values.checkpoint!r}, besides {arguments}.'
    )
  process.start_process()
  result = run(
    weights_flags.path(values),
    evaluator=values.evaluator,
    dataset=values.dataset,
    split=values.split,
    data_dir=values.data_dir,
    batch_size=values.batch_size,
    preprocess=values.preprocess,
    settings=values.overrides,
  )
  if not runtime.is_main():
    return
  if values.out:
    _write(paths.locate(values.out), result)
  if values.json:
    print(json.dumps(result))
  else:
    result['preprocess'] = preprocessing_flags.line(result['preprocess'])
    for name, value in result.items():
      shown = f'{value:.6g}' if isinstance(value, float) else value
      print(f'{name}: {shown}')


if __name__ == '__main__':
  process.run(main, define_flags)
