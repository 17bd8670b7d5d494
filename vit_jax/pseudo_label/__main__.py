"""python -m vit_jax.pseudo_label, see `command`."""

from vit_jax.cli import process
from vit_jax.pseudo_label import command

if __name__ == '__main__':
  process.run(command.main, command.define_flags)
