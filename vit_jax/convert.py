"""Converts weights: python -m vit_jax.convert SRC DST.

SRC: a workdir, a checkpoint step directory or an official .npz. DST: a file
ending in .npz (official names), or a new directory (parameters only, which
loads like a checkpoint step).
"""

import logging

import jax
from absl import flags

from vit_jax.arrays import sharding
from vit_jax.cli import process
from vit_jax.errors import UserError
from vit_jax.weights import pretrained

log = logging.getLogger('vit_jax')


def define_flags() -> None:
  """The flags of this command."""
  flags.DEFINE_enum(
    'weights', 'params', ['params', 'ema'], 'Which weights of a checkpoint.'
  )


def run(source_path: str, target_path: str, weights: str = 'params') -> None:
  """Loads weights and writes them in the target's format.

  Args:
    source_path: what `pretrained.find` takes.
    target_path: ends in .npz, or a directory that does not exist.
    weights: 'params', or 'ema' for the average that was kept.

  Raises:
    UserError: cannot be read, written, or has no such weights.
  """
  source = pretrained.find(source_path)
  mesh = sharding.make_mesh(jax.local_devices()[:1])
  abstract = source.abstract_params(mesh)
  load = source.load if weights == 'params' else source.load_average
  params = load(abstract)
  if params is None:
    raise UserError(f'{source_path} kept no average of weights (ema).')
  pretrained.save(target_path, params, source.about)
  log.info('wrote %s', target_path)


def main(arguments: list[str]) -> None:
  """Converts SRC to DST."""
  if len(arguments) != 2:
    raise UserError(
      'usage: python -m vit_jax.convert SRC DST; got '
      f'{len(arguments)} argument(s).'
    )
  run(arguments[0], arguments[1], flags.FLAGS.weights)


if __name__ == '__main__':
  process.run(main, define_flags)
