"""Predicts Figure 12 of the paper: speed and memory of inference by image size.

  python benchmarks/inference.py [--models=ViT-B/16,…] [--sizes=64,224,…]
    [--topology=v3:1x1] [--csv=FILE] [--out=FILE.png] [--again]

Compiles only the forward pass (`Objective.predict`, bfloat16, uint8 images,
1,000 classes) for one chip, and prints the largest batch per core, a power of
two, whose program fits in the memory of a core, and the images per second and
core: the highest of the batches that were compiled. These are 512 and the batch
that its memory predicts to be the largest; others are compiled only if 512 does
not fit or the prediction is wrong. Nothing is run on an accelerator. Rows that
the CSV file contains are not computed again, or with --again, only those of
today. The table for benchmarks/RESULTS.md has the date of the oldest cell of
each row. --topology=h100:1x1 predicts a GPU (see docs/gpus.md).

The models are those of the figure, hybrids, and the models of Figure 13.

An image size that is not a multiple of the patch size is reduced to one: H/14
has 56, 126, 378 and 504 pixels in place of 64, 128, 384 and 512.
"""

import argparse
import collections
import csv
import datetime
import pathlib
import sys
from typing import Any

from vit_jax.plan import environment

VIT, RESNET = 'configs/vit.py:data=jft,variant=', 'configs/resnet.py:variant='
AXIAL = 'examples/axial.py:variant='
MODELS = {
  **{f'ViT-{v}': f'{VIT}{v}' for v in ('B/32', 'L/32', 'B/16', 'L/16', 'H/14')},
  **{v: f'{RESNET}{v}' for v in ('R50x1', 'R50x2')},
  'R152x4': f'{RESNET}R152x2',  # Table 3 has no R152x4; see CHANGES
  **{f'R50+ViT-{v}': f'{VIT}R50+{v}' for v in ('B/32', 'B/16', 'L/32', 'L/16')},
  **{f'Axial-ViT-{v}': f'{AXIAL}{v}' for v in ('B/32', 'B/16')},
  'AxialResNet50': f'{AXIAL}R50',
}
CHANGES = {'R152x4': {'model__variant': 'R152x4'}}
SIZES = (64, 128, 224, 384, 512)
COLUMNS = (
  'topology',
  'model',
  'pixels',
  'images_per_second',
  'at_batch',
  'largest_batch',
  'bytes_per_image',
  'date',
)
_FIRST = 512  # images per core of the first program
_SMALL = 8  # images per core of the next program, if the first does not fit
_MOST = 2**14  # largest batch per core that is tried
_REDUCIBLE = 1.25  # expected bytes, relative to the memory, that are tried


def predict(config: Any, target: Any, per_core: int) -> dict[str, float] | None:
  """Predicts speed and memory of the forward pass for a batch.

  Args:
    config: completed config.
    target: devices of `plan`.
    per_core: images per device.

  Returns:
    `rate` (images per second and device), `peak` and `weights` (bytes per
    device), or None if the program does not fit.
  """
  from vit_jax.plan import compile

  program = compiled(config, target, per_core)
  if program is None:
    return None
  text, peak, weights = program
  seconds = compile.cost_of(text, target).predicted_step_seconds
  assert seconds is not None
  return {'rate': per_core / seconds, 'peak': peak, 'weights': weights}


def compiled(
  config: Any, target: Any, per_core: int
) -> tuple[str, int, int] | None:
  """Compiles the forward pass; see `predict`.

  Returns:
    The optimized program, its peak and the weights in bytes per device; None if
    it does not fit.
  """
  import jax

  from vit_jax.arrays import memory
  from vit_jax.plan.compile import GPU_OPTIONS, changed
  from vit_jax.training.experiment import Experiment

  devices = len(target.devices)
  config = changed(config, batch_size=per_core * devices, micro_batches=1)
  experiment = Experiment.build(config, target.devices)
  platform = experiment.mesh.devices.flat[0].platform
  options = experiment.model.compiler_options(platform, devices)
  options |= GPU_OPTIONS if target.on_gpus else {}
  with jax.set_mesh(experiment.mesh):
    params = experiment.abstract_state.params
    batch = {'image': experiment.abstract_batch()['image']}
    predict = jax.jit(experiment.objective.predict, compiler_options=options)
    try:
      program = predict.lower(params, batch).compile()
    except jax.errors.JaxRuntimeError as error:
      if 'RESOURCE_EXHAUSTED' not in str(error):
        raise
      return None
  sizes = memory.program_bytes(program)
  assert sizes is not None and target.hbm_bytes is not None
  if sizes['peak'] > target.hbm_bytes:
    return None
  return program.as_text(), sizes['peak'], memory.tree_bytes(params)


