"""Tests of the arguments of cuDNN's attention, with a plain formula for it."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.faults.counts import further
from vit_jax.arrays import sharding
from vit_jax.models.attention import cudnn
from vit_jax.models.attention.attention import relative_attention


@pytest.fixture
def calls(monkeypatch):
  """Replaces the library by the formula, as if on a GPU.

  Returns:
    The arguments of each call.
  """
  made = []
  signature = inspect.signature(jax.nn.dot_product_attention)

  def library(*arrays, **options):
    given = signature.bind(*arrays, **options).arguments
    made.append(given)
    return formula(*arrays, *(given.get(f'{x}_seq_lengths') for x in SIDES))

  monkeypatch.setattr(sharding, 'on_gpu', lambda: True)
  monkeypatch.setattr(jax.nn, 'dot_product_attention', library)
  return made


SIDES = ('query', 'key_value')


def formula(query, key, value, queries=None, keys=None):
  """Computes attention example by example, in NumPy and float64.

  Args:
    query: queries.
    key: keys.
    value: values.
    queries: number of queries of each example; the other outputs are zero.
    keys: number of keys of each example; the others have no weight.
  """
  query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
  y = np.zeros((*query.shape[:3], value.shape[-1]))
  for n, heads in np.ndindex(query.shape[0], query.shape[2]):
    rows = query.shape[1] if queries is None else int(queries[n])
    columns = key.shape[1] if keys is None else int(keys[n])
    q, k, v = query[n, :rows, heads], key[n, :columns, heads], value[n]
    weights = np.exp(q @ k.T / np.sqrt(q.shape[-1]))
    weights /= weights.sum(-1, keepdims=True)
    y[n, :rows, heads] = weights @ v[:columns, heads]
  return jnp.asarray(y, jnp.float32)


def inputs(queries, keys):
  rng = np.random.default_rng(0)
  shapes = [(2, length, 3, 8) for length in (queries, keys, keys)]
  return [jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes]


@pytest.mark.parametrize('queries, keys', [(7, 7), (8, 8), (1, 6), (4, 5)])
def test_an_odd_number_of_tokens_is_padded_and_masked(calls, queries, keys):
  """Values agree with the formula; the lengths are those without padding."""
  arrays = inputs(queries, keys)
  actual = cudnn.attend(*arrays)
  np.testing.assert_allclose(actual, formula(*arrays), atol=1e-5)
  (given,) = calls
  assert given['implementation'] == 'cudnn'
  assert given['query'].shape[1] == queries + queries % 2
  assert given['key'].shape == given['value'].shape
  assert given['key'].shape[1] == keys + keys % 2
  for side, length in zip(SIDES, (queries, keys), strict=True):
    lengths = given.get(f'{side}_seq_lengths')
    if queries % 2 or keys % 2:
      assert lengths.dtype == jnp.int32 and lengths.tolist() == [length] * 2
    else:  # the kernel without a mask is faster
      assert lengths is None


@pytest.mark.parametrize('tokens', [5, 7])
def test_padding_of_the_caller_is_masked(calls, tokens):
  """The content of the padding has no effect, and its outputs are zero."""
  padded = [x.at[:, tokens:].set(9.0) for x in inputs(8, 8)]
  actual = cudnn.attend(*padded, tokens=tokens)
  assert actual.shape == padded[0].shape
  expected = formula(*[x[:, :tokens] for x in padded])
  np.testing.assert_allclose(actual[:, :tokens], expected, atol=1e-5)
  assert not actual[:, tokens:].any()
  for side in SIDES:
    assert calls[0][f'{side}_seq_lengths'].tolist() == [tokens] * 2


@pytest.mark.parametrize(
  'channels, dtype, expected',
  [
    (64, jnp.bfloat16, True),
    (8, jnp.float16, True),
    (128, jnp.bfloat16, True),
    (136, jnp.bfloat16, False),
    (12, jnp.bfloat16, False),
    (64, jnp.float32, False),
  ],
)
def test_sizes_of_heads_that_are_supported(channels, dtype, expected):
  assert cudnn.fits(channels, jnp.dtype(dtype)) == expected


@pytest.mark.parametrize('tokens', [9, *further(16)])
@pytest.mark.parametrize('shared', [False, *further(True)])
@pytest.mark.parametrize('by_caller', [False, True])
def test_windows_with_a_bias(tokens, shared, by_caller):
  """Outputs and gradients agree with XLA's, also the gradient of the bias.

  An odd number of tokens is padded, here or by the caller. Windows may share a
  bias.
  """
  windows, heads = 4, 3
  rng = np.random.default_rng(0)
  sizes = 2, tokens, windows, heads, 8
  shapes = [(1 if shared else windows, heads, tokens, tokens), *[sizes] * 4]
  draws = [jnp.asarray(rng.normal(size=x), jnp.float32) for x in shapes]

  def ours(bias, *arrays):
    if by_caller:
      arrays = [cudnn.even(x) for x in arrays]
    return cudnn.attend(*arrays, bias=bias)[:, :tokens]

  def theirs(bias, *arrays):
    arrays = (x.swapaxes(1, 2) for x in arrays)
    return relative_attention(*arrays, None, bias).swapaxes(1, 2)

  def with_gradients(function, *arrays, dy):
    y, pull = jax.vjp(function, *arrays)
    return y, *pull(dy)

  compute = jax.jit(with_gradients, static_argnums=0)
  results = [compute(f, *draws[:4], dy=draws[4]) for f in (ours, theirs)]
  for actual, expected in zip(*results, strict=True):
    np.testing.assert_allclose(actual, expected, atol=1e-5)
