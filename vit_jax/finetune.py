"""Fine-tunes: python -m vit_jax.finetune --config=… --config.init_from=PATH.

PATH is a workdir, a checkpoint step directory or an official .npz. The body is
taken over, pre-logits and head are dropped, one zero linear head is attached,
and position embeddings are interpolated to the new image size (section 3.2).
"""

import functools
import logging
from typing import Any

from absl import flags

from vit_jax.cli import entry, process
from vit_jax.config.completion import Config
from vit_jax.errors import UserError
from vit_jax.models import vit
from vit_jax.training.experiment import Experiment
from vit_jax.weights import pretrained

log = logging.getLogger('vit_jax')
_SIZES = ('patch_size', 'width', 'depth', 'mlp_dim', 'num_heads')


def adopt_architecture(config: Config, source: pretrained.Pretrained) -> Config:
  """The config with the architecture of the weights it starts from.

  Raises:
    UserError: the config names another architecture.
  """
  section, theirs = config.model, source.model()
  named = any(section[key] is not None for key in ('variant', *_SIZES))
  if named:
    values = {key: section[key] for key in vit.ARCHITECTURE}
    ours = vit.Model(config.num_classes, **values)
    differing = [
      f'{key}: {getattr(theirs, key)} there, {getattr(ours, key)} in the config'
      for key in _SIZES
      if getattr(theirs, key) != getattr(ours, key)
    ]
    if differing:
      raise UserError(
        f'{source.path} is another model than config.model: '
        f'{"; ".join(differing)}. Leave config.model.variant out to take the '
        'architecture of the weights.'
      )
  adopted = config.copy_and_resolve_references()
  with adopted.unlocked():
    for key in (*_SIZES, 'pool', 'gelu'):
      adopted.model[key] = getattr(theirs, key)
  return adopted


def main(arguments: list[str]) -> None:
  """Starts a fine-tuning."""
  entry.refuse_arguments(arguments)
  process.start_process()
  config: Config = flags.FLAGS.config
  if not config.init_from:
    raise UserError(
      '--config.init_from=PATH is missing: a workdir, a checkpoint step '
      'directory or an official .npz to start from.'
    )
  source = pretrained.find(config.init_from)
  config = adopt_architecture(config, source)
  entry.start(config, functools.partial(_initial_params, source))


def _initial_params(
  source: pretrained.Pretrained, experiment: Experiment
) -> Any:
  method = experiment.config.position_resize
  return pretrained.transfer(source, experiment, method)


if __name__ == '__main__':
  process.run(main, entry.define_flags)
