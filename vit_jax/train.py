"""Pre-trains a model: python -m vit_jax.train --config=configs/l16_i21k.py.

The same command resumes from the newest checkpoint of the workdir. Every key of
the config can be overridden, for example --config.batch_size=1024. With
--config.init_from=PATH a new run starts from the weights at PATH instead of
random ones; weights that do not fit the model are logged and left out. With
--branch_from=WORKDIR@STEP it starts from the whole state of a step of another
run, with another schedule or length.
"""

from absl import flags

from vit_jax.cli import process
from vit_jax.config.schema import Config
from vit_jax.data.contract import Source
from vit_jax.errors import UserError
from vit_jax.training import branch, loop
from vit_jax.training.experiment import Experiment
from vit_jax.weights import pretrained, transfer


def define_flags() -> None:
  """Defines the flags of this command."""
  flags.DEFINE_string(
    'branch_from',
    None,
    'WORKDIR@STEP: start a new workdir from the whole state of this step, with '
    'another schedule or total.',
  )
  process.define_flags()


def main(arguments: list[str]) -> None:
  """Pre-trains the model of the config, or resumes its training."""
  process.refuse_arguments(arguments)
  config: Config = flags.FLAGS.config
  if process.prints_config(config):
    return
  if config.lora.rank:
    raise UserError(
      f'config.lora.rank is {config.lora.rank}; LoRA is for python -m '
      'vit_jax.finetune: use it, or set --config.lora.rank=0.'
    )
  process.start_process()
  options = process.run_options(config)
  if flags.FLAGS.branch_from is not None:
    branch.begin(flags.FLAGS.branch_from, config, options['workdir'])
  # A run that resumes does not call the function.
  initial_params = None if config.init_from is None else _load
  loop.run(initial_params=initial_params, **options)


def _load(experiment: Experiment, data: Source) -> object:
  """Loads the weights of `init_from` as initial parameters."""
  config = experiment.config
  source = pretrained.find(config.init_from, config.init_weights)
  return transfer.start(source, experiment, config.position_resize, data)


if __name__ == '__main__':
  process.run(main, define_flags)