def row(name: str, pixels: int, target: Any) -> dict[str, Any]:
  """Finds the largest batch of a model at an image size, and its speed."""
  from vit_jax.config import loading
  from vit_jax.plan.compile import changed

  config = loading.load(MODELS[name])
  side = pixels // _patch(name) * _patch(name)
  config = changed(
    config,
    image_size=(side, side),
    num_classes=1_000,
    # Scanned layers compile in a fraction of the time.
    **({'model__unroll': 1} if 'unroll' in config.model else {}),
    **CHANGES.get(name, {}),
  )
  made = {_FIRST: predict(config, target, _FIRST)}
  batch = largest_batch(made, config, target)
  known = {n: result['rate'] for n, result in made.items() if result}
  best = max(known, key=lambda n: known[n]) if known else 0
  return {
    'topology': target.name,
    'model': name,
    'pixels': pixels,
    'images_per_second': f'{known[best]:.4g}' if known else '',
    'at_batch': best,
    'largest_batch': batch,
    'bytes_per_image': round(bytes_per_image(made)),
    'date': datetime.date.today().isoformat(),
  }


def largest_batch(made: dict[int, Any], config: Any, target: Any) -> int:
  """Finds the largest batch per core that fits, a power of two.

  Args:
    made: predictions by batch; None for programs that do not fit. Predictions
      for other batches are added.
    config: completed config.
    target: devices of `plan`.
  """
  if not any(made.values()):
    size = _SMALL
    while size and fits(made, size, config, target) is None:
      size //= 2
  batch = max((size for size in made if made[size]), default=0)
  if not batch:
    return 0
  guess = batch
  while guess < _MOST and expected_bytes(made, 2 * guess) <= target.hbm_bytes:
    guess *= 2
  while guess > batch and fits(made, guess, config, target) is None:
    guess //= 2
  # The compiler reduces the memory of a program that is slightly too large.
  limit = _REDUCIBLE * target.hbm_bytes
  while (
    guess < _MOST
    and expected_bytes(made, 2 * guess) <= limit
    and fits(made, 2 * guess, config, target)
  ):
    guess *= 2
  return guess


def expected_bytes(made: dict[int, Any], batch: int) -> float:
  """Extrapolates the memory of a larger batch linearly."""
  largest = max(size for size in made if made[size])
  rest = (batch - largest) * bytes_per_image(made)
  return made[largest]['peak'] + rest


def bytes_per_image(made: dict[int, Any]) -> float:
  """Returns the increase of memory per image; 0 if nothing fits.

  If only one batch fits, the memory that does not depend on the batch is
  assumed to be that of the weights in float32 and in bfloat16.
  """
  sizes = sorted(size for size in made if made[size])[-2:]
  if not sizes:
    return 0.0
  peaks = [made[size]['peak'] for size in sizes]
  if len(sizes) == 1:
    return (peaks[0] - 1.5 * made[sizes[0]]['weights']) / sizes[0]
  return (peaks[1] - peaks[0]) / (sizes[1] - sizes[0])


def fits(made: dict[int, Any], batch: int, config: Any, target: Any) -> Any:
  """Returns the prediction for a batch, which is computed only once."""
  if batch not in made:
    made[batch] = predict(config, target, batch)
  return made[batch]


def _patch(name: str) -> int:
  """Returns the patch size in the name of a ViT; 1 for a ResNet."""
  return int(name.rpartition('/')[2]) if '/' in name else 1


