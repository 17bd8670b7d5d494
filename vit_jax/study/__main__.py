"""python -m vit_jax.study --config=configs/studies/….py, see `command`."""

from vit_jax.cli import process
from vit_jax.study import command

if __name__ == '__main__':
  process.run(command.main, command.define_flags)
