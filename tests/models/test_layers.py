"""Tests of norms, dropout, drop path, GELU and the MLP."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special
from tiny_vit import KEY

from vit_jax.arrays import sharding, tree
from vit_jax.models import layers
from vit_jax.models.vit import Config, Encoder


@pytest.mark.parametrize(
  'dtype, mean, limits',
  [
    # Two passes: x² − mean² would cancel. One spacing at 3000 is 2.4e-4.
    ('float32', 3000.0, dict(rtol=0, atol=5e-4)),
    # One pass is as exact as two for values in bfloat16, which itself rounds by
    # 2^-9 of the value, 250 times the limit and more.
    ('bfloat16', 0.0, dict(rtol=1e-5, atol=5e-5)),
    ('bfloat16', 16.0, dict(rtol=1e-5, atol=5e-5)),
  ],
)
def test_norm_equals_the_formula_in_float64(dtype, mean, limits):
  x = np.random.default_rng(0).normal(mean, 1, (64, 256))
  x = jnp.asarray(x, dtype)
  norm = layers.LayerNorm(jnp.dtype('float32'))
  y, _ = norm.init_with_output(KEY, x)
  exact = np.asarray(x, np.float64)
  exact -= exact.mean(axis=-1, keepdims=True)
  exact /= np.sqrt(exact.var(axis=-1, keepdims=True) + 1e-6)
  np.testing.assert_allclose(y, exact, **limits)


def five_sigma(share, count):
  """Returns five standard deviations of the mean of `count` coin flips."""
  return 5 * np.sqrt(share * (1 - share) / count)


@pytest.mark.parametrize('rate', [0.1, 0.5, 0.9])
@pytest.mark.parametrize('width', [64, 63])
def test_dropout_keeps_its_rate_and_the_mean(rate, width):
  """The kept fraction is 1 − rate, and kept entries are divided by it."""
  y = np.asarray(layers.dropout(jnp.ones((20_000, width)), rate, KEY))
  assert (y == 0).mean() == pytest.approx(rate, abs=five_sigma(rate, y.size))
  np.testing.assert_allclose(y[y != 0], 1 / (1 - rate), rtol=1e-6)


# Keys that a layer uses at two steps, and neighbouring keys.
KEYS = [jax.random.fold_in(KEY, step) for step in range(2)] + [
  jax.random.wrap_key_data(jnp.array([7, word], jnp.uint32)) for word in (1, 2)
]
SHAPE = (64, 50, 256)


def dropped(key, rate=0.1):
  """Returns standardized decisions, with mean 0 and variance 1."""
  y = np.asarray(layers.dropout(jnp.ones(SHAPE), rate, key)) == 0
  return (y - rate) / np.sqrt(rate * (1 - rate))


@pytest.mark.parametrize('axis', [0, 1, 2])
@pytest.mark.parametrize('shift', [1, 2, 3, 4, 8, 16, 32])
def test_neighbors_are_dropped_independently(axis, shift):
  """No correlation along examples, tokens or channels."""
  for key in KEYS:
    y = np.moveaxis(dropped(key), axis, 0)
    products = y[shift:] * y[:-shift]
    assert abs(products.mean()) < 5 / np.sqrt(products.size)


def test_keys_are_independent():
  """Keys of two steps, or with other second words, give unrelated masks."""
  masks = [dropped(key) for key in KEYS]
  for first, second in itertools.combinations(masks, 2):
    assert abs((first * second).mean()) < 5 / np.sqrt(first.size)


def test_words_do_not_depend_on_the_mesh():
  """Each device computes its part of the array of a single device."""
  mesh = jax.make_mesh(
    (4, 2), ('a', 'b'), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  split = jax.sharding.NamedSharding(mesh, jax.P('a', None, 'b'))
  words = layers.random_words
  make = jax.jit(words, static_argnums=1, out_shardings=split)
  whole = layers.random_words(KEY, (8, 3, 16))
  np.testing.assert_array_equal(make(KEY, (8, 3, 16)), whole)


@pytest.mark.parametrize('shape', [(3, 5, 8), (2, 3, 2, 4, 8), (6, 8)])
def test_dropout_is_the_same_on_gpus(shape, monkeypatch):
  """The path with a flat axis of rows draws the same words for each entry."""
  x = jax.random.normal(jax.random.key(1), shape)
  expected = layers.dropout(x, 0.4, KEY)
  monkeypatch.setattr(sharding, 'on_gpu', lambda: True)
  np.testing.assert_array_equal(layers.dropout(x, 0.4, KEY), expected)


@pytest.mark.parametrize('rate', [0.0, 0.1, 0.5])
def test_drop_path_drops_whole_examples_at_its_rate(rate):
  count = 20_000
  x = jnp.ones((count, 2, 3))
  y = np.asarray(layers.drop_path(x, jnp.float32(rate), KEY))
  dropped = (y == 0).all(axis=(1, 2))
  assert np.array_equal(dropped, (y == 0).any(axis=(1, 2)))
  tolerance = five_sigma(rate, count)
  assert dropped.mean() == pytest.approx(rate, abs=tolerance)
  np.testing.assert_allclose(y[~dropped], 1 / (1 - rate), rtol=1e-6)


def masks(place, **rates):
  """Returns bool `[depth, n]`: whether each layer keeps a branch.

  All parameters are zero except one bias of that layer, a one in channel 0, so
  the output has a value in that channel exactly where it was kept.
  """
  depth, count = 4, 2000
  sizes = dict(patch_size=1, width=4, depth=depth, mlp_dim=4, num_heads=1)
  encoder = Encoder(Config(**sizes, **rates, dtype='float32'))
  x = jnp.zeros((count, 1, 4))
  zeros = jax.eval_shape(encoder.init, KEY, x, None)['params']
  zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), zeros)
  zeros['norm']['scale'] += 1
  flat = tree.flatten(zeros)

  @jax.jit
  def kept(layer):
    changed = {place: flat[place].at[layer, 0].set(1.0)}
    if place == HIDDEN:
      changed[FC2] = flat[FC2].at[layer, 0, 0].set(1.0)
    params = tree.unflatten(flat | changed)
    return encoder.apply({'params': params}, x, KEY)[0][:, 0, 0] > 0.5

  return np.array([kept(layer) for layer in range(depth)])


ATTENTION, MLP = 'layers/attention/out/bias', 'layers/mlp/fc2/bias'
HIDDEN, FC2 = 'layers/mlp/fc1/bias', 'layers/mlp/fc2/kernel'


@pytest.mark.parametrize(
  'branch, first, shares',
  [
    (ATTENTION, 0.0, [1, 0.8, 0.6, 0.4]),
    (MLP, 0.0, [1, 0.8, 0.6, 0.4]),
    (MLP, 0.6, [0.4] * 4),
  ],
)
def test_drop_path_grows_linearly(branch, first, shares):
  """Rates change linearly from that of the first to that of the last layer."""
  rates = dict(drop_path=0.6, drop_path_first=first)
  kept = masks(branch, dropout=0.0, **rates)
  for share, expected in zip(kept.mean(axis=1), shares, strict=True):
    assert share == pytest.approx(
      expected, abs=five_sigma(expected, kept.shape[1])
    )


@pytest.mark.slow
def test_layers_and_branches_have_independent_masks():
  attention, mlp, both = (
    masks(place, dropout=0.5, drop_path=0.0)
    for place in (ATTENTION, MLP, HIDDEN)
  )
  for first, second in itertools.combinations([*attention, *mlp], 2):
    agree = (first == second).mean()
    assert agree == pytest.approx(0.5, abs=five_sigma(0.5, len(first)))
  for layer, seen in enumerate(mlp):  # hidden units show where these are kept
    assert not both[layer][~seen].any()
    hidden, tolerance = both[layer][seen], five_sigma(0.5, seen.sum())
    assert hidden.mean() == pytest.approx(0.5, abs=tolerance)
    for other in (*attention, *np.delete(mlp, layer, axis=0)):
      agree = (hidden == other[seen]).mean()
      assert agree == pytest.approx(0.5, abs=tolerance)


@pytest.mark.parametrize(
  ('on_tpu', 'error', 'slope_error'), [(False, 0, 1e-6), (True, 0.003, 2e-4)]
)
def test_exact_gelu_of_bfloat16_is_rounded_once(
  monkeypatch, on_tpu, error, slope_error
):
  """Values within ±8 and their derivatives are compared with float64.

  bfloat16 has a rounding error of 2^-8.
  """
  monkeypatch.setattr(sharding, 'on_tpu', lambda: on_tpu)
  steps = np.arange(2**16, dtype=np.uint16).view(jnp.bfloat16)
  steps = steps[np.abs(steps.astype(np.float32)) <= 8]
  x = jnp.resize(steps, (17, 2048))  # at least once
  assert x.size >= steps.size
  exact = np.float64(x)
  share = special.ndtr(exact)
  y, pull = jax.vjp(lambda x: layers.activate(x, 'exact'), x)
  assert y.dtype == jnp.bfloat16
  np.testing.assert_allclose(
    np.float64(y), exact * share, 2**-8 + error, atol=1e-6
  )
  (slope,) = pull(jnp.ones_like(y))
  density = np.exp(-(exact**2) / 2) / np.sqrt(2 * np.pi)
  np.testing.assert_allclose(
    np.float64(slope), share + exact * density, 2**-8, atol=slope_error
  )


@pytest.mark.parametrize('sign', [-1, 1])
def test_exact_gelu_of_large_values_on_tpus(monkeypatch, sign):
  """They are 0 or x, with derivatives of 0 or 1, without overflow."""
  monkeypatch.setattr(sharding, 'on_tpu', lambda: True)
  x = sign * jnp.logspace(1, 38, 2048, dtype=jnp.bfloat16)
  y, pull = jax.vjp(lambda x: layers.activate(x, 'exact'), x)
  # Some compilers compute 1 + erf with an error of a few 2^-23, which is
  # multiplied by x: the first value is 10.
  for found, limit in (
    (y, np.maximum(x, 0)),
    (pull(jnp.ones_like(y))[0], sign),
  ):
    limit = np.maximum(np.float32(limit), 0)
    np.testing.assert_allclose(np.float32(found), limit, rtol=0, atol=2**-18)


def test_few_channels_use_erf_on_tpus(monkeypatch):
  monkeypatch.setattr(sharding, 'on_tpu', lambda: True)
  gelu = jax.make_jaxpr(lambda x: layers.activate(x, 'exact'))
  few, many = (jnp.zeros((2, units), jnp.bfloat16) for units in (1023, 1024))
  assert 'erf' in str(gelu(few)) and 'erf' not in str(gelu(many))


@pytest.mark.parametrize('gelu', ['tanh', 'exact'])
def test_mlp_applies_dropout_after_gelu(gelu):
  """The order is dense, GELU, dropout, dense; matrices are identities."""
  width, rate = 64, 0.25
  identity = {'kernel': jnp.eye(width), 'bias': jnp.zeros(width)}
  params = {'fc1': identity, 'fc2': identity}
  mlp = layers.Mlp(width, rate, gelu, jnp.dtype('float32'))
  x = jax.random.normal(jax.random.key(1), (50, 7, width))
  wide = np.asarray(x, np.float64)
  inner = np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)
  expected = {
    'tanh': wide * (1 + np.tanh(inner)) / 2,
    'exact': wide * special.ndtr(wide),
  }[gelu]

  def out(key):
    return np.asarray(mlp.apply({'params': params}, x, key))

  np.testing.assert_allclose(out(None), expected, rtol=1e-4, atol=1e-6)
  y = out(KEY)
  kept = y != 0
  tolerance = five_sigma(rate, kept.size)
  assert kept.mean() == pytest.approx(1 - rate, abs=tolerance)
  np.testing.assert_allclose(
    y[kept], expected[kept] / (1 - rate), rtol=1e-4, atol=1e-6
  )
