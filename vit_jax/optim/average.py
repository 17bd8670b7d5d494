"""Exponential moving average of the parameters."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

PyTree = Any


class Average(NamedTuple):
  """Exponential moving average of parameters, debiased at every step.

  Attributes:
    mean: Σ d^(t−i) θ_i / Σ d^(t−i) over updates i = 1, …, t with decay d; a
      float32 tree like the parameters, zero before the first update.
    count: number of updates so far, int32.
  """

  mean: PyTree
  count: Int[Array, '']


def init(params: PyTree) -> Average:
  """Returns the average before the first update."""
  zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
  return Average(zeros, jnp.zeros((), jnp.int32))


def update(average: Average, params: PyTree, decay: float) -> Average:
  """Updates the average with the parameters after an optimizer update.

  The parameters after update t have the weight (1 − d) / (1 − d^t), so the
  weights sum to 1 from the first update on. Without this correction, an average
  with d = .9999 would consist of 95 % initial values after 500 updates.

  Args:
    average: average before the update.
    params: parameters after the update.
    decay: d, in (0, 1).

  Reference: Polyak averaging in the paper's Table 2; the bias correction is
  that of Adam, arXiv 1412.6980, section 3.
  """
  count = average.count + 1
  weight = (1 - decay) / -jnp.expm1(count * math.log(decay))
  mean = jax.tree.map(lambda m, p: m + weight * (p - m), average.mean, params)
  return Average(mean, count)
