"""Tests of BiT's ResNet and of the hybrids' stem."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_vit import KEY, abstract, images_of, noise_params

from tests.faults.counts import further
from vit_jax.arrays import tree
from vit_jax.models import resnet, vit

TINY = dict(depths=(3,), width_factor=1, dtype='float32')
STEM = dict(name='resnet', depths=(1, 1))
SIZES = dict(width=64, depth=1, mlp_dim=64, num_heads=2, dtype='float32')

# Sizes


@pytest.mark.parametrize(
  'variant, expected',
  [
    ('R50x1', 23_500_352),
    ('R152x2', 232_238_208),
    ('R50+B/16', 97_890_112),
    *further(
      ['R200x3', 562_488_000],
      ['R50+B/32', 110_176_832],
      ['R50+L/16', 315_458_624],
      ['R50+L/32', 327_969_856],
    ),
  ],
)
def test_parameter_counts(variant, expected):
  """Counts are those of the public models, without a head."""
  build = vit.Model if '/' in variant else resnet.Model
  assert tree.size(abstract(build(0, variant=variant))) == expected


@pytest.mark.parametrize(
  'variant, size, grid',
  [
    ('R+Ti/16', (384, 224), (12, 7)),  # effectively patches of 32 pixels
    ('R50+B/16', (225, 224), (15, 14)),  # SAME rounds up
    *further(['R26+S/32', (224, 224), (7, 7)]),
  ],
)
def test_grids_of_hybrids(variant, size, grid):
  """Each patch of the stem's map has a position embedding."""
  model = vit.Model(0, variant=variant)
  assert model.grid(size) == grid
  embeddings = abstract(model, size)['position']['embedding'].shape[1]
  assert embeddings == 1 + grid[0] * grid[1]


# Layers


@pytest.mark.parametrize(
  'activation, norm_epsilon, divisor',
  [
    ('before', 1e-5, lambda variance: jnp.sqrt(variance + 1e-10)),  # BiT
    ('after', 1e-6, lambda variance: jnp.sqrt(variance) + 1e-5),  # hybrids
  ],
)
def test_epsilons_of_the_official_codes(activation, norm_epsilon, divisor):
  """Variances of inputs and kernels are small, so that epsilons matter."""
  dtype = jnp.dtype('float32')
  new_norm, new_conv = resnet.norm_and_conv(activation, dtype)
  x = 1e-3 * jax.random.normal(KEY, (1, 4, 4, 32))
  params = dict(scale=jnp.ones(32), bias=jnp.zeros(32))
  y = new_norm().apply({'params': params}, x)
  centered = x - x.mean((1, 2), keepdims=True)  # groups of a single channel
  variance = jnp.square(centered).mean((1, 2), keepdims=True)
  expected = centered / jnp.sqrt(variance + norm_epsilon)
  np.testing.assert_allclose(y, expected, rtol=1e-3, atol=1e-5)

  kernel = 1e-5 * jax.random.normal(KEY, (1, 1, 8, 4))
  identity = jnp.eye(8)[None, :, None]
  y = new_conv(4).apply({'params': {'kernel': kernel}}, identity)
  centered = kernel[0, 0] - kernel[0, 0].mean(0)
  expected = centered / divisor(jnp.square(centered).mean(0))
  np.testing.assert_allclose(y[0, :, 0], expected, rtol=1e-3)


@pytest.mark.parametrize('sides', [(6, 7), (7, 6), (1, 2)])
def test_max_pooling_of_bit_equals_that_of_a_padded_map(sides):
  """Values and gradients are equal, for even and odd sides."""
  rng = np.random.default_rng(0)
  x = jnp.array(rng.normal(size=(2, *sides, 3)) - 1, jnp.float32)

  def padded(x):
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    return nn.max_pool(x, (3, 3), (2, 2))

  expected, pull = jax.vjp(padded, x)
  ours, pull_ours = jax.vjp(lambda x: resnet.max_pool(x, 'fixed'), x)
  np.testing.assert_array_equal(ours, expected)
  np.testing.assert_array_equal(*(f(expected)[0] for f in (pull, pull_ours)))


@pytest.mark.slow
def test_initial_values():
  """Heads start at their bias; units of a stem start as the identity."""
  model = resnet.Model(7, **TINY, head_bias=-10.0)
  params = jax.jit(model.init)(KEY, jnp.zeros((1, 16, 16, 3)))['params']
  assert not np.any(params['head']['kernel'])
  assert np.all(params['head']['bias'] == -10)
  kernels = np.asarray(params['block1']['layers']['conv2']['kernel'])
  assert kernels.std() == pytest.approx(1 / np.sqrt(9 * 64), rel=0.05)
  assert not np.allclose(kernels[0], kernels[1])
  hybrid = vit.Model(0, **SIZES, patch_size=1, stem=STEM | dict(depths=(2,)))
  stem = jax.jit(hybrid.init)(KEY, jnp.zeros((1, 8, 8, 3)))['params']['stem']
  assert not np.any(stem['block1']['layers']['gn3']['scale'])
  assert np.all(stem['block1']['unit1']['gn1']['scale'] == 1)


# Results


@pytest.mark.slow
def test_predict_returns_the_last_map():
  model = resnet.Model(0, **TINY | dict(depths=(1,)))
  variables = {'params': noise_params(model, (16, 12))}
  images, want = images_of(2, 16, 12), ('tokens',)
  out = model.apply(variables, images, None, want, method='predict')
  assert out['tokens'].shape == (2, 4 * 3, 256)
  expected = out['tokens'].mean(1)
  np.testing.assert_allclose(out['features'], expected, rtol=1e-4, atol=1e-5)
  np.testing.assert_array_equal(out['features'], out['logits'])


@pytest.mark.slow
@pytest.mark.parametrize('remat', ['full', *further('dots')])
def test_the_reference_is_the_same_function(remat):
  """Gradients do not depend on unrolling and rematerialization."""
  model = resnet.Model(3, **TINY, remat=remat, unroll=9)
  params, images = noise_params(model, (16, 16)), images_of(2, 16, 16)
  plain = model.reference
  assert (plain.remat, plain.unroll) == ('none', 1)

  def gradient(model):
    def loss(params):
      return jnp.square(model.apply({'params': params}, images)).mean()

    return tree.flatten(jax.jit(jax.grad(loss))(params))

  ours, theirs = gradient(model), gradient(plain)
  for path, leaf in ours.items():
    size = np.abs(theirs[path]).max()
    assert size > 0, path
    np.testing.assert_allclose(leaf / size, theirs[path] / size, atol=1e-4)
