"""Fine-tunes: python -m vit_jax.finetune --config=… --config.init_from=PATH.

PATH is a workdir, a checkpoint step directory or weights of another project (an
official .npz, timm's .safetensors, a Hugging Face directory, …). The backbone
is loaded, pre-logits and head are dropped, a linear head initialized with zeros
is attached, and position embeddings are interpolated to the new image size
(section 3.2 of the paper).

With --config.lora.rank=16, the backbone stays frozen, and only low-rank
differences to its matrices and the head are trained (LoRA, arXiv 2106.09685).
"""

import logging

from absl import flags

from vit_jax.cli import process
from vit_jax.config import loading
from vit_jax.config.keys import square
from vit_jax.config.schema import Config
from vit_jax.data.contract import Source
from vit_jax.errors import UserError
from vit_jax.files import paths
from vit_jax.training import loop
from vit_jax.training.experiment import Experiment
from vit_jax.weights import architecture, pretrained
from vit_jax.weights.contract import Pretrained
from vit_jax.weights.description import Description
from vit_jax.weights.transfer import transfer

log = logging.getLogger('vit_jax')


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
    source, error = pretrained.find(config.init_from, config.init_weights), None
  except UserError as reason:
    source, error = _last_start(reason), reason
  config = architecture.adopt(config, source)
  if process.prints_config(config):
    return

  def initial_params(experiment: Experiment, data: Source) -> object:
    del data  # the head is new
    if error is not None:
      raise error
    return transfer(source, experiment, config.position_resize)

  options = process.run_options(config)
  is_lora = config.lora.rank > 0
  if is_lora and error is not None:
    raise error  # the frozen weights are not part of checkpoints
  # With LoRA, all parameters that are trained are new.
  start = None if is_lora else initial_params
  loop.run(initial_params=start, **options)


def _last_start(error: UserError) -> Pretrained:
  """Describes weights that can no longer be read by the run in the workdir.

  A run that resumes needs only their architecture.

  Args:
    error: reason why the weights cannot be read.

  Raises:
    UserError: `error`, if the workdir does not contain a run.
  """
  file = paths.locate(process.chosen_workdir()) / 'config.json'
  if not file.exists():
    raise error
  last = loading.load(str(file))
  log.warning('%s This run resumes, so it does not need these weights.', error)
  size = square(last.image_size)
  description = Description(last.model.to_dict(), last.num_classes, size)
  return Pretrained(str(file), description, lambda abstract: None)


if __name__ == '__main__':
  process.run(main, process.define_flags)
