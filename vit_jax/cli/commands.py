"""Lists the commands, and reports unknown ones."""

import ast
import pathlib
import sys
from collections.abc import Sequence
from typing import NoReturn

import vit_jax
from vit_jax.errors import EXIT_USER_ERROR, closest

_PACKAGE = pathlib.Path(vit_jax.__file__).parent


def descriptions() -> dict[str, str]:
  """Returns the first line of the help of each command, by name."""
  files = {path.stem: path for path in _PACKAGE.glob('[!_]*.py')}
  for path in _PACKAGE.glob('*/__main__.py'):
    # The flags of plan are in main.py, because its __main__.py must set the
    # environment before they are imported.
    main = path.with_name('main.py')
    files[path.parent.name] = main if main.exists() else path
  found = {}
  for name, path in sorted(files.items()):
    text = path.read_text()
    if 'def define_flags' in text or 'process.run(' in text:
      header = ast.get_docstring(ast.parse(text)) or ''
      found[name] = header.partition('\n')[0]
  return found


def refuse_arguments(arguments: Sequence[str]) -> None:
  """Ends the process with code 2 if `python -m vit_jax` has arguments.

  `python -m vit_jax train …` would otherwise print the list of commands and
  exit with 0, as if it had trained.

  Args:
    arguments: arguments after `vit_jax`; --help is allowed.
  """
  if not arguments or arguments[0] in ('--help', '-h', '--helpfull'):
    return
  name, commands = arguments[0], descriptions()
  hint = (
    f'write python -m vit_jax.{name} (with a dot)'
    if name in commands
    else f'{closest(name, commands)}; write python -m vit_jax.COMMAND'
  )
  _refuse(f'python -m vit_jax takes no arguments, but got {name!r}; {hint}.')


def refuse_unknown(command: Sequence[str]) -> None:
  """Ends the process with code 2 if the module `vit_jax.NAME` does not exist.

  Python's own message does not list the commands, and its exit code is 1.

  Args:
    command: `sys.orig_argv`.
  """
  after = [*command].index('-m') + 1 if '-m' in command else len(command)
  package, _, name = ''.join(command[after : after + 1]).partition('.')
  path = _PACKAGE.joinpath(*name.split('.'))
  if package != 'vit_jax' or path.is_dir() or path.with_suffix('.py').exists():
    return
  near = closest(name, descriptions())
  _refuse(f'vit_jax.{name} is not a command; {near}.')


def _refuse(message: str) -> NoReturn:
  """Ends the process with code 2; no command has started yet."""
  print(f'error: {message}', file=sys.stderr)
  sys.exit(EXIT_USER_ERROR)
