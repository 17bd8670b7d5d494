"""Defines the flags that select trained weights."""

from typing import Any

from absl import flags

from vit_jax.errors import UserError


def define_flags() -> None:
  """Defines --checkpoint, --step and --weights."""
  flags.DEFINE_string(
    'checkpoint', None, 'Workdir, checkpoint step directory or weight file.'
  )
  define_step()
  define_choice()


def define_step() -> None:
  """Defines --step; see `path`."""
  flags.DEFINE_string(
    'step',
    None,
    'Checkpoint of a workdir: its number, or best for that of '
    'config.checkpoint.best; default: the newest.',
  )


def define_choice() -> None:
  """Defines --weights; see `Pretrained.chosen`."""
  flags.DEFINE_string(
    'weights',
    'params',
    'Weights of the checkpoint: params, ema (their average), or another set '
    'that the objective keeps, for example teacher.',
  )


def path(values: Any, given: str | None = None) -> str:
  """Returns the path of the weights, with the step if --step is given.

  Args:
    values: parsed flags.
    given: path of the weights; by default --checkpoint.

  Raises:
    UserError: both the path and --step specify a step.
  """
  checkpoint = values.checkpoint if given is None else given
  if values.step is None:
    return checkpoint
  if '@' in checkpoint.rpartition('/')[2]:
    raise UserError(
      f'{checkpoint} already contains a step; remove --step={values.step}.'
    )
  return f'{checkpoint}@{values.step}'
