"""python -m vit_jax.prepare, see `command`."""

from vit_jax.cli import process
from vit_jax.prepare import command

if __name__ == '__main__':
  process.run(command.main, command.define_flags)
