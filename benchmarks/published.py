"""Compares predicted speeds with speeds that others measured and published.

  python benchmarks/published.py [PATTERN ...] [--jsonl=FILE]

Each row of published.csv is a model on a device. The script compiles this
project's program for the same device, batch, image size and 16-bit precision,
and prints published and predicted images per second as a Markdown table for
benchmarks/RESULTS.md. No device is needed, but the compilers are: the extra
`plan-gpu` for GPUs, `plan` for TPUs; 20 seconds to three minutes per row.
PATTERN is a regular expression that device, model and program must contain.
--jsonl adds the results to a file, whose rows are not computed again.

"before" is the model of GPUs of 2026-11-24, whose rates were assumptions. The
model of today was fitted to the rows in `FITTED`, so all other rows show its
error. The published programs are not this project's: PyTorch adds kernel
launches and passes over memory that XLA fuses, and the trainings of big_vision
include reading images and evaluation. A ratio outside [1/FLAG, FLAG] is marked:
then a number or the description of its row is probably wrong.
"""

import argparse
import ast
import csv
import json
import pathlib
import re
import statistics
from typing import Any

from vit_jax.plan import environment

ROWS = pathlib.Path(__file__).with_name('published.csv')
FLAG = 1.5
# The step of `plain_flax.py`, which is written like big_vision's.
PLAIN = 'training in plain Flax'
FITTED = (
  ('h200:1x1', 'B/16', 'training'),
  *(
    ('rtx4090:1x1', model, 'inference')
    for model in ('B/16', 'L/16', 'H/14', 'B/8')
  ),
)
HEAD = (
  'device',
  'model',
  'program',
  'batch',
  'published',
  'predicted before',
  'predicted (range)',
  'predicted / published',
)


def read() -> list[dict[str, str]]:
  """Returns the rows of published.csv."""
  with ROWS.open() as file:
    return list(csv.DictReader(file))


def key(row: dict[str, Any]) -> tuple[str, str, str]:
  """Returns the columns that identify a row."""
  return row['device'], row['model'], row['program']


def changes(row: dict[str, str]) -> dict[str, Any]:
  """Returns the changed keys of a row's config; texts need no quotes."""
  values: dict[str, Any] = {'batch_size': int(row['batch'])}
  for change in row['changes'].split():
    name, _, text = change.partition('=')
    try:
      values[name] = ast.literal_eval(text)
    except (ValueError, SyntaxError):
      values[name] = text
  if isinstance(values.get('image_size'), int):
    values['image_size'] = (values['image_size'],) * 2
  return values


def predict(row: dict[str, str]) -> dict[str, Any]:
  """Compiles the program of a row; returns its images per second.

  Returns:
    `before`, `now`, `low` and `high`, all on all devices; `before` is None for
    TPUs. {} if the program does not fit.
  """
  import inference
  import plain_flax

  from vit_jax.config import loading
  from vit_jax.plan import compile, topology

  target = topology.find(row['device'])
  config = compile.changed(loading.load(row['config']), **changes(row))
  images, devices = int(row['batch']), len(target.devices)
  if row['program'] == PLAIN:
    text = plain_flax.compiled(config, target).as_text() or ''
  elif row['program'] == 'training':
    planned = compile.plan(config, target)
    text = planned.text if planned.fits else ''
  else:
    program = inference.compiled(config, target, images // devices)
    text = program[0] if program else ''
  if not text:
    return {}
  total, before = compile.cost_of(text, target), None
  if target.on_gpus:
    before = seconds_before(text, target)
  low, high = total.predicted_step_seconds_range or (
    total.predicted_step_seconds,
    total.predicted_step_seconds,
  )
  return {
    'before': before and images / before,
    'now': images / total.predicted_step_seconds,
    'low': images / high,
    'high': images / low,
  }


def seconds_before(text: str, target: Any) -> float:
  """Returns the time of the kernels by the model of 2026-11-24.

  It had one fixed time, and fractions that did not depend on GPU and kernel.
  """
  from vit_jax.plan import cost, gpu_cost, hlo

  module, total, gpu = hlo.parse(text), 0.0, target.device
  for op, _, times in hlo.executions(module):
    if op.opcode in gpu_cost.FREE or cost.collective(op):
      continue
    work = gpu_cost.kernel(module, op)
    fraction = 0.30 if work.kind == 'attention' else 0.70
    compute = work.flops / (fraction * gpu.peak_flops)
    total += times * (2e-6 + max(compute, work.bytes / 0.90 / gpu.bytes_per_s))
  return total


def is_flagged(ratio: float) -> bool:
  """Returns whether a ratio is too far from 1 to be an error of the model."""
  return not 1 / FLAG <= ratio <= FLAG


def line(row: dict[str, str], result: dict[str, Any]) -> str:
  """Returns the row of the Markdown table."""
  published = float(row['images_per_s'])
  first = [*key(row), row['batch'], f'{published:,.0f}']
  if not result:
    return '| ' + ' | '.join([*first, '', 'does not fit', '']) + ' |'
  ratio = result['now'] / published
  before = f'{result["before"]:,.0f}' if result['before'] else ''
  limits = f'({result["low"]:,.0f} to {result["high"]:,.0f})'
  mark = ' (check this row)' if is_flagged(ratio) else ''
  last = [before, f'{result["now"]:,.0f} {limits}', f'{ratio:.2f}{mark}']
  return '| ' + ' | '.join([*first, *last]) + ' |'


def summary(results: list[tuple[dict[str, str], dict[str, Any]]]) -> list[str]:
  """Returns sentences with the errors of the rows that were not fitted."""
  sentences = []
  for program in ('inference', 'training', PLAIN):
    ratios = {
      key(row): result['now'] / float(row['images_per_s'])
      for row, result in results
      if result and row['program'] == program and key(row) not in FITTED
    }
    if not ratios:
      continue
    errors = {name: abs(ratio - 1) for name, ratio in ratios.items()}
    worst = max(errors, key=lambda name: errors[name])
    sentences.append(
      f'{program}: {len(ratios)} rows, median ratio '
      f'{statistics.median(ratios.values()):.2f}, median error '
      f'{100 * statistics.median(errors.values()):.0f} %, worst '
      f'{100 * errors[worst]:.0f} % ({" ".join(worst[:2])})'
    )
  return sentences


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument('patterns', nargs='*', metavar='PATTERN')
  parser.add_argument('--jsonl', type=pathlib.Path)
  arguments = parser.parse_args()
  rows = [
    row
    for row in read()
    if all(re.search(p, ' '.join(key(row))) for p in arguments.patterns)
  ]
  known: dict[Any, dict[str, Any]] = {}
  if arguments.jsonl and arguments.jsonl.exists():
    for text in arguments.jsonl.read_text().splitlines():
      *name, result = json.loads(text)
      known[tuple(name)] = result
  environment.prepare(())
  print(f'| {" | ".join(HEAD)} |\n{"|---" * len(HEAD)}|')
  results = []
  for row in rows:
    if key(row) not in known:
      known[key(row)] = predict(row)
      if arguments.jsonl:
        with arguments.jsonl.open('a') as file:
          file.write(json.dumps([*key(row), known[key(row)]]) + '\n')
    results.append((row, known[key(row)]))
    print(line(*results[-1]), flush=True)
  print('\n' + '\n'.join(summary(results)))


if __name__ == '__main__':
  main()
