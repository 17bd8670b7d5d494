"""Tokens that stand before those of patches."""

from collections.abc import Callable

import flax.linen as nn
from jaxtyping import Array

Initializer = Callable[..., Array]


def prefix(
  pool: str, distilled: bool, registers: int, cls_deviation: float = 0.0
) -> dict[str, tuple[int, Initializer]]:
  """{parameter: (how many tokens, their initialisation)}, in their order.

  Args:
    pool: 'token' has a class token, `cls`.
    distilled: whether there is a distillation token, whose head learns from a
      teacher (DeiT, arXiv 2012.12877).
    registers: tokens that nothing is read from ("Vision Transformers Need
      Registers", arXiv 2309.16588). They start apart, or they would stay alike.
    cls_deviation: standard deviation of the class token's start.
  """
  normal = nn.initializers.normal
  zeros = nn.initializers.zeros_init()
  cls = normal(cls_deviation) if cls_deviation else zeros
  found = {
    'cls': (int(pool == 'token'), cls),
    'distillation': (int(distilled), normal(0.02)),
    'registers': (registers, normal(1e-6)),
  }
  return {name: each for name, each in found.items() if each[0]}


def count(pool: str, distilled: bool, registers: int) -> int:
  """All tokens before those of patches."""
  return sum(n for n, _ in prefix(pool, distilled, registers).values())
