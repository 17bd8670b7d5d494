"""python -m vit_jax.launch --target=TARGET --config=FILE.py; see `command`."""

from vit_jax.cli import process
from vit_jax.launch import command

if __name__ == '__main__':
  process.run(command.main, command.define_flags)
