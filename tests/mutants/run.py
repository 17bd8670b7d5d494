"""Checks that tests notice faults that are inserted into the code.

Usage: python tests/mutants/run.py [--jobs=N] [NAME…]

Each NAME.patch next to this file is one mutant:

  # Description of the fault.
  file: path of the file that it changes
  red: test files that must fail, each of them, separated by spaces
  --- old
  text that occurs exactly once in the file
  +++ new
  text that replaces it

First all named test files must pass; then each mutant is applied to a copy of
the tree, and its test files are run there. The exit code is 1 if a mutant is
not noticed (pytest ends with 0), or if it cannot be checked (its old text does
not occur once, or its tests fail without it or do not start with it).
"""

import argparse
import dataclasses
import functools
import os
import pathlib
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LEFT_OUT = shutil.ignore_patterns('.*', 'runs', '__pycache__', '*.egg-info')
TIMEOUT_S = 600  # a mutant with which a test does not end counts as noticed
FAILED = 1  # pytest's exit code
Work = Callable[[pathlib.Path], list[str]]  # copy of the tree → messages


@dataclasses.dataclass(frozen=True)
class Mutant:
  """One patch file of this directory; the module docstring describes its
  format."""

  name: str
  file: str
  red: tuple[str, ...]
  old: str
  new: str

  @classmethod
  def read(cls, path: pathlib.Path) -> 'Mutant':
    head, old_and_new = path.read_text().split('--- old\n')
    old, new = old_and_new.split('+++ new\n')
    lines = [x for x in head.splitlines() if not x.startswith('#')]
    fields = dict(line.split(': ', 1) for line in lines)
    red = tuple(fields['red'].split())
    return cls(path.stem, fields['file'], red, old[:-1], new[:-1])

  def trouble(self) -> str | None:
    """Returns why the mutant cannot be applied, or None."""
    for file in (self.file, *self.red):
      if not (ROOT / file).is_file():
        return f'there is no file {file}'
    count = (ROOT / self.file).read_text().count(self.old)
    where = f'its old text occurs {count} times in {self.file}, not once'
    return None if count == 1 else where

  def survives(self, tree: pathlib.Path) -> list[str]:
    """Applies the mutant to a copy of the tree and runs its tests.

    Returns:
      Messages about tests that did not fail.
    """
    path = tree / self.file
    text = path.read_text()
    path.write_text(text.replace(self.old, self.new))
    codes = {test: run_tests(tree, '-x', test) for test in self.red}
    path.write_text(text)
    return [
      f'{self.name}: {test} ends with {code} instead of {FAILED}'
      for test, code in codes.items()
      if code != FAILED
    ]


def run_tests(tree: pathlib.Path, *arguments: str) -> int:
  """Returns pytest's exit code in a copy of the tree."""
  # Bytecode is matched to its source by time and size, which a mutant may keep.
  unwritten = {'PYTHONPATH': str(tree), 'PYTHONDONTWRITEBYTECODE': '1'}
  command = [sys.executable, '-m', 'pytest', '-q', '--tb=line', *arguments]
  settings = dict(cwd=tree, timeout=TIMEOUT_S, capture_output=True, text=True)
  try:
    done = subprocess.run(command, env=os.environ | unwritten, **settings)
  except subprocess.TimeoutExpired:
    return FAILED
  if done.returncode > FAILED:
    print(done.stdout[-3000:], done.stderr[-3000:], sep='\n', flush=True)
  return done.returncode


def green(test: str, tree: pathlib.Path) -> list[str]:
  """Checks that a test passes without a mutant."""
  return [f'{test} fails without a mutant'] if run_tests(tree, test) else []


def check(name: str, work: Work, trees: queue.Queue) -> list[str]:
  """Does one job in a free copy of the tree; prints whether it succeeded."""
  tree, start = trees.get(), time.monotonic()
  wrong = work(tree)
  trees.put(tree)
  took = f'({time.monotonic() - start:.0f} s)'
  print('WRONG' if wrong else 'ok   ', name, took, flush=True)
  return wrong


def check_all(mutants: list[Mutant], jobs: int) -> list[str]:
  """Checks the mutants, a number of them at a time; returns messages."""
  tests = sorted({test for mutant in mutants for test in mutant.red})
  before = [(test, functools.partial(green, test)) for test in tests]
  broken = [(mutant.name, mutant.survives) for mutant in mutants]
  with tempfile.TemporaryDirectory(prefix='mutants_') as folder:
    trees = queue.Queue()
    for number in range(jobs):
      tree = pathlib.Path(folder, str(number))
      trees.put(shutil.copytree(ROOT, tree, ignore=LEFT_OUT))
    with ThreadPoolExecutor(jobs) as pool:
      for phase in (before, broken):
        found = list(pool.map(lambda job: check(*job, trees), phase))
        if any(found):
          break
  return [line for lines in found for line in lines]


def main() -> int:
  """Checks the named mutants, or all; returns the exit code."""
  parser = argparse.ArgumentParser()
  parser.add_argument('names', nargs='*', metavar='NAME')
  parser.add_argument('--jobs', type=int, default=2)
  given = parser.parse_args()
  there = {path.stem: path for path in sorted(HERE.glob('*.patch'))}
  if unknown := set(given.names) - there.keys():
    parser.error(f'no {sorted(unknown)}; there are {", ".join(there)}')
  mutants = [Mutant.read(there[name]) for name in given.names or there]
  wrong = [f'{m.name}: {m.trouble()}' for m in mutants if m.trouble()]
  wrong = wrong or check_all(mutants, given.jobs)
  print(*wrong or [f'all {len(mutants)} mutants were noticed'], sep='\n')
  return int(bool(wrong))


if __name__ == '__main__':
  sys.exit(main())
