"""Tests of losses against torch, closed forms and their own gradients."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import special

from vit_jax.objectives.losses import LOSSES

N, K = 6, 11


LOGITS = np.random.default_rng(0).normal(0, 3, (N, K)).astype(np.float32)
LABELS = np.random.default_rng(1).integers(0, K, N).astype(np.int32)


@pytest.mark.parametrize('smoothing', [0.0, 0.1])
@pytest.mark.parametrize('weighted', [False, True])
@pytest.mark.parametrize('soft', [False, True])
def test_softmax_cross_entropy_equals_torch(smoothing, weighted, soft):
  """The factors apply to smoothed labels, and to probabilities."""
  weights = np.linspace(0, 3, K, dtype=np.float32)
  labels = special.softmax(LOGITS[::-1], axis=-1) if soft else LABELS
  expected = F.cross_entropy(
    torch.tensor(LOGITS),
    torch.tensor(labels if soft else np.int64(labels)),
    weight=torch.tensor(weights) if weighted else None,
    reduction='none',
    label_smoothing=smoothing,
  )
  factors = (jnp.array(weights),) if weighted else ()
  loss = LOSSES['softmax'](
    jnp.array(LOGITS), jnp.array(labels), smoothing, *factors
  )
  np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('smoothing', [0.0, 1e-4, 0.1])
def test_sigmoid_cross_entropy_is_torchs_sum_over_classes(smoothing):
  """Smoothed targets are α and 1 − α."""
  is_label = np.arange(K) == LABELS[:, None]
  targets = np.float32(np.where(is_label, 1 - smoothing, smoothing))
  expected = F.binary_cross_entropy_with_logits(
    torch.tensor(LOGITS), torch.tensor(targets), reduction='none'
  ).sum(-1)
  loss = LOSSES['sigmoid'](jnp.array(LOGITS), jnp.array(LABELS), smoothing)
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
def test_losses_of_bfloat16_logits_are_computed_in_float32(name):
  low = jnp.array(LOGITS, jnp.bfloat16)
  loss = LOSSES[name](low, jnp.array(LABELS))
  assert loss.dtype == jnp.float32
  exact = LOSSES[name](low.astype(jnp.float32), jnp.array(LABELS))
  np.testing.assert_array_equal(loss, exact)
