"""Lists the commands: python -m vit_jax."""

import sys

from vit_jax.cli import help

if __name__ == '__main__':
  help.refuse_arguments(sys.argv[1:])
  lines = [f'{name:<12}  {line}' for name, line in help.descriptions().items()]
  lines += ['', 'Each has --help. The first five minutes: bash launch/local.sh']
  print('\n'.join(lines))
