"""GPU clusters by name: h100:4x8 is 4 nodes of 8. No compiler is asked.

There is none for a GPU where there is no GPU. What is known without one are
the bytes that stay (the training state, sharded, and a batch) and the FLOPs:
limits below which neither memory nor time can be.
"""

import re

from vit_jax.arrays import chips
from vit_jax.errors import UserError


def parse(name: str) -> tuple[chips.Gpu, int] | None:
  """The kind of h100:4x8 and the number of GPUs; None: no such name at all.

  Raises:
    UserError: a GPU's name, and another form than NODESxGPUS after it.
  """
  kind, _, shape = name.partition(':')
  if kind not in chips.GPUS:
    return None
  sides = re.fullmatch(r'([1-9]\d*)x([1-9]\d*)', shape)
  if not sides:
    raise UserError(
      f'--topology is {name!r}; give {kind}:NODESxGPUS, such as {kind}:4x8 for '
      '4 nodes of 8 GPUs.'
    )
  return chips.GPUS[kind], int(sides[1]) * int(sides[2])


def least_seconds(image_flops: float, batch_size: int, name: str) -> float:
  """Time of a step at the peak of all GPUs, which no program reaches."""
  parsed = parse(name)
  assert parsed is not None
  gpu, devices = parsed
  peak = chips.peak_flops(gpu.device_kind)
  assert peak is not None
  return image_flops * batch_size / devices / peak