def table(rows: list[dict[str, Any]]) -> str:
  """Returns Markdown: images per second and largest batch by image size."""
  sizes = sorted({int(each['pixels']) for each in rows})
  lines = [
    f'| model | {" | ".join(f"{size} px" for size in sizes)} | date |',
    '|' + '---|' * (len(sizes) + 2),
  ]
  for name in dict.fromkeys(each['model'] for each in rows):
    own = {int(r['pixels']): r for r in rows if r['model'] == name}
    cells = [
      f'{float(own[s]["images_per_second"] or 0):,.0f}; '
      f'{int(own[s]["largest_batch"]):,}'
      if s in own
      else ''
      for s in sizes
    ]
    date = min(each['date'] for each in own.values())
    lines.append(f'| {name} | {" | ".join(cells)} | {date} |')
  return '\n'.join(lines)


def draw(rows: list[dict[str, Any]], path: str) -> None:
  """Draws both panels of Figure 12 with logarithmic axes.

  Models with a single image size are left out.
  """
  from vit_jax.analysis import plotting

  figure = plotting.new_figure(8, 3.6)
  panels = (
    ('images_per_second', 'images per second and core, predicted'),
    ('largest_batch', 'largest batch per core, predicted\n(lines are shifted)'),
  )
  counts = collections.Counter(each['model'] for each in rows)
  names = [name for name, count in counts.items() if count > 1]
  rows = [each for each in rows if each['model'] in names]
  sizes = sorted({int(each['pixels']) for each in rows})
  for number, (key, label) in enumerate(panels):
    axes = figure.add_subplot(1, 2, number + 1)
    for index, name in enumerate(names):
      # The largest batches of several models are equal: they are shifted, so
      # that all lines can be seen.
      shift = index - (len(names) - 1) / 2 if key == 'largest_batch' else 0
      own = sorted(
        (int(r['pixels']), float(r[key] or 0) * 2 ** (0.08 * shift))
        for r in rows
        if r['model'] == name and float(r[key] or 0)
      )
      plotting.line(axes, tuple(zip(*own, strict=True)), index, name)
    axes.set_xscale('log', base=2)
    axes.set_yscale('log', base=2 if key == 'largest_batch' else 10)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    plotting.describe(axes, 'image size, pixels', label)
  plotting.legend(figure, 'outside lower center', 6)
  pathlib.Path(path).write_bytes(plotting.png(figure))


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or '').split('\n')[0])
  parser.add_argument('--models', default=','.join(MODELS))
  parser.add_argument('--sizes', default=','.join(map(str, SIZES)))
  parser.add_argument('--topology', default='v3:1x1')
  parser.add_argument('--csv', default='benchmarks/inference.csv')
  parser.add_argument('--out', help='draw a picture to this .png')
  parser.add_argument(
    '--again', action='store_true', help='replace rows of earlier days'
  )
  arguments = parser.parse_args()
  from vit_jax.plan import topology

  target = topology.find(arguments.topology)
  path = pathlib.Path(arguments.csv)
  lines = path.read_text().splitlines() if path.exists() else []
  rows = list(csv.DictReader(lines))
  cells = {(r['topology'], r['model'], int(r['pixels'])): r for r in rows}
  today = datetime.date.today().isoformat()
  for name in arguments.models.split(','):
    for pixels in map(int, arguments.sizes.split(',')):
      key = (target.name, name, pixels)
      if key in cells and not (arguments.again and cells[key]['date'] < today):
        continue
      cells[key] = row(name, pixels, target)
      print(cells[key], file=sys.stderr, flush=True)
      with path.open('w') as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator='\n')
        writer.writeheader()
        writer.writerows(cells.values())
  rows = [each for each in cells.values() if each['topology'] == target.name]
  print(f'{target.name}: images per second and core; largest batch per core\n')
  print(table(rows))
  if arguments.out:
    draw(rows, arguments.out)


if __name__ == '__main__':
  environment.prepare(sys.argv)
  main()
