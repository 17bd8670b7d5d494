"""Start and help of the commands: their list, purpose and flags.

absl's own --help omits flags that are defined in other modules than the
command's, and exits with 1.
"""

import ast
import itertools
import pathlib
import sys
import textwrap
from collections.abc import Sequence
from typing import NoReturn

from absl import flags

import vit_jax
from vit_jax.errors import EXIT_USER_ERROR, closest

_PACKAGE = pathlib.Path(vit_jax.__file__).parent
# Start of the help of flags that users do not set directly.
_SET_ELSEWHERE = 'Set by '


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
    # Commands are recognized by their text, because importing them, and thereby
    # JAX, would take seconds.
    if 'def define_flags' in text or 'process.run(' in text:
      header = ast.get_docstring(ast.parse(text)) or ''
      found[name] = header.partition('\n')[0]
  return found


def begin(command: Sequence[str]) -> None:
  """Installs the signal handler; refuses Windows and unknown commands.

  It does nothing in a process that only imports the library, which was not
  started by `python -m vit_jax.COMMAND`. If there is no such command, the
  process ends with code 2: Python's own message does not list the commands, and
  its exit code is 1.

  Args:
    command: `sys.orig_argv`.
  """
  modules = (y for x, y in itertools.pairwise(command) if x == '-m')
  package, _, name = next(modules, '').partition('.')
  if package != 'vit_jax':
    return
  if sys.platform == 'win32':
    _refuse(
      'commands need Linux or macOS, and this is Windows: install vit_jax in '
      'WSL, the Windows Subsystem for Linux (wsl --install), and run it there.'
    )
  if not name:
    return
  # It cannot be imported on Windows, which does not have all of its signals.
  from vit_jax.processes import interruption

  # Signals must be handled from the start, because importing JAX takes seconds.
  interruption.HANDLER.install()
  path = _PACKAGE.joinpath(*name.split('.'))
  if not path.is_dir() and not path.with_suffix('.py').exists():
    near = closest(name, descriptions())
    _refuse(f'vit_jax.{name} is not a command; {near}.')


def refuse_arguments(arguments: Sequence[str]) -> None:
  """Ends the process with code 2 if `python -m vit_jax` has arguments.

  `python -m vit_jax train …` would otherwise print the list of commands and
  exit with 0, as if it had trained.

  Args:
    arguments: arguments after `vit_jax`; --help is allowed.
  """
  if not arguments or arguments[0] in ('--help', '-h', '--helpfull'):
    return
  name = arguments[0]
  _refuse(
    f'python -m vit_jax takes no arguments, but got {name!r}: write python -m '
    f'vit_jax.COMMAND, with a dot; {closest(name, descriptions())}.'
  )


def _refuse(message: str) -> NoReturn:
  """Ends the process with code 2; no command has started yet."""
  print(f'error: {message}', file=sys.stderr)
  sys.exit(EXIT_USER_ERROR)


def is_requested(argv: Sequence[str]) -> bool:
  """Returns whether a command line contains -h, -help or --help."""
  return any(word in ('-h', '-help', '--help') for word in argv[1:])


def text(header: str, values: flags.FlagValues) -> str:
  """Returns the help of a command.

  Args:
    header: docstring of the module, with an example.
    values: `FlagValues` in which the flags are defined.
  """
  # Flags of absl itself are left out. The name of a module is its path if it is
  # the command that was started.
  shown = [
    flag
    for module, defined in values.flags_by_module_dict().items()
    if 'vit_jax' in module
    for flag in defined
    if not (flag.help or '').startswith(_SET_ELSEWHERE)
  ]
  lines = [_line(flag) for flag in sorted(shown, key=lambda flag: flag.name)]
  if any(flag.name == 'config' for flag in shown):
    lines.append('  --config.KEY=VALUE  Any key of the config, at any depth.')
  return '\n'.join([header.strip(), '', *lines])


def _line(flag: flags.Flag) -> str:
  """Formats a flag: its name, default and help."""
  name = f'[no]{flag.name}' if flag.boolean else flag.name
  default = '' if flag.default in (None, False, '', []) else f'={flag.default}'
  return textwrap.fill(
    f'--{name}{default}  {flag.help}',
    width=80,
    initial_indent='  ',
    subsequent_indent='      ',
    break_on_hyphens=False,
  )
