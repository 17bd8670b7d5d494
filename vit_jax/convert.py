"""Converts weights: python -m vit_jax.convert SRC DST.

SRC: a workdir, a checkpoint step directory, or weights of another project: an
official or big_vision's .npz, timm's .safetensors or .pth, a Hugging Face
directory. DST: a file ending in .npz (official names) or .safetensors (timm's
names), huggingface:DIR for a directory of theirs, big_vision:FILE.npz, or a new
directory (parameters only, which loads like a checkpoint step).
"""

import logging

import jax
from absl import flags

from vit_jax.arrays import sharding
from vit_jax.cli import process, weights_flags
from vit_jax.errors import UserError
from vit_jax.weights import pretrained

log = logging.getLogger('vit_jax')


def define_flags() -> None:
  """The flags of this command."""
  weights_flags.define_choice()


def run(source_path: str, target_path: str, weights: str = 'params') -> None:
  """Loads weights and writes them in the target's format.

  Args:
    source_path: what `pretrained.find` takes.
    target_path: what `pretrained.save` takes.
    weights: which of a checkpoint, see `Pretrained.chosen`.

  Raises:
    UserError: cannot be read, written, or has no such weights.
  """
  source = pretrained.find(source_path, weights)
  mesh = sharding.make_mesh(jax.local_devices()[:1])
  params = source.load(source.abstract_params(mesh))
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
