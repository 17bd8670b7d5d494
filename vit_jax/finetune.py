"""Fine-tunes: python -m vit_jax.finetune --config=… --config.init_from=PATH.

PATH is a workdir, a checkpoint step directory or weights of another project (an
official .npz, timm's .safetensors, a Hugging Face directory, …). The backbone
is loaded, pre-logits and head are dropped, a linear head initialized with zeros
is attached, and position embeddings are interpolated to the new image size
(section 3.2 of the paper).
"""

import functools
import logging

from absl import flags

from vit_jax.cli import process
from vit_jax.config import loading, schema
from vit_jax.config.schema import Config
from vit_jax.errors import UserError
from vit_jax.files import paths
from vit_jax.training import loop
from vit_jax.training.experiment import Experiment
from vit_jax.training.session import InitialParams
from vit_jax.weights import pretrained
from vit_jax.weights.contract import Pretrained
from vit_jax.weights.transfer import transfer

log = logging.getLogger('vit_jax')


def adopt_architecture(config: Config, source: Pretrained) -> Config:
  """Returns the config with the architecture of the weights it starts from.

  Args:
    config: completed config.
    source: weights that the run starts from.

  Raises:
    UserError: the config specifies another model or another architecture.
  """
  section, loaded = config.model, source.model()
  name = source.about['model'].get('name', 'vit')
  if section.name != name:
    raise UserError(
      f'{source.path} contains a model {name!r}, but config.model.name is '
      f'{section.name!r}: set --config.model.name={name}, or start python -m '
      'vit_jax.train from these weights, which uses all parameters that fit.'
    )
  constructor = schema.constructor('model', section)
  keys = schema.config_keys(constructor)
  # Keys whose default is None; the weights determine them.
  open_keys = [key for key in keys if keys[key].default is None]
  if any(section[key] is not None for key in open_keys):
    built = schema.construct(constructor, section, config.num_classes)
    differing = [
      f'{key}: {value} in the weights, {built.architecture[key]} in the config'
      for key, value in loaded.architecture.items()
      if key in open_keys and built.architecture[key] != value
    ]
    if differing:
      raise UserError(
        f'{source.path} has another architecture: {"; ".join(differing)}. '
        'Leave these keys of config.model out to use that of the weights.'
      )
  adopted = config.copy_and_resolve_references()
  with adopted.unlocked():
    for key, value in loaded.architecture.items():
      adopted.model[key] = value
    for key, value in loaded.options.items():
      if section[key] == keys[key].default:
        adopted.model[key] = value
  return adopted


def main(arguments: list[str]) -> None:
  """Fine-tunes the weights of `init_from`, or resumes the fine-tuning."""
  process.refuse_arguments(arguments)
  process.start_process()
  config: Config = flags.FLAGS.config
  if not config.init_from:
    raise UserError(
      '--config.init_from=PATH is missing: the weights to start from.'
    )
  try:
    source = pretrained.find(config.init_from, config.init_weights)
  except UserError as error:
    config, initial_params = _without_weights(config, error)
  else:
    config = adopt_architecture(config, source)
    initial_params = functools.partial(
      transfer, source, method=config.position_resize
    )
  if process.prints_config(config):
    return
  options = process.run_options(config)
  loop.run(config, initial_params=initial_params, **options)


def _without_weights(
  config: Config, error: UserError
) -> tuple[Config, InitialParams]:
  """Prepares a run that resumes although `init_from` can no longer be read.

  Args:
    config: completed config.
    error: reason why the weights cannot be read.

  Returns:
    The config with the architecture of the last start, and a function for the
    initial parameters, which raises the error. It is called only if the workdir
    has no checkpoint.

  Raises:
    UserError: `error`, if the workdir does not contain a run.
  """
  file = paths.locate(process.chosen_workdir()) / 'config.json'
  if not file.exists():
    raise error
  last = loading.load(str(file)).model
  resumed = config.copy_and_resolve_references()
  with resumed.unlocked():
    for key, value in last.items():
      if key not in resumed.model or resumed.model[key] is None:
        resumed.model[key] = value

  def unavailable(experiment: Experiment) -> object:
    raise error

  log.warning('%s This run resumes, so it does not need these weights.', error)
  return resumed, unavailable


if __name__ == '__main__':
  process.run(main, process.define_flags)
