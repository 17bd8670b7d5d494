"""python -m vit_jax.sweep --config=configs/sweeps/….py, see `command`."""

from vit_jax.cli import process
from vit_jax.sweep import command

if __name__ == '__main__':
  process.run(command.main, command.define_flags)
