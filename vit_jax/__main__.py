"""Lists the commands: python -m vit_jax."""

import sys

from vit_jax.cli import commands

if __name__ == '__main__':
  commands.refuse_arguments(sys.argv[1:])
  for name, line in commands.descriptions().items():
    print(f'{name:<12}  {line}')
  print('\nEach has --help. The first five minutes: bash launch/local.sh')
