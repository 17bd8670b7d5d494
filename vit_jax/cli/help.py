"""Formats the output of `--help`: purpose of a command, an example, its flags.

absl's own help omits flags that are defined in other modules than the
command's, and exits with 1.
"""

import textwrap
from collections.abc import Sequence

from absl import flags

WORDS = ('-h', '-help', '--help')
_SET_ELSEWHERE = 'Set by '  # help of flags that users do not set directly


def is_requested(argv: Sequence[str]) -> bool:
  """Returns whether a command line contains -h, -help or --help."""
  return any(word in WORDS for word in argv[1:])


def text(header: str, values: flags.FlagValues) -> str:
  """Returns the help of a command.

  Args:
    header: docstring of the module, with an example.
    values: `FlagValues` in which the flags are defined.
  """
  shown = [
    flag
    for module, defined in values.flags_by_module_dict().items()
    if module.startswith('vit_jax') or 'vit_jax' in module
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
