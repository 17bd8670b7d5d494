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


def run(model, params, *inputs, **settings):
  """Runs `model.apply`, compiled."""
  apply = jax.jit(
    lambda p, *inputs: model.apply({'params': p}, *inputs, **settings)
  )
  return apply(params, *inputs)


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
  params = abstract(model)
  count = flops.of_training(
    lambda _, params, x: model.apply({'params': params}, x), (), params, images
  )
  assert count / 2 == pytest.approx(4.5e9, rel=0.01)


def test_messages_of_unsupported_results_and_images():
  model = Model(5, **TINY)
  params, images = noise_params(model, (8, 8)), images_of(1, 8, 8)
  for name in ('layers', 'attention'):
    with pytest.raises(UserError, match=f'no {name}; allowed in want: tokens'):
      model.apply({'params': params}, images, None, (name,), method='predict')
  with pytest.raises(UserError, match='30x32 .*multiples of 4'):
    model.check((30, 32))


def test_rectangular_windows_are_refused():
  """timm uses them for maps with one side smaller than a window."""
  sizes = TINY | dict(window_size=4)
  with pytest.raises(UserError, match="window_rule='timm'.*3x8 .*3x4 tokens"):
    Model(5, **sizes, window_rule='timm').check((12, 32))
  Model(5, **sizes).check((12, 32))


@pytest.mark.slow
def test_initial_values():
  """N(0, 0.02), and PyTorch's ±1/√inputs for the patch embedding."""
  model = Model(10, **TINY | dict(width=64))
  key = jax.random.key(0, impl='unsafe_rbg')  # quick to compile
  params = jax.jit(model.init)(key, images_of(1, 16, 16))
  flat = tree.flatten(params['params'])
  for path in (
    'stage1/layers/plain/attention/query/kernel',
    'head/kernel',
    'stage2/layers/shifted/mlp/fc2/kernel',
    'merge1/kernel',
  ):
    assert np.std(flat[path]) == pytest.approx(0.02, rel=0.1), path
  assert np.any(flat['stage1/layers/plain/attention/bias_table'])
  for leaf in ('kernel', 'bias'):
    largest = np.abs(flat[f'embedding/{leaf}']).max()
    assert 0.9 / np.sqrt(48) < largest <= 1 / np.sqrt(48), leaf
  for path in ('stage1/layers/plain/mlp/fc1/bias', 'head/bias'):
    assert not np.any(flat[path]), path


# Windows


@pytest.mark.parametrize(
  'grid, size', [((8, 8), 4), ((7, 9), 4), ((6, 9), 3), ((14, 21), 7)]
)
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
  after = run(model, params, images_of(n, 8, 8), KEY, method='stages')
  steps = [np.diff(x[..., 0], axis=1, prepend=0) for x in after]
  shares = []
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
    shares.append((mlp * attention).mean())
    # Branches are independent.
    assert abs(shares[-1] - keep**2) < 0.06


# Programs


def value_and_gradient(params, images, **settings):
  """Returns loss and gradient in training with these options."""
  model = Model(5, **TINY | dict(depths=(4,)), drop_path=0.3, **settings)

  def loss(params):
    logits = model.apply({'params': params}, images, jax.random.key(7))
    return (logits * jnp.cos(jnp.arange(logits.size)).reshape(-1, 5)).sum()

  return jax.jit(jax.value_and_grad(loss))(params)


@pytest.mark.slow
def test_remat_and_unrolling_give_the_same_gradients():
  """The same paths are dropped."""
  params = noise_params(Model(5, **TINY | dict(depths=(4,))), (12, 12))
  images = images_of(4, 12, 12)  # a map of 3: padded and shifted
  jax.tree.map(
    # atol: sums over tokens in another order, of terms of order one
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
    value_and_gradient(params, images, remat='dots', unroll=9),
    value_and_gradient(params, images),
  )


# Kernels

BY_KERNELS = TINY | dict(
  width=256, depths=(2,), num_heads=8, attention='kernel'
)


def with_gradients(model, params, images):
  """Returns logits and gradients of a weighted sum of them."""

  def loss(params):
    logits = model.apply({'params': params}, images)
    return (
      logits * jnp.cos(jnp.arange(logits.size)).reshape(logits.shape)
    ).sum(), logits

  gradients, logits = jax.jit(jax.grad(loss, has_aux=True))(params)
  return logits, gradients


@pytest.mark.long
def test_kernels_compute_the_same():
  """Plain and shifted windows, alone and on a mesh that splits heads.

  Two images are not split over four devices, although their windows could be.
  """
  model = Model(5, **BY_KERNELS)
  params, images = noise_params(model, (16, 16)), images_of(2, 16, 16)
  theirs = with_gradients(model.reference, params, images)
  assert model.computed_by((16, 16)) == 'attention by kernels'
  check = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4)
  jax.tree.map(check, with_gradients(model, params, images), theirs)
  mesh = sharding.make_mesh(jax.devices(), data=4, model=2)
  with jax.set_mesh(mesh):
    split = jax.device_put(images, sharding.replicated(mesh))
    jax.tree.map(check, with_gradients(model, params, split), theirs)
