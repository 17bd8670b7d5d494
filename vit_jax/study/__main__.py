"""python -m vit_jax.study --config=configs/studies/….py, see `command`."""

from absl import flags

from vit_jax.cli import process
from vit_jax.study import command


def define_flags() -> None:
  """The command's flags, which --help lists as this module's."""
  command.define_flags()
  flags.adopt_module_key_flags(command)


if __name__ == '__main__':
  __doc__ = command.__doc__  # what --help says
  process.run(command.main, define_flags)
