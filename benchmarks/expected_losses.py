"""Measures the first training losses of configs/cifar10.py, with their spread.

  python benchmarks/expected_losses.py [--rows=ViT,DINO] [--seeds=0,1,2]
    [--steps=100]

Starts the command of each row as a user would type it (--list prints them),
with each seed, and stops it by SIGTERM once metrics.jsonl contains the line
of the last step (--steps). The schedule is therefore that of the whole run.
Each logged loss is the mean over the 50 steps since the previous line.

The losses are added to a CSV file. Runs that it contains are not repeated, and
the workdir of a run that was stopped or interrupted is resumed. The teacher of
DeiT is trained first, and is the same for all seeds. With all runs in the file,
the script only prints the table of docs/faq.md: mean ± sample standard
deviation over the seeds.
"""

import argparse
import csv
import json
import pathlib
import shlex
import signal
import statistics
import subprocess
import sys
import time

CONFIG = '--config=configs/cifar10.py'
# The teacher is trained for a minute, so that a user can repeat it.
TEACHER = (
  f'{CONFIG}:model=resnet',
  '--config.total=300 steps',
  '--config.schedule.warmup=50 steps',
)
ROWS = {
  'ViT': (CONFIG,),
  'hybrid': (f'{CONFIG}:model=hybrid',),
  'ResNet': (f'{CONFIG}:model=resnet',),
  'Swin': (f'{CONFIG}:model=swin',),
  'MAE': (f'{CONFIG}:objective=mae',),
  'masked patch': (f'{CONFIG}:objective=masked_patch',),
  'DINO': (f'{CONFIG}:objective=dino',),
  'DeiT': (
    CONFIG,
    '--config.objective.name=distill',
    '--config.objective.teacher=TEACHER',
    '--config.model.pool=token',
    '--config.model.distilled=true',
  ),
}
EVERY = 50  # steps between two lines of the log, the default of log.every
COLUMNS = ('row', 'seed', 'step', 'loss')
PREEMPTED = 42  # exit code of a run that SIGTERM has stopped
Key = tuple[str, int, int]  # row, seed, step


def command(flags: tuple[str, ...]) -> list[str]:
  return [sys.executable, '-m', 'vit_jax.train', *flags]


def losses(workdir: pathlib.Path) -> dict[int, float]:
  """Returns the losses that a run has logged so far, by step."""
  path = workdir / 'metrics.jsonl'
  lines = path.read_text().splitlines(True) if path.exists() else []
  # The last line may not be written completely yet.
  records = [json.loads(line) for line in lines if line.endswith('\n')]
  return {each['step']: each['loss'] for each in records if 'loss' in each}


def train(workdir: pathlib.Path, flags: tuple[str, ...], last: int = 0) -> None:
  """Runs a command to its end, or until it has logged a step.

  Args:
    workdir: workdir of the run; its output is appended to WORKDIR.log.
    flags: flags of the command, without the workdir.
    last: step after which the run is stopped, if it has not been logged
      already; 0 to run to the end.

  Raises:
    SystemExit: the command failed.
  """
  if last and last in losses(workdir):
    return
  workdir.parent.mkdir(parents=True, exist_ok=True)
  output = pathlib.Path(f'{workdir}.log')
  with output.open('ab') as file:
    words = command((*flags, f'--workdir={workdir}'))
    process = subprocess.Popen(words, stdout=file, stderr=file)
    try:
      while process.poll() is None:
        if last and last in losses(workdir):
          process.send_signal(signal.SIGTERM)
          process.wait()
        time.sleep(0.5)
    finally:
      process.terminate()
      process.wait()
  if process.returncode not in ((PREEMPTED,) if last else (0,)):
    raise SystemExit(
      f'{workdir} ended with exit code {process.returncode}; see {output}.'
    )


def read(path: pathlib.Path) -> dict[Key, float]:
  """Returns the losses of the CSV file, which need not exist."""
  if not path.exists():
    return {}
  with path.open() as file:
    return {
      (line['row'], int(line['seed']), int(line['step'])): float(line['loss'])
      for line in csv.DictReader(file)
    }


def write(path: pathlib.Path, found: dict[Key, float]) -> None:
  with path.open('w') as file:
    writer = csv.writer(file, lineterminator='\n')
    writer.writerow(COLUMNS)
    writer.writerows(
      (*key, f'{found[key]:.5f}')
      for key in sorted(found, key=lambda key: (list(ROWS).index(key[0]), key))
    )


def table(found: dict[Key, float]) -> str:
  """Returns Markdown: mean ± sample standard deviation over the seeds."""
  steps = sorted({step for _, _, step in found})
  lines = [
    f'| loss at step | {" | ".join(map(str, steps))} |',
    '|---' * (len(steps) + 1) + '|',
  ]
  for name in ROWS:
    cells = []
    for step in steps:
      values = [v for key, v in found.items() if key[::2] == (name, step)]
      mean = f'{statistics.fmean(values):.3f}' if values else ''
      std = f' ± {statistics.stdev(values):.3f}' if len(values) > 1 else ''
      cells.append(mean + std)
    if any(cells):
      lines.append(f'| {name} | {" | ".join(cells)} |')
  return '\n'.join(lines)


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or '').split('\n')[0])
  parser.add_argument('--rows', default=','.join(ROWS))
  parser.add_argument('--seeds', default='0,1,2')
  parser.add_argument('--steps', type=int, default=100, help='multiple of 50')
  parser.add_argument('--csv', default='benchmarks/expected_losses.csv')
  parser.add_argument('--workdir', default='runs/expected_losses')
  parser.add_argument('--list', action='store_true', help='print the commands')
  arguments = parser.parse_args()
  folder = pathlib.Path(arguments.workdir)
  teacher = folder / 'teacher'
  rows = {
    name: tuple(flag.replace('TEACHER', str(teacher)) for flag in ROWS[name])
    for name in arguments.rows.split(',')
  }
  if arguments.list:
    for name, flags in {'teacher': TEACHER, **rows}.items():
      print(f'{name}: {shlex.join(["python", *command(flags)[1:]])}')
    return
  path = pathlib.Path(arguments.csv)
  steps = range(EVERY, arguments.steps + 1, EVERY)
  for seed in map(int, arguments.seeds.split(',')):
    for name, flags in rows.items():
      found = read(path)
      if all((name, seed, step) in found for step in steps):
        continue
      if name == 'DeiT':
        train(teacher, TEACHER)  # returns at once if the run has finished
      workdir = folder / f'{name.replace(" ", "_")}-{seed}'
      train(workdir, (*flags, f'--config.seed={seed}'), steps[-1])
      logged = losses(workdir)
      # Read again: another copy may have written other rows meanwhile.
      made = {(name, seed, step): logged[step] for step in steps}
      write(path, read(path) | made)
      print(f'{name}, seed {seed}: {logged}', file=sys.stderr, flush=True)
  print(table(read(path)))


if __name__ == '__main__':
  main()
