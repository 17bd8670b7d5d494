"""Tests of Muon on stacked layers against separate matrices."""

import math

import numpy as np
import optax
import pytest

from examples import muon
from tests.optim.test_lamb import (
  DEPTH,
  HEADS,
  HIDDEN,
  SIZE,
  D,
  apart,
  random_tree,
  trained,
)
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
  ours = trained(muon.muon(optax.constant_schedule(rate), momentum=beta))
  adam = trained(optimizers.adam(optax.constant_schedule(rate)))
  start = apart(random_tree(0))
  grads = [apart(random_tree(step + 1)) for step in range(steps)]
  sides = {
    'out': (HEADS * SIZE, D),
    'in': (D, HIDDEN),
    **dict.fromkeys(('query', 'key', 'value'), (D, HEADS * SIZE)),
  }
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
