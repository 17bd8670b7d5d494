"""Checks all data of a config: python -m vit_jax.check_data --config=….

python -m vit_jax.check_data --config=configs/folder.py:path=photos

Decodes every example of the splits for training and evaluation; prints classes,
counts, sizes, mean and standard deviation of each channel, duplicates (also
between training and evaluation) and unusable examples; and writes summary.json,
bad.jsonl, duplicates.jsonl and ignored.txt to --out. After an interruption, the
same command continues; after it has finished, it starts from the beginning.
"""

import json
import logging
import sys
import time
from typing import Any

import numpy as np
from absl import flags
from etils import epath

from vit_jax.cli import entry, process
from vit_jax.config import overrides
from vit_jax.config.completion import Config
from vit_jax.config.sections import build_section
from vit_jax.data import inspection
from vit_jax.errors import UserError
from vit_jax.files import paths

log = logging.getLogger('vit_jax')
_PROGRESS_S = 10  # time between two lines of progress
_MAX_PRINTED = 10  # number of classes
_UNFINISHED = 'unfinished.jsonl'


def define_flags() -> None:
  """Defines the flags of this command."""
  flags.DEFINE_string('out', 'data_check', 'Directory for the results.')
  overrides.define_flag(sys.argv)


def run(config: Config, out: str) -> dict[str, Any]:
  """Checks the data of a config.

  Args:
    config: completed config.
    out: local directory for the results.

  Returns:
    splits: {split: examples, bad, classes: {name: count}, heights and widths:
    [minimum, median, maximum], mean and std: of each channel, for pixels in
    [0, 1]}; duplicates (number of groups of examples with
    the same pixels), leaks (groups both in training and in evaluation),
    other_label (groups with different labels), ignored (number of files).

  Raises:
    UserError: a split cannot be opened, or files cannot be written.
  """
  folder = paths.locate(out)
  if paths.is_remote(folder):
    raise UserError(f'--out={out} is remote: give a local directory.')
  path = folder / _UNFINISHED
  names = [config.train.split, *(e.split for e in config.evals.values())]
  sources = {
    split: build_section(config, 'source', split)
    for split in dict.fromkeys(names)
  }
  threads = build_section(config, 'reader').thread_count
  section = config.preprocess
  kind = (section.channels, section.bits) if 'channels' in section else (3, 8)
  found = {
    split: inspection.inspect(
      source, split, path, threads, _progress(source.name, len(source)), kind
    )
    for split, source in sources.items()
  }
  groups = [
    [_example(split, index, sources, found) for split, index in group]
    for group in inspection.duplicates(found)
  ]
  ignored = sorted(
    {path for source in sources.values() for path in _ignored(source)}
  )
  summary = {
    'splits': {
      split: _summary(sources[split], found[split]) for split in found
    },
    'duplicates': len(groups),
    'leaks': sum(_leaks(group, config.train.split) for group in groups),
    'other_label': sum(len({e['class'] for e in g}) > 1 for g in groups),
    'ignored': len(ignored),
  }
  bad = [
    {'split': split, **record._asdict()}
    for split, result in found.items()
    for record in result.bad
  ]
  _write(folder / 'summary.json', [json.dumps(summary, indent=2)])
  _write(folder / 'bad.jsonl', map(json.dumps, bad))
  _write(folder / 'duplicates.jsonl', map(json.dumps, groups))
  _write(folder / 'ignored.txt', ignored)
  path.unlink()
  return summary


def _progress(name: str, size: int) -> Any:
  """Returns a function that logs the progress every few seconds."""
  start = last = time.monotonic()
  first = None  # number of examples that an earlier start has checked

  def progress(done: int, bad: int) -> None:
    nonlocal last, first
    now = time.monotonic()
    first = done if first is None else first
    if now - last < _PROGRESS_S and done < size:
      return
    last = now
    text = f'{name}: {done:,} of {size:,} ({done / size:.0%}), {bad:,} bad'
    rate = (done - first) / max(now - start, 1e-3)
    if rate and done < size:
      text += f', {rate:.0f}/s, {(size - done) / rate / 60:.0f} min left'
    log.info(text)

  return progress


def _example(
  split: str, index: int, sources: dict[str, Any], found: dict[str, Any]
) -> dict[str, Any]:
  """Describes an example for duplicates.jsonl."""
  source, label = sources[split], int(found[split].labels[index])
  location = getattr(source, 'where', lambda _: '')(index)
  name = source.class_names[label]
  return {'split': split, 'index': index, 'where': location, 'class': name}


def _ignored(source: Any) -> list[str]:
  """Returns the files that a source leaves out, if it lists them."""
  return getattr(source, 'ignored', list)()


def _leaks(group: list[dict[str, Any]], train: str) -> bool:
  """Returns whether equal images are in the training data and elsewhere.

  Args:
    group: examples with the same image; each has a `split`.
    train: name of the training split.
  """
  splits = {example['split'] for example in group}
  return train in splits and len(splits) > 1


def _summary(source: Any, found: inspection.Found) -> dict[str, Any]:
  """Returns counts and sizes of a split."""
  good = found.labels >= 0
  counts = np.bincount(found.labels[good], minlength=source.num_classes)
  sizes: dict[str, Any] = {
    key: [int(f(values[good])) for f in (np.min, np.median, np.max)]
    for key, values in (('heights', found.heights), ('widths', found.widths))
    if good.any()
  }
  if good.any():
    sizes['mean'], sizes['std'] = found.mean_and_std()
  names = list(source.class_names)
  return {
    'examples': len(source),
    'bad': len(found.bad),
    'classes': dict(zip(names, counts.tolist(), strict=False)),
    **sizes,
  }


def _write(path: epath.Path, lines: Any) -> None:
  path.write_text(''.join(f'{line}\n' for line in lines))


def _lines(summary: dict[str, Any], out: str) -> list[str]:
  """Formats the summary as text."""
  lines = []
  for split, part in summary['splits'].items():
    counts = sorted(part['classes'].items(), key=lambda item: item[1])
    lines.append(
      f'{split}: {part["examples"]:,} examples, {part["bad"]:,} bad, '
      f'{len(counts):,} classes'
    )
    if 'heights' in part:
      low, middle, high = (
        f'{x}x{y}' for y, x in zip(part['heights'], part['widths'], strict=True)
      )
      lines.append(
        f'  width x height: smallest {low}, median {middle}, largest {high}'
      )
      mean, std = (','.join(map(str, part[key])) for key in ('mean', 'std'))
      lines.append(f'  mean of each channel: {mean}; std: {std}')
    texts = [f'{name} {count:,}' for name, count in counts]
    if len(texts) > _MAX_PRINTED:
      half = _MAX_PRINTED // 2
      texts = [*texts[:half], '…', *texts[-half:]]
    lines.append(f'  examples per class: {", ".join(texts)}')
  lines.append(
    f'groups of images with the same pixels: {summary["duplicates"]:,}; '
    f'{summary["leaks"]:,} both in training and in evaluation, '
    f'{summary["other_label"]:,} with different labels'
  )
  lines.append(f'files left out: {summary["ignored"]:,}')
  lines.append(
    f'lists: {out}/bad.jsonl, duplicates.jsonl, ignored.txt, summary.json'
  )
  return lines


def main(arguments: list[str]) -> None:
  """Checks the data of the config and prints a summary."""
  entry.refuse_arguments(arguments)
  values = flags.FLAGS
  summary = run(values.config, values.out)
  print('\n'.join(_lines(summary, values.out)))


if __name__ == '__main__':
  process.run(main, define_flags)
