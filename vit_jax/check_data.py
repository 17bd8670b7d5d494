"""Checks all data of a config: python -m vit_jax.check_data --config=….

python -m vit_jax.check_data --config=configs/folder.py:path=photos

Decodes every example of the splits for training and evaluation; prints classes,
counts, sizes, mean and standard deviation of each channel, duplicates (also
between training and evaluation) and unusable examples; and writes summary.json,
bad.jsonl, duplicates.jsonl and ignored.txt to --out.

With --against=SECTION, it also finds training images that are the same as, or
similar to, images of a test set, and writes them to overlap.jsonl. The key
train.leave_out leaves the listed images out of the training.
"""

import json
import logging
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from absl import flags
from etils import epath

from vit_jax.cli import process
from vit_jax.config import loading, overrides
from vit_jax.config.schema import Config, build, build_section
from vit_jax.data import filters, inspection
from vit_jax.data.contract import Source
from vit_jax.data.storage.class_folders import UNLABELLED
from vit_jax.errors import UserError, check_range, closest
from vit_jax.files import paths

log = logging.getLogger('vit_jax')
_MAX_PRINTED = 5  # number of the smallest and of the largest classes printed


def define_flags() -> None:
  """Defines the flags of this command."""
  flags.DEFINE_string('out', 'data_check', 'Directory for the results.')
  flags.DEFINE_multi_string(
    'against',
    [],
    'Data that the training data must not contain: a name in config.evals, or '
    'a config file, for the data of all of its evaluators. Repeat the flag for '
    'several.',
  )
  flags.DEFINE_integer(
    'max_distance',
    inspection.MAX_DISTANCE,
    'Maximum number of different bits (of 64) in the perceptual hashes of two '
    'images that --against considers the same.',
  )
  overrides.define_flag(sys.argv)


def run(
  config: Config,
  out: str,
  against: Sequence[str] = (),
  max_distance: int = inspection.MAX_DISTANCE,
) -> dict[str, Any]:
  """Checks the data of a config.

  Args:
    config: completed config.
    out: local directory for the results.
    against: names in `config.evals`, and config files, whose data the training
      data are compared with.
    max_distance: maximum number of different bits of similar images.

  Returns:
    splits: {split: examples, bad, classes: {name: count}, heights and widths:
    [minimum, median, maximum], mean and std: of each channel, for pixels in
    [0, 1]}; duplicates (number of groups of examples with the same pixels),
    leaks (groups both in training and in evaluation), other_label (groups with
    different labels), ignored (number of files); overlap: {split of `against`:
    same_pixels and similar, numbers of training examples}; remaining (number of
    training examples that are not in the overlap).

  Raises:
    UserError: a split cannot be opened, files cannot be written, a name in
      `against` does not exist, or a training example cannot be listed.
  """
  check_range('--max_distance', max_distance, at_least=0, at_most=63)
  folder = paths.locate(out)
  if paths.is_remote(folder):
    raise UserError(f'--out={out} is remote: give a local directory.')
  channels = config.preprocess.get('channels', 3)
  bits = config.preprocess.get('bits', 8)
  if against and (channels, bits) != (3, 8):
    raise UserError(
      f'--against needs 3 channels of 8 bits, not {(channels, bits)}.'
    )
  split = config.train.split
  train = build_section(config, 'source', split)
  train = filters.without_listed(train, config.train.leave_out)
  tests = _open_against(config, against)
  sources = {split: train}  # the training data come first
  sources |= _open_evaluations(config, config.evals) | tests
  # An evaluator of the same split has replaced it by all of its examples.
  sources[split] = train
  # Errors that should not appear after hours of reading.
  with paths.access(folder, 'written'):
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / 'bad.jsonl', [])
  if against:
    inspection.imagehash()
    filters.checked_rows(train)
  threads = build_section(config, 'reader').thread_count
  results = {
    name: inspection.inspect(source, threads, (channels, bits), bool(against))
    for name, source in sources.items()
  }
  groups = _groups(sources, results)
  splits_of_groups = [{entry['split'] for entry in group} for group in groups]
  classes_of_groups = [{entry['class'] for entry in group} for group in groups]
  copies = {
    test: [*inspection.copies(results, split, test, max_distance)]
    for test in tests
  }
  in_a_test = {copy.index for of_test in copies.values() for copy in of_test}
  overlap_counts = {}
  for test, of_test in copies.items():
    same = sum(copy.same_pixels for copy in of_test)
    overlap_counts[test] = {'same_pixels': same, 'similar': len(of_test) - same}
  ignored = {path for source in sources.values() for path in source.ignored()}
  summary = {
    'splits': {
      name: _summary(sources[name], result) for name, result in results.items()
    },
    'duplicates': len(groups),
    'leaks': sum(
      split in names and len(names) > 1 for names in splits_of_groups
    ),
    'other_label': sum(len(names) > 1 for names in classes_of_groups),
    'ignored': len(ignored),
    'overlap': overlap_counts,
    'remaining': len(train) - len(in_a_test),
  }
  bad = [
    {'split': name, **record._asdict()}
    for name, result in results.items()
    for record in result.bad
  ]
  _write(folder / 'summary.json', [json.dumps(summary, indent=2)])
  _write(folder / 'bad.jsonl', map(json.dumps, bad))
  _write(folder / 'duplicates.jsonl', map(json.dumps, groups))
  _write(folder / 'ignored.txt', sorted(ignored))
  if against:
    entries = _overlap(train, sources, copies)
    _write(folder / 'overlap.jsonl', map(json.dumps, entries))
  return summary


def _write(path: epath.Path, lines: Iterable[str]) -> None:
  """Writes lines to a text file."""
  path.write_text(''.join(f'{line}\n' for line in lines))


