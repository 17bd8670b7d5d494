"""The average of weights."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

PyTree = Any


class Average(NamedTuple):
  """Exponential moving average of parameters, debiased at every step.

  Attributes:
    mean: Σ d^(t−i) θ_i / Σ d^(t−i), float32, like the parameters; zero before
      the first update.
    count: updates it has seen, int32.
  """

  mean: PyTree
  count: Int[Array, '']


def init(params: PyTree) -> Average:
  """Returns an average over no parameters yet."""
  zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
  return Average(zeros, jnp.zeros((), jnp.int32))


def update(average: Average, params: PyTree, decay: float) -> Average:
  """Takes in the parameters after one update.

  The newest parameters weigh (1 − d) / (1 − d^t), so the weights sum to 1 from
  the first update on: an average of .9999 that started from fixed weights would
  hold 95 % of them after 500 updates.

  Reference: Polyak averaging in the paper's Table 2; the bias correction is
  that of Adam, arXiv 1412.6980, section 3.
  """
  count = average.count + 1
  share = (1 - decay) / -jnp.expm1(count * math.log(decay))
  mean = jax.tree.map(lambda m, p: m + share * (p - m), average.mean, params)
  return Average(mean, count)
