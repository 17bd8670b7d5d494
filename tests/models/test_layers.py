"""Layers: the norm, and the statistics of dropout and drop path."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_vit import KEY, images_of

from vit_jax import tree
from vit_jax.models import layers


def test_norm_of_values_far_from_zero():
  """The variance is taken in two passes: x² − mean² would cancel."""
  x = np.random.default_rng(0).normal(3000, 1, (2, 64)).astype(np.float32)
  norm = layers.layer_norm(None, jnp.dtype('float32'))
  y, _ = norm.init_with_output(KEY, jnp.array(x))
  exact = x.astype(np.float64)
  exact -= exact.mean(axis=-1, keepdims=True)
  exact /= np.sqrt(exact.var(axis=-1, keepdims=True) + 1e-6)
  # atol: one float32 spacing at 3000 is 2.4e-4.
  np.testing.assert_allclose(y, exact, atol=5e-4)


def five_sigma(share, count):
  """Five standard deviations of the mean of `count` coin flips."""
  return 5 * np.sqrt(share * (1 - share) / count)


@pytest.mark.parametrize('rate', [0.1, 0.5, 0.9])
@pytest.mark.parametrize('width', [64, 63])
def test_dropout_statistics(rate, width):
  """The share kept is the rate's to 1/256, and the mean stays the mean.

  Both ways of drawing bits: four decisions a word, or one where the width is
  not divisible by four.
  """
  x = jnp.ones((20_000, width))  # enough to tell 1/256 more or less
  y = np.asarray(layers.dropout(x, rate, KEY))
  share = round(rate * 256) / 256
  assert (y == 0).mean() == pytest.approx(share, abs=five_sigma(share, x.size))
  kept = y[y != 0]
  np.testing.assert_allclose(kept, 1 / (1 - share), rtol=1e-6)
  tolerance = five_sigma(share, x.size) / (1 - share)
  assert y.mean() == pytest.approx(1, abs=tolerance)


def test_dropout_decisions_are_independent():
  """The four bytes of a word, and neighbours, decide apart."""
  y = np.asarray(layers.dropout(jnp.ones((4000, 64)), 0.5, KEY)) > 0
  for shift in (1, 2, 3, 4):
    agree = (y[:, shift:] == y[:, :-shift]).mean()
    count = y[:, shift:].size
    assert agree == pytest.approx(0.5, abs=five_sigma(0.5, count))


@pytest.mark.parametrize('rate', [0.1, 0.3])
def test_dropout_is_unbiased_in_bfloat16(rate):
  """Kept values are scaled by 1 / (1 − rate), rounding averaged out."""
  x = jax.random.uniform(KEY, (1000, 64), minval=1, maxval=2).astype('bfloat16')
  y = layers.dropout(x, rate, jax.random.key(1))
  x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
  scale = y.sum() / x[y != 0].sum()
  # Rounding errors of 2^-9 of ~50,000 values average out to 1e-5.
  assert scale == pytest.approx(256 / (256 - round(rate * 256)), rel=1e-4)


def test_dropout_of_nearly_everything():
  """Every rate that `Model` allows can be run."""
  layers.dropout(jnp.ones((4, 4)), 0.999, KEY)


def test_dropout_without_key_or_rate_is_the_identity():
  """Nothing is drawn at evaluation or at rate 0."""
  x = images_of(2, 4)
  assert layers.dropout(x, 0.5, None) is x
  assert layers.dropout(x, 0.0, KEY) is x


@pytest.mark.parametrize('rate', [0.0, 0.1, 0.5])
def test_drop_path_statistics(rate):
  """Whole examples go, in the rate's share, and the mean stays the mean."""
  count = 20_000
  x = jnp.ones((count, 2, 3))
  y = np.asarray(layers.drop_path(x, jnp.float32(rate), KEY))
  dropped = (y == 0).all(axis=(1, 2))
  assert np.array_equal(dropped, (y == 0).any(axis=(1, 2)))
  tolerance = five_sigma(rate, count)
  assert dropped.mean() == pytest.approx(rate, abs=tolerance)
  np.testing.assert_allclose(y[~dropped], 1 / (1 - rate), rtol=1e-6)
  assert y.mean() == pytest.approx(1, abs=tolerance / (1 - rate) + 1e-6)


def test_drop_path_is_unbiased_in_bfloat16():
  """Kept branches are scaled by 1 / (1 − rate), rounding averaged out."""
  x = jax.random.uniform(KEY, (2000, 1, 64), minval=1, maxval=2)
  x = x.astype('bfloat16')
  y = layers.drop_path(x, jnp.float32(0.1), jax.random.key(1))
  x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
  scale = y.sum() / x[y != 0].sum()
  assert scale == pytest.approx(1 / 0.9, rel=1e-4)  # see dropout's


def masks(branch, **rates):
  """bool `[depth, n]`: whether each layer keeps a branch, in one pass each.

  All parameters are zero but one bias of that layer, a one in channel 0; so
  the output has something in that channel just where it was kept.
  """
  depth, count = 4, 2000
  encoder = layers.Encoder(
    **dict(depth=depth, num_heads=1, mlp_dim=4, gelu='tanh') | rates,
    dtype=jnp.dtype('float32'),
    remat='none',
    unroll=1,
  )
  x = jnp.zeros((count, 1, 4))
  zeros = jax.eval_shape(encoder.init, KEY, x, None)['params']
  zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), zeros)
  zeros['norm']['scale'] += 1
  flat = tree.flatten(zeros)

  @jax.jit
  def kept(layer):
    bias = flat[branch].at[layer, 0].set(1.0)
    params = tree.unflatten(flat | {branch: bias})
    return encoder.apply({'params': params}, x, KEY)[:, 0, 0] > 0.5

  return np.array([kept(layer) for layer in range(depth)])


ATTENTION, MLP = 'layers/attention/out/bias', 'layers/mlp/fc2/bias'


@pytest.mark.parametrize('branch', [ATTENTION, MLP])
def test_drop_path_grows_linearly(branch):
  """The first layer never drops, the last at the model's rate."""
  kept = masks(branch, dropout=0.0, drop_path=0.6)
  for share, expected in zip(
    kept.mean(axis=1), [1, 0.8, 0.6, 0.4], strict=True
  ):
    assert share == pytest.approx(
      expected, abs=five_sigma(expected, kept.shape[1])
    )


def test_every_dropout_has_its_own_mask():
  """No two layers, and no two places within one, decide alike."""
  kept = np.concatenate(
    [masks(branch, dropout=0.5, drop_path=0.0) for branch in (ATTENTION, MLP)]
  )
  for first, second in itertools.combinations(kept, 2):
    agree = (first == second).mean()
    assert agree == pytest.approx(0.5, abs=five_sigma(0.5, len(first)))