def _open_evaluations(
  config: Config, names: Iterable[str]
) -> dict[str, Source]:
  """Opens the data of evaluators.

  Args:
    config: completed config.
    names: names in `config.evals`.

  Returns:
    {split: source}; for an evaluator with a source of its own, {name of the
    source: source}.
  """
  sources = {}
  for section in (config.evals[name] for name in names):
    if section.get('source'):
      source = build('source', section.source, section.split)
      sources[source.name] = source
    elif section.split not in sources:
      sources[section.split] = build_section(config, 'source', section.split)
  return sources


def _open_against(config: Config, against: Sequence[str]) -> dict[str, Source]:
  """Opens the data that --against specifies.

  Returns:
    {split: source}, as in `_open_evaluations`; for another config, {name of the
    source: source}.

  Raises:
    UserError: a value is neither a name in `config.evals` nor a config file.
  """
  sources: dict[str, Source] = {}
  for value in against:
    if value in config.evals:
      sources |= _open_evaluations(config, [value])
    elif re.search(r'\.(py|json)(:|$)', value):
      other = loading.load(value)
      opened = _open_evaluations(other, other.evals).values()
      sources |= {source.name: source for source in opened}
    else:
      raise UserError(
        f'--against={value}: give a config file, or a name in config.evals; '
        f'{closest(value, config.evals)}.'
      )
  return sources


def _located(
  sources: dict[str, Source], split: str, index: int
) -> dict[str, Any]:
  """Describes the location of an example."""
  where = sources[split].where(index)
  return {'split': split, 'index': index, 'where': where}


def _class_names(source: Source) -> Sequence[str]:
  """Returns the names of the classes that are counted.

  Examples without a label, or with several, count as one class.
  """
  is_labelled = 'label' in source.label_keys and source.class_names
  return source.class_names if is_labelled else [UNLABELLED]


def _groups(
  sources: dict[str, Source], results: dict[str, inspection.Found]
) -> list[list[dict[str, Any]]]:
  """Describes the groups of images with the same pixels.

  Each group is a list of examples: split, index, where, and class.
  """
  groups = []
  for group in inspection.duplicates(results):
    groups.append([])
    for split, index in group:
      label = results[split].rows['labels'][index]
      name = {'class': _class_names(sources[split])[label]}
      groups[-1].append(_located(sources, split, index) | name)
  return groups


def _overlap(
  train: Source,
  sources: dict[str, Source],
  copies: dict[str, list[inspection.Copy]],
) -> Iterator[dict[str, Any]]:
  """Yields the lines of overlap.jsonl, see `data.filters`."""
  for test, of_test in copies.items():
    indices = np.array([copy.index for copy in of_test], np.int64)
    entries = filters.list_entries(train, indices)
    for copy, entry in zip(of_test, entries, strict=True):
      yield entry | {
        'distance': copy.distance,
        'same_pixels': copy.same_pixels,
        'copy_of': _located(sources, test, copy.other),
      }


def _summary(source: Source, result: inspection.Found) -> dict[str, Any]:
  """Returns counts, sizes, mean and standard deviation of a split."""
  rows = result.rows[result.usable]
  counts = np.bincount(rows['labels'], minlength=source.num_classes)
  summary: dict[str, Any] = {
    'examples': len(source),
    'bad': len(result.bad),
    'classes': dict(zip(_class_names(source), counts.tolist(), strict=False)),
  }
  if len(rows):
    for key in ('heights', 'widths'):
      functions = (np.min, np.median, np.max)
      summary[key] = [int(function(rows[key])) for function in functions]
    summary['mean'], summary['std'] = result.mean_and_std()
  return summary


def _lines(summary: dict[str, Any], out: str) -> Iterator[str]:
  """Yields the lines of the summary as text."""
  for split, values in summary['splits'].items():
    counts = sorted(values['classes'].items(), key=lambda item: item[1])
    yield (
      f'{split}: {values["examples"]:,} examples, {values["bad"]:,} bad, '
      f'{len(counts):,} classes'
    )
    if 'heights' in values:
      sizes = zip(values['widths'], values['heights'], strict=True)
      low, middle, high = (f'{width}x{height}' for width, height in sizes)
      yield f'  width x height: smallest {low}, median {middle}, largest {high}'
      mean, std = (','.join(map(str, values[key])) for key in ('mean', 'std'))
      yield f'  mean of each channel: {mean}; std: {std}'
    texts = [f'{name} {count:,}' for name, count in counts]
    if len(texts) > 2 * _MAX_PRINTED:
      texts = [*texts[:_MAX_PRINTED], '…', *texts[-_MAX_PRINTED:]]
    yield f'  examples per class: {", ".join(texts)}'
  yield (
    f'groups of images with the same pixels: {summary["duplicates"]:,}; '
    f'{summary["leaks"]:,} both in training and in evaluation, '
    f'{summary["other_label"]:,} with different labels'
  )
  yield f'files left out: {summary["ignored"]:,}'
  for split, counts in summary['overlap'].items():
    yield (
      f'training images that are also in {split}: {counts["same_pixels"]:,} '
      f'with the same pixels, {counts["similar"]:,} similar'
    )
  if summary['overlap']:
    yield (
      f'to train without them: --config.train.leave_out={out}/overlap.jsonl '
      f'--config.train.num_examples={summary["remaining"]}'
    )
  yield f'lists: {out}/bad.jsonl, duplicates.jsonl, ignored.txt, summary.json'


def main(arguments: list[str]) -> None:
  """Checks the data of the config and prints a summary."""
  process.refuse_arguments(arguments)
  values = flags.FLAGS
  summary = run(values.config, values.out, values.against, values.max_distance)
  print('\n'.join(_lines(summary, values.out)))


if __name__ == '__main__':
  process.run(main, define_flags)
