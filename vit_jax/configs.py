"""Lists the shipped configs: python -m vit_jax.configs [NAME].

The list contains the title of each config, its table of published results and
the costs predicted by `plan` for TPUs and GPUs (nothing was measured). With one
or more NAMEs, their complete headers are printed, which list every difference
from the paper.
"""

import ast
import pathlib
import signal
from typing import Any

from vit_jax.cli import process
from vit_jax.config import loading, predicted
from vit_jax.errors import UserError, closest


def main(arguments: list[str]) -> None:
  """Prints all configs, or the headers of the named ones."""
  headers = read(loading.directory())
  rows = predicted.read()
  for name in arguments:
    short = name.removeprefix('configs/').partition(':')[0].removesuffix('.py')
    if short not in headers:
      raise UserError(
        f'there is no config {name!r}; {closest(short, headers)}.'
      )
    print(f'configs/{short}.py\n\n{headers[short]}\n')
    print('\n'.join(costs(short, rows)))
  if not arguments:
    print('\n\n'.join(summary(*pair, rows) for pair in headers.items()))


def read(directory: pathlib.Path) -> dict[str, str]:
  """Returns {name: docstring} of the configs in a directory tree."""
  return {
    file.relative_to(directory).with_suffix('').as_posix(): (
      ast.get_docstring(ast.parse(file.read_text())) or ''
    )
    for file in sorted(directory.rglob('*.py'))
  }


def summary(name: str, header: str, rows: list[dict[str, Any]]) -> str:
  """Returns path, title, table and predicted costs of a config.

  Args:
    name: name of the config.
    header: docstring of the config.
    rows: result of `predicted.read`.
  """
  title = header.partition('\n')[0]
  table = [line for line in header.splitlines() if line.startswith('|')]
  lines = [*table, *costs(name, rows)]
  return '\n'.join([f'configs/{name}.py  {title}', *(f'  {t}' for t in lines)])


def costs(name: str, rows: list[dict[str, Any]]) -> list[str]:
  """Returns the predictions of a config, one per line, under a heading."""
  path = f'configs/{name}.py'
  found = [row for row in rows if row['config'].partition(':')[0] == path]
  return ['predicted:', *map(predicted.line, found)] if found else []


if __name__ == '__main__':
  # Without this, `… | head` would end with a traceback.
  signal.signal(signal.SIGPIPE, signal.SIG_DFL)
  process.run(main, lambda: None)
