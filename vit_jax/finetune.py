"""Fine-tunes: python -m vit_jax.finetune --config=… --config.init_from=PATH.

PATH is a workdir, a checkpoint step directory or weights of another project (an
official .npz, timm's .safetensors, a Hugging Face directory, …). The body is
taken over, pre-logits and head are dropped, one zero linear head is attached,
and position embeddings are interpolated to the new image size (section 3.2).
"""

import functools
import logging

from absl import flags

from vit_jax.cli import entry, process
from vit_jax.config import loading, plugins, sections
from vit_jax.config.completion import Config
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
  """The config with the architecture of the weights it starts from.

  Raises:
    UserError: the config names another model or another architecture.
  """
  section, theirs = config.model, source.model()
  name = source.about['model'].get('name', 'vit')
  if section.name != name:
    raise UserError(
      f'{source.path} holds a model {name!r} and config.model.name is '
      f'{section.name!r}: set --config.model.name={name}.'
    )
  constructor = sections.constructor('model', section)
  # What may be left out is what the weights decide.
  open_keys = [
    key
    for key, parameter in plugins.keys(constructor).items()
    if parameter.default is None
  ]
  if any(section[key] is not None for key in open_keys):
    ours = plugins.build(constructor, section, config.num_classes)
    differing = [
      f'{key}: {value} there, {ours.architecture[key]} in the config'
      for key, value in theirs.architecture.items()
      if key in open_keys and ours.architecture[key] != value
    ]
    if differing:
      named = next(key for key in open_keys if section[key] is not None)
      raise UserError(
        f'{source.path} is another model than config.model: '
        f'{"; ".join(differing)}. Leave config.model.{named} out to take the '
        'architecture of the weights.'
      )
  adopted = config.copy_and_resolve_references()
  with adopted.unlocked():
    for key, value in theirs.architecture.items():
      adopted.model[key] = value
  return adopted


def main(arguments: list[str]) -> None:
  """Starts a fine-tuning."""
  entry.refuse_arguments(arguments)
  process.start_process()
  config: Config = flags.FLAGS.config
  if not config.init_from:
    raise UserError(
      '--config.init_from=PATH is missing: a workdir, a checkpoint step '
      'directory or weights of another project (.npz, .safetensors, .pth, a '
      'Hugging Face directory) to start from.'
    )
  try:
    source = pretrained.find(config.init_from, config.init_weights)
  except UserError as error:
    config, initial_params = _begun(config, error)
  else:
    config = adopt_architecture(config, source)
    initial_params = functools.partial(
      transfer, source, method=config.position_resize
    )
  options = entry.run_options(config)
  loop.run(config, initial_params=initial_params, **options)


def _begun(config: Config, error: UserError) -> tuple[Config, InitialParams]:
  """What a run that resumes goes on with: it needs its weights no more.

  Args:
    config: resolved.
    error: why the weights cannot be used.

  Raises:
    UserError: that one, if the workdir holds no run; else the second result
      raises it, where there is no checkpoint.
  """
  file = paths.locate(entry.chosen_workdir()) / 'config.json'
  if not file.exists():
    raise error
  before = loading.load(str(file)).model
  begun = config.copy_and_resolve_references()
  with begun.unlocked():
    for key, value in before.items():
      if key not in begun.model or begun.model[key] is None:
        begun.model[key] = value

  def unavailable(experiment: Experiment) -> object:
    raise error

  log.warning('%s Only a run that starts needs it.', error)
  return begun, unavailable


if __name__ == '__main__':
  process.run(main, entry.define_flags)
