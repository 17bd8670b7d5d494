"""Tests of LAMB on stacked layers against separate tensors."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from updates import QKV, stacks, tensors, trained

from benchmarks import peers
from vit_jax.optim import optimizers

RATE = optax.constant_schedule(0.01)


def test_lamb_equals_timm():
  """With and without decay; query, key and value are one matrix."""
  ours = trained(optimizers.lamb(RATE, weight_decay=0.05, trust_joined=(QKV,)))
  theirs = {
    name: torch.nn.Parameter(torch.tensor(vector))
    for name, vector in tensors(stacks(0)).items()
  }
  groups = [
    {'params': [tensor], 'weight_decay': 0.05 * ('kernel' in name)}
    for name, tensor in theirs.items()
  ]
  peers.import_timm()
  peer = importlib.import_module('timm.optim').Lamb(
    groups, lr=0.01, eps=1e-6, max_grad_norm=None
  )
  for step in range(3):
    for name, gradient in tensors(stacks(step + 1)).items():
      theirs[name].grad = torch.tensor(gradient)
    peer.step()
  for name, vector in tensors(ours).items():
    known = theirs[name].detach().numpy()
    np.testing.assert_allclose(vector, known, rtol=2e-5, atol=1e-5)


def test_lamb_without_decay_is_adam():
  """Leaves that do not decay are not adapted; rules may exclude more."""
  adam = trained(optimizers.adam(RATE, eps=1e-6))
  for name, leaf in trained(optimizers.lamb(RATE)).items():
    np.testing.assert_array_equal(leaf, adam[name])
  rules = (('head/.*', dict(decay=0.0)),)
  spared = trained(optimizers.lamb(RATE, weight_decay=0.1, rules=rules))
  np.testing.assert_array_equal(spared['head/kernel'], adam['head/kernel'])
  assert not np.array_equal(
    spared['embedding/kernel'], adam['embedding/kernel']
  )


def test_lamb_moves_a_zero_head():
  """It moves as with Adam; a ratio of zeros would give NaN."""
  zeros = {'head': {'kernel': jnp.zeros((2, 2))}}
  made = optimizers.lamb(optax.constant_schedule(0.1), weight_decay=0.1)
  ones = jax.tree.map(jnp.ones_like, zeros)
  updates, _ = made.update(ones, made.init(zeros), zeros)
  np.testing.assert_allclose(updates['head']['kernel'], -0.1, rtol=1e-5)
