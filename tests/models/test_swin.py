"""Tests of Swin Transformers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_vit import KEY, abstract, images_of, noise_params

from tests.faults.counts import further
from vit_jax.arrays import flops, sharding, tree
from vit_jax.errors import UserError
from vit_jax.models.swin import LayerNorm, Merge, Model, Windows, bias_index

TINY = dict(width=8, depths=(2, 2), num_heads=2, window_size=2, dtype='float32')


# Sizes


@pytest.mark.slow
@pytest.mark.parametrize(
  'variant, expected',
  [
    ('T', 28_288_354),
    *further(
      ['S', 49_606_258],
      ['B', 87_768_224],
      ['L', 196_532_476],
    ),
  ],
)
def test_parameter_counts(variant, expected):
  """Counts are those of the authors' models with 1000 classes."""
  assert tree.size(abstract(Model(1000, variant=variant))) == expected


@pytest.mark.long
def test_flops_of_swin_t():
  """Table 1: Swin-T takes 4.5 G multiply-adds for an image of 224 pixels."""
  model = Model(1000, variant='T')
  images = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)

  def logits(_, params, images):
    return model.apply({'params': params}, images)

  count = flops.of_training(logits, (), abstract(model), images)
  assert count / 2 == pytest.approx(4.5e9, rel=0.01)


# Windows


