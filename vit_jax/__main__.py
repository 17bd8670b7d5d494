"""Lists the commands: python -m vit_jax."""

from vit_jax.cli import commands

if __name__ == '__main__':
  for name, line in commands.described().items():
    print(f'{name:<12}  {line}')
  print('\nEach has --help. The first five minutes: bash launch/local.sh')
