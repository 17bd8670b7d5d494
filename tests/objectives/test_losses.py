"""Tests of losses against torch, closed forms and their own gradients."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import special

from vit_jax.objectives.losses import (
  LOSSES,
  sigmoid_cross_entropy,
  softmax_cross_entropy,
)

N, K = 6, 11


@pytest.fixture
def logits():
  return np.random.default_rng(0).normal(0, 3, (N, K)).astype(np.float32)


@pytest.fixture
def labels():
  return np.random.default_rng(1).integers(0, K, N).astype(np.int32)


def one_hot(labels):
  return np.eye(K, dtype=np.float32)[labels]


@pytest.mark.parametrize('smoothing', [0.0, 0.1])
@pytest.mark.parametrize('weighted', [False, True])
@pytest.mark.parametrize('soft', [False, True])
def test_softmax_cross_entropy_equals_torch(
  logits, labels, smoothing, weighted, soft
):
  """The factors apply to smoothed labels, and to probabilities."""
  weights = np.linspace(0, 3, K, dtype=np.float32) if weighted else None
  targets = torch.tensor(labels, dtype=torch.long)
  if soft:
    labels = special.softmax(logits[::-1], axis=-1)
    targets = torch.tensor(labels)
  expected = F.cross_entropy(
    torch.tensor(logits),
    targets,
    weight=torch.tensor(weights) if weighted else None,
    reduction='none',
    label_smoothing=smoothing,
  )
  loss = softmax_cross_entropy(
    jnp.array(logits),
    jnp.array(labels),
    smoothing,
    jnp.array(weights) if weighted else None,
  )
  np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('smoothing', [0.0, 1e-4, 0.1])
def test_sigmoid_cross_entropy_is_torchs_sum_over_classes(
  logits, labels, smoothing
):
  """Smoothed targets are α and 1 − α."""
  targets = np.where(one_hot(labels) > 0, 1 - smoothing, smoothing)
  expected = F.binary_cross_entropy_with_logits(
    torch.tensor(logits), torch.tensor(targets).float(), reduction='none'
  ).sum(-1)
  loss = sigmoid_cross_entropy(jnp.array(logits), jnp.array(labels), smoothing)
  np.testing.assert_allclose(loss, expected, rtol=1e-5)


@pytest.mark.parametrize('name', LOSSES)
def test_losses_of_huge_logits_are_finite(name):
  """The loss of a logit of ±1e4 is correct, not inf or NaN."""
  logits = jnp.array([[1e4, 0.0, -1e4], [1e4, 0.0, -1e4]])
  loss = LOSSES[name](logits, jnp.array([0, 2]))
  # Sigmoid: softplus(1e4) − t z, softplus(0) = log 2, softplus(−1e4) = 0.
  extra = np.log(2) if name == 'sigmoid' else 0.0
  # 1e4 is added and subtracted: this loses one float32 spacing, 1e-3.
  np.testing.assert_allclose(loss, [extra, 2e4 + extra], rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize('name', LOSSES)
def test_losses_of_bfloat16_logits_are_computed_in_float32(
  logits, labels, name
):
  low = jnp.array(logits, jnp.bfloat16)
  loss = LOSSES[name](low, jnp.array(labels))
  assert loss.dtype == jnp.float32
  exact = LOSSES[name](low.astype(jnp.float32), jnp.array(labels))
  np.testing.assert_array_equal(loss, exact)