@pytest.mark.parametrize('grid, size', [((7, 9), 4), ((14, 21), 7)])
def test_the_mask_separates_shifted_windows(grid, size):
  """Tokens attend to each other if one shifted window contains both.

  The edges of the windows lie at ⌊size / 2⌋, ⌊size / 2⌋ + size, … of the padded
  map; the first and the last window of a row are smaller. Odd sizes, such as
  the published 7, divide a window into unequal parts.
  """
  windows = Windows.of(grid, size, shifted=True)
  assert windows.shift == (size // 2, size // 2)
  rows, columns = windows.padded
  full = windows._replace(rows=rows, columns=columns)
  places = jnp.arange(rows * columns, dtype=jnp.float32).reshape(1, -1, 1)
  cut = np.asarray(full.cut(places))[0, :, :, 0].astype(int)
  window_of = np.stack(
    [
      (cut // columns + size - size // 2) // size,
      (cut % columns + size - size // 2) // size,
    ],
    axis=-1,
  )
  same = (window_of[:, :, None] == window_of[:, None, :]).all(-1)
  np.testing.assert_array_equal(windows.mask(), np.where(same, 0, -100))


@pytest.mark.parametrize('rule', ['authors', 'timm'])
@pytest.mark.parametrize('shifted', [False, True])
def test_odd_maps_are_padded_below_and_on_the_right(rule, shifted):
  """Windows and mergings of 3x5 tokens are those of 4x6 tokens."""
  odd, even = (3, 5), (4, 6)
  x = np.random.default_rng(0).normal(size=(1, *odd, 4)).astype(np.float32)
  below_and_right = ((0, 0), (0, 1), (0, 1), (0, 0))

  def tokens(x):
    return jnp.asarray(x.reshape(1, -1, 4))

  windows = Windows.of(odd, 2, shifted, rule)
  moved = np.roll(x, (-1, -1), (1, 2)) if shifted and rule == 'timm' else x
  filled = Windows.of(even, 2, shifted and rule == 'authors', rule)
  np.testing.assert_array_equal(
    windows.cut(tokens(x)), filled.cut(tokens(np.pad(moved, below_and_right)))
  )
  np.testing.assert_array_equal(windows.join(windows.cut(tokens(x))), tokens(x))
  merged, params = Merge(odd, jnp.dtype('float32')).init_with_output(
    KEY, tokens(x)
  )
  padded = tokens(np.pad(x, below_and_right))
  expected = Merge(even, jnp.dtype('float32')).apply(params, padded)
  np.testing.assert_allclose(merged, expected, atol=1e-6)


def test_pairs_with_equal_offsets_share_a_bias():
  """Pairs with the same offset share a row, and no others do."""
  index = bias_index(3)
  y, x = np.divmod(np.arange(9), 3)
  offsets = {}
  for q, k in np.ndindex(9, 9):
    offsets.setdefault((y[q] - y[k], x[q] - x[k]), set()).add(index[q, k])
  assert all(len(rows) == 1 for rows in offsets.values())
  assert {row for rows in offsets.values() for row in rows} == {*range(25)}
  assert offsets[-2, -2] == {0} and offsets[-2, -1] == {1}
  assert offsets[2, 2] == {24}


@pytest.mark.slow
def test_bias_tables_are_resized_with_the_window():
  """Only the method 'bicubic' is allowed."""
  small, large = Model(0, **TINY), Model(0, **TINY | dict(window_size=4))
  before = tree.flatten(noise_params(small, (16, 16)))
  sized = {
    k: np.asarray(v) for k, v in before.items() if k.startswith(small.sized)
  }
  assert len(sized) == 4
  same = small.adapt(sized, (16, 16), (32, 32), 'aligned')
  assert all(np.array_equal(same[k], sized[k]) for k in sized)
  expected = tree.flatten(abstract(large, (24, 24)))  # maps of 6 and 3
  resized = large.adapt(sized, (16, 16), (24, 24), 'bicubic')
  for path, table in resized.items():
    assert table.shape == expected[path].shape, path
  with pytest.raises(UserError, match="set it to 'bicubic'"):
    large.adapt(sized, (16, 16), (24, 24), 'aligned')


def test_norms_have_pytorchs_epsilon():
  """It is 1e-5, which matters for tokens with a variance as small."""
  x = 1e-3 * jax.random.normal(KEY, (4, 8))
  y, _ = LayerNorm(jnp.dtype('float32')).init_with_output(KEY, x)
  variance = x.var(-1, keepdims=True) + 1e-5
  expected = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(variance)
  np.testing.assert_allclose(y, expected, rtol=1e-4)


# Drop path


@pytest.mark.slow
def test_drop_path_increases_linearly():
  """Block ℓ of L keeps each branch with probability 1 − rate · ℓ / (L − 1).

  Kernels are zero, so that a block only adds its biases: 1 by the MLP, 100 by
  attention, both divided by the kept fraction, or nothing.
  """
  rate, n = 0.6, 2000
  model = Model(0, **TINY, drop_path=rate)
  params = jax.tree.map(jnp.zeros_like, noise_params(model, (8, 8)))
  for stage in ('stage1', 'stage2'):
    for kind in ('plain', 'shifted'):
      block = params[stage]['layers'][kind]
      block['mlp']['fc2']['bias'] += 1.0
      block['attention']['out']['bias'] += 100.0
  after = jax.jit(
    lambda images: model.apply({'params': params}, images, KEY, method='stages')
  )(images_of(n, 8, 8))
  steps = [np.diff(x[..., 0], axis=1, prepend=0) for x in after]
  for layer in range(4):
    keep = 1 - rate * layer / 3
    step = steps[layer // 2][:, layer % 2]
    assert np.ptp(step, axis=1).max() < 1e-3  # one decision for an image
    kept = np.round(step[:, 0] * keep).astype(int)
    assert {*kept} <= {0, 1, 100, 101}
    np.testing.assert_allclose(step[:, 0] * keep, kept, atol=1e-3)
    mlp, attention = kept % 100, kept // 100
    for branch in (mlp, attention):  # five deviations
      assert abs(branch.mean() - keep) <= 5 * np.sqrt(keep * (1 - keep) / n)
    # Branches are independent.
    assert abs((mlp * attention).mean() - keep**2) < 0.06


# Programs


def train(params, images, **options):
  """Returns loss and gradient of a training step, compiled."""
  model = Model(5, **options)

  def loss(params):
    logits = model.apply({'params': params}, images, jax.random.key(7))
    return (logits * jnp.cos(jnp.arange(logits.size)).reshape(-1, 5)).sum()

  return jax.jit(jax.value_and_grad(loss))(params)


@pytest.mark.slow
def test_remat_and_unrolling_give_the_same_gradients():
  """The same paths are dropped."""
  options = TINY | dict(depths=(4,), drop_path=0.3)
  params = noise_params(Model(5, **options), (12, 12))
  images = images_of(4, 12, 12)  # a map of 3: padded and shifted
  jax.tree.map(
    # atol: sums over tokens in another order, of terms of order one
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
    train(params, images, **options, remat='dots', unroll=9),
    train(params, images, **options),
  )


@pytest.mark.long
def test_kernels_compute_the_same():
  """Plain and shifted windows, alone and on a mesh that splits heads.

  Two images are not split over four devices, although their windows could be.
  """
  options = TINY | dict(width=256, depths=(2,), num_heads=8)
  kernels = options | dict(attention='kernel')
  model = Model(5, **kernels)
  assert model.computed_by((16, 16)) == 'attention by kernels'
  params, images = noise_params(model, (16, 16)), images_of(2, 16, 16)
  expected = train(params, images, **options, attention='xla')
  check = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4)
  jax.tree.map(check, train(params, images, **kernels), expected)
  mesh = sharding.make_mesh(jax.devices(), data=4, model=2)
  with jax.set_mesh(mesh):
    split = jax.device_put(images, sharding.replicated(mesh))
    jax.tree.map(check, train(params, split, **kernels), expected)
