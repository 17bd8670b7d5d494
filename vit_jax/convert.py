"""Converts weights: python -m vit_jax.convert SRC DST.

SRC: a workdir, a checkpoint step directory, or weights of another project: an
official or big_vision's .npz, timm's .safetensors or .pth, a Hugging Face
directory. DST: a file ending in .npz (official names) or .safetensors (timm's
names), huggingface:DIR for a Hugging Face directory, big_vision:FILE.npz,
peft:DIR for the LoRA of a run without its frozen weights, or a new directory
(parameters only, which loads like a checkpoint step). Next to an
.npz file, FILE.npz.json contains the class names and the preprocessing. An
existing file is replaced only with --overwrite.
"""

import logging

from absl import flags

from vit_jax.cli import inputs, process
from vit_jax.cli.inputs import Request
from vit_jax.errors import UserError
from vit_jax.files import paths
from vit_jax.weights import pretrained

log = logging.getLogger('vit_jax')


def define_flags() -> None:
  """Defines the flags of this command."""
  Request.define('step', 'weights')
  flags.DEFINE_bool('overwrite', False, 'Replace DST if it is a file.')


def run(
  source_path: str,
  target_path: str,
  weights: str = 'params',
  overwrite: bool = False,
) -> None:
  """Loads weights and writes them in the target's format.

  Args:
    source_path: path of the weights, see `pretrained.find`.
    target_path: path to write, see `pretrained.save`.
    weights: set of weights of a checkpoint, see `Pretrained.chosen`.
    overwrite: whether an existing file is replaced.

  Raises:
    UserError: the weights cannot be read or written, the set does not exist,
      or the target exists.
  """
  form, path, _ = pretrained.format_of(target_path)
  if paths.locate(path).exists() and not overwrite:
    raise UserError(
      f'{path} already exists: give another path, or --overwrite to replace '
      'a file.'
    )
  source = pretrained.find(source_path, weights, merge=not form.adapters)
  params = source.load(source.abstract_params())
  pretrained.save(target_path, params, source.description)
  log.info('wrote %s', target_path)


def main(arguments: list[str]) -> None:
  """Converts SRC to DST.

  Args:
    arguments: [SRC, DST].
  """
  values = flags.FLAGS
  if len(arguments) != 2:
    raise process.usage('convert SRC DST')
  source = inputs.weights_path(values, arguments[0])
  run(source, arguments[1], values.weights, values.overwrite)


if __name__ == '__main__':
  process.run(main, define_flags)
