"""Exports a model for serving: python -m vit_jax.export --checkpoint=P --out=D.

D is a new directory. --to=stablehlo writes a program for `jax.export`
and other runtimes of StableHLO, --to=savedmodel one for TensorFlow. Both take
any number of uint8 images at once. D/description.json contains the
preprocessing of photographs and the class names.
"""

import logging

from absl import flags

from vit_jax.cli import inputs, process
from vit_jax.cli.inputs import Request
from vit_jax.files import paths
from vit_jax.weights import artefacts

log = logging.getLogger('vit_jax')


def define_flags() -> None:
  """Defines the flags of this command."""
  Request.define('checkpoint', 'step', 'weights', 'image_size')
  flags.DEFINE_string('out', None, 'Directory to write, which must not exist.')
  flags.DEFINE_enum('to', 'stablehlo', [*artefacts.KINDS], 'Kind of program.')


def main(arguments: list[str]) -> None:
  """Exports the checkpoint that the flags specify.

  Args:
    arguments: arguments that are not flags; there must be none.
  """
  values = flags.FLAGS
  if arguments or not values.checkpoint or not values.out:
    raise process.usage(
      f'export --checkpoint=PATH --out=DIR --to={"|".join(artefacts.KINDS)}'
    )
  paths.check_folder_name(
    values.out,
    f'a new directory, into which --to={" or --to=".join(artefacts.KINDS)} '
    'writes a program',
  )
  path = inputs.weights_path(values)
  source = inputs.open_weights(path, Request.of_flags())
  artefacts.write(source, values.out, values.to)
  log.info('wrote %s', values.out)


if __name__ == '__main__':
  process.run(main, define_flags)
