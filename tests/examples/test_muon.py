"""Tests of Muon on stacked layers against separate matrices."""

import math

import numpy as np
import optax
import pytest
from updates import DEPTH, WIDTH, stacks, tensors, trained

from examples import muon
from vit_jax.config import schema
from vit_jax.errors import UserError
from vit_jax.optim import optimizers


def test_the_config_names_its_module():
  """The function has the name of the module, and all keys are its own."""
  found = schema.constructor('optimizer', {'name': 'examples.muon'})
  assert found is muon.muon
  with pytest.raises(UserError, match='examples.axial does not define axial'):
    schema.constructor('optimizer', {'name': 'examples.axial'})


def polar(matrix):
  """Runs five Newton-Schulz steps in NumPy, as described by Jordan."""
  a, b, c = 3.4445, -4.7750, 2.0315
  x = matrix / (np.linalg.norm(matrix) + 1e-8)
  transposed = x.shape[0] > x.shape[1]
  x = x.T if transposed else x
  for _ in range(5):
    y = x @ x.T
    x = a * x + (b * y + c * y @ y) @ x
  return x.T if transposed else x


@pytest.mark.slow
def test_muon_equals_separate_matrices():
  """Each layer's matrix has flattened heads and the size of Adam's update."""
  rate, beta, steps = 0.01, 0.95, 3
  schedule = optax.constant_schedule(rate)
  # Each layer's array as a vector, by name.
  ours, adam, start, *grads = (
    tensors(values, joined=False)
    for values in (
      trained(muon.muon(schedule, momentum=beta)),
      trained(optimizers.adam(schedule)),
      *map(stacks, range(steps + 1)),
    )
  )
  heads = (WIDTH, WIDTH)  # 2 heads of size 4
  sides = {'in': (WIDTH, 12)}
  sides |= dict.fromkeys(('out', 'query', 'key', 'value'), heads)
  seen = 0
  for name, leaf in start.items():
    kind = name.split('/')[-2] if '/' in name else ''
    if 'layers/' not in name or 'kernel' not in name:
      np.testing.assert_allclose(ours[name], adam[name], rtol=1e-6)
      continue
    seen += 1
    shape = sides[kind]
    expected, moment = leaf.reshape(shape).astype(np.float64), 0.0
    for step, grad in enumerate(grads, 1):
      grad = grad[name].reshape(shape).astype(np.float64)
      moment = beta * moment + (1 - beta) * grad
      # Nesterov momentum with bias correction.
      ahead = beta * moment / (1 - beta ** (step + 1))
      ahead += (1 - beta) * grad / (1 - beta**step)
      expected -= rate * 0.2 * math.sqrt(max(shape)) * polar(ahead)
    np.testing.assert_allclose(
      ours[name].reshape(shape), expected, rtol=1e-4, atol=1e-5, err_msg=name
    )
  assert seen == 5 * DEPTH
