"""Attention with a custom backward pass, compared with automatic gradients."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.faults.counts import further
from vit_jax.models.attention import attention
from vit_jax.models.attention.attention import dot_product_attention

SHAPES = [  # n, queries, keys, heads, width of a head
  (2, 7, 7, 3, 8),
  (3, 1, 50, 2, 16),  # pooling by a probe
  (2, 197, 197, 2, 64),
]


def plain(query, key, value):
  """Computes the formula in the dtype of its inputs."""
  logits = jnp.einsum('nqhc,nkhc->nhqk', query, key) / query.shape[-1] ** 0.5
  return jnp.einsum('nhqk,nkhc->nqhc', jax.nn.softmax(logits, axis=-1), value)


def inputs(shape, size=1.0, dtype='float32'):
  """Returns queries, keys, values and a gradient of the output."""
  n, queries, keys, *head = shape
  rng = np.random.default_rng(0)
  draws = (
    size * rng.normal(size=(n, t, *head))
    for t in (queries, keys, keys, queries)
  )
  return [jnp.asarray(x, dtype) for x in draws]


def with_gradients(function, query, key, value, dy):
  y, pull = jax.vjp(function, query, key, value)
  return [np.asarray(x, np.float64) for x in (y, *pull(dy.astype(y.dtype)))]


def exactly(arrays):
  """Returns the output and gradients of the formula in float64."""
  with jax.enable_x64(True):
    return with_gradients(plain, *[x.astype('float64') for x in arrays])


@pytest.mark.slow
@pytest.mark.parametrize('shape', SHAPES)
@pytest.mark.parametrize('size', [5.0, *further(0.1)])
def test_float32_attention_equals_the_formula(shape, size, monkeypatch):
  """Values and gradients agree with float64, for the layouts of all devices."""
  arrays = inputs(shape, size)
  for axis in (1, 2):  # of the heads: on a CPU, and on other devices
    monkeypatch.setattr(attention, '_heads_axis', lambda axis=axis: axis)
    results = with_gradients(dot_product_attention, *arrays)
    for ours, exact in zip(results, exactly(arrays), strict=True):
      atol = 3e-6 * abs(exact).max() * max(1, size)
      np.testing.assert_allclose(ours, exact, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize('shape', SHAPES)
@pytest.mark.parametrize('size', [1.0, *further(3.0)])
def test_bfloat16_attention_is_as_exact_as_flax(shape, size):
  """Errors are those of bfloat16, for values and gradients."""
  arrays = inputs(shape, size, 'bfloat16')
  ours = with_gradients(dot_product_attention, *arrays)
  flax = with_gradients(nn.dot_product_attention, *arrays)
  for *both, exact in zip(ours, flax, exactly(arrays), strict=True):
    norm = np.linalg.norm(exact)
    error, flax_error = (np.linalg.norm(x - exact) / norm for x in both)
    assert error < 0.9 * flax_error
    # A few roundings of 2^-9; more if the softmax saturates and the gradient of
    # a logit is a difference of nearly equal numbers.
    assert error < (2**-7 if size <= 1 else 2**-6)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_huge_logits_do_not_overflow(dtype):
  """Logits of thousands give one-hot weights, and finite gradients."""
  query, key, value, dy = inputs((2, 5, 9, 2, 16), 60.0, dtype)
  y, dq, dk, dv = with_gradients(dot_product_attention, query, key, value, dy)
  logits = np.einsum('nqhc,nkhc->nqhk', query, key, dtype=np.float64)
  largest = logits.argmax(-1)[..., None]  # [n, q, h, 1]
  chosen = np.take_along_axis(np.float64(value), largest, axis=1)
  assert np.isclose(y, chosen, rtol=1e-2).mean() > 0.9
  assert all(np.isfinite(x).all() for x in (dq, dk, dv))


def test_attention_weights_are_not_stored():
  """Residuals are the inputs, the output and one number per row."""
  query, key, value, _ = inputs((2, 33, 33, 2, 8))
  _, pull = jax.vjp(dot_product_attention, query, key, value)
  largest = max(x.size for x in jax.tree.leaves(pull))
  assert largest == query.size < 2 * 2 * 33 * 33
