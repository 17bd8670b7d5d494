"""Exports a model for serving: python -m vit_jax.export --checkpoint=PATH …

--out=DIR is a new directory; --to=stablehlo is a program for `jax.export`, for
any runtime of StableHLO, --to=savedmodel one for TensorFlow. Both take any
number of uint8 images at once; DIR/description.json says how they are made of
photographs, and what the classes are called.
"""

import logging

from absl import flags

from vit_jax.cli import process, weights_flags
from vit_jax.errors import UserError
from vit_jax.weights import artefacts, pretrained

log = logging.getLogger('vit_jax')


def define_flags() -> None:
  """The flags of this command."""
  weights_flags.define_flags()
  flags.DEFINE_string('out', None, 'The directory to write, a new one.')
  flags.DEFINE_string('to', 'stablehlo', ' or '.join(artefacts.KINDS) + '.')


def run(checkpoint: str, out: str, kind: str, weights: str = 'params') -> None:
  """Writes an artefact with its description.

  Args:
    checkpoint: what `pretrained.find` takes.
    out: directory, which must not exist.
    kind: of `artefacts.KINDS`.
    weights: which of the checkpoint, see `Pretrained.chosen`.

  Raises:
    UserError: no such weights or kind, or the directory exists.
  """
  if kind == 'onnx':
    raise UserError(
      '--to=onnx is not written: no well-kept converter takes these programs. '
      'Take --to=savedmodel or --to=stablehlo.'
    )
  artefacts.write(pretrained.find(checkpoint, weights), out, kind)
  log.info('wrote %s', out)


def main(arguments: list[str]) -> None:
  """Exports what the flags say."""
  values = flags.FLAGS
  if arguments or not values.checkpoint or not values.out:
    raise UserError(
      'usage: python -m vit_jax.export --checkpoint=PATH --out=DIR '
      f'--to={"|".join(artefacts.KINDS)}; got checkpoint '
      f'{values.checkpoint!r}, out {values.out!r}, {len(arguments)} '
      'argument(s).'
    )
  run(values.checkpoint, values.out, values.to, values.weights)


if __name__ == '__main__':
  process.run(main, define_flags)
