"""Defines the flags that select trained weights."""

import re
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


def define_image_size() -> None:
  """Defines --image_size; see `image_size`."""
  flags.DEFINE_list(
    'image_size',
    [],
    'Side of the images in pixels, or HEIGHT,WIDTH; positions are interpolated '
    'to another size than that of the weights, which is the default.',
  )


def image_size(values: Any) -> tuple[int, int] | None:
  """Returns (height, width) of --image_size, pixels; None if it is not given.

  Raises:
    UserError: the flag does not contain one or two positive integers.
  """
  sides = values.image_size
  if not sides:
    return None
  if len(sides) > 2 or not all(
    re.fullmatch('[1-9][0-9]{0,5}', s) for s in sides
  ):
    raise UserError(
      f'--image_size is {",".join(sides)!r}; give the side of the images in '
      'pixels (--image_size=384) or HEIGHT,WIDTH (--image_size=256,192).'
    )
  return int(sides[0]), int(sides[-1])


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
