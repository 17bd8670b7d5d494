"""Pre-trains a model: python -m vit_jax.train --config=configs/l16_i21k.py.

The same command again resumes from the newest checkpoint of the workdir. Every
key of the config can be overridden: --config.batch_size=1024.
"""

from absl import flags

from vit_jax.cli import entry, process
from vit_jax.errors import UserError


def main(arguments: list[str]) -> None:
  """Starts a pre-training."""
  entry.refuse_arguments(arguments)
  config = flags.FLAGS.config
  if config.init_from is not None:
    raise UserError(
      f'config.init_from is {config.init_from!r}, and train starts from fresh '
      'parameters: take python -m vit_jax.finetune, or set '
      '--config.init_from=None.'
    )
  process.start_process()
  entry.start(config)


if __name__ == '__main__':
  process.run(main, entry.define_flags)
