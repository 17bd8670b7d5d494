"""Tests of the Vision Transformer: sizes, images, pooling, symmetries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_vit import KEY, SIZES, abstract, images_of, noise_params

from tests.faults.counts import further
from vit_jax.arrays import tree
from vit_jax.errors import UserError
from vit_jax.models.vit import Model

# Sizes


@pytest.mark.parametrize(
  'variant, classes, pre_logits, side, expected',
  [
    ('Ti/16', 0, False, 224, 5_524_416),
    ('S/16', 0, False, 224, 21_665_664),
    ('B/32', 0, False, 224, 87_455_232),
    ('L/16', 0, False, 224, 303_301_632),
    ('H/14', 21_843, False, 224, 658_745_683),
    ('B/16', 21_843, True, 224, 103_186_515),
    ('B/16', 1000, False, 384, 86_859_496),
    *further(
      ['B/16', 0, False, 224, 85_798_656],
      ['L/32', 0, False, 224, 305_510_400],
      ['H/14', 0, False, 224, 630_764_800],
      ['H/14', 1000, False, 224, 632_045_800],
      ['B/16', 21_843, False, 224, 102_595_923],
      ['L/16', 21_843, False, 224, 325_690_707],
      ['L/16', 21_843, True, 224, 326_740_307],
      ['H/14', 21_843, True, 224, 660_385_363],
      ['L/16', 1000, False, 384, 304_715_752],
    ),
  ],
)
def test_parameter_counts(variant, classes, pre_logits, side, expected):
  """Table 1's models have exactly the public models' parameters."""
  model = Model(classes, variant=variant, pre_logits=pre_logits)
  assert tree.size(abstract(model, (side, side))) == expected


@pytest.mark.parametrize(
  'variant, side, options, expected',
  [
    ('B/16', 224, dict(registers=4, prefix_positions=False), 86_569_960),
    ('B/16', 224, dict(distilled=True), 87_338_192),  # DeiT-B distilled
    ('B/16', 224, dict(layer_scale=1e-4, prefix_positions=False), 86_585_320),
    # DINOv2's largest, with a head of 1000 classes and without a mask token
    (
      'B/14',
      518,
      dict(width=1536, depth=40, num_heads=24, mlp_dim=4096)
      | dict(gated=True, layer_scale=1e-5),
      1_136_480_768 - 1536 + 1537 * 1000,
    ),
  ],
)
def test_parameter_counts_with_options(variant, side, options, expected):
  """Counts are those of the public models."""
  model = Model(1000, variant=variant, **options)
  assert tree.size(abstract(model, (side, side))) == expected


# Images and pooling


@pytest.mark.slow
@pytest.mark.parametrize('pool', ['map', *further('token', 'gap')])
def test_each_pooling_has_its_parameters(pool):
  """Logits are those of the head."""
  model = Model(5, **SIZES, pool=pool, pre_logits=True)
  shapes = tree.flatten(abstract(model, (8, 12)))
  assert ('cls' in shapes) == (pool == 'token')
  assert any(path.startswith('map/') for path in shapes) == (pool == 'map')
  tokens = 6 + (pool == 'token')
  assert shapes['position/embedding'].shape == (1, tokens, 16)
  params = noise_params(model, (8, 12))
  images = images_of(2, 8, 12)
  out = model.apply({'params': params}, images, method=model.predict)
  assert out['features'].shape == (2, 16) and out['logits'].shape == (2, 5)
  assert np.abs(out['features']).max() <= 1  # tanh
  head = params['head']
  np.testing.assert_allclose(
    out['logits'], out['features'] @ head['kernel'] + head['bias'], rtol=1e-4
  )


def test_an_image_that_patches_do_not_fill_is_refused():
  """The error contains the patch size, at `grid` and at the images."""
  model = Model(0, variant='H/14')
  with pytest.raises(UserError, match="384x384 .*multiples of 14 .*'drop'"):
    model.grid((384, 384))
  with pytest.raises(UserError, match='multiples of 14 pixels.$'):
    model.grid((13, 384))  # nothing would remain
  small = Model(0, **SIZES)
  for height, width in ((9, 8), (8, 9)):
    with pytest.raises(UserError, match=f'{height}x{width}'):
      small.init(KEY, jnp.zeros((1, height, width, 3)))


@pytest.mark.slow
def test_remainder_drop_ignores_the_last_pixels():
  """H/14 at 384 px has 27 x 27 patches; the last 6 pixels have no effect."""
  model = Model(0, variant='H/14', remainder='drop')
  assert model.grid((384, 384)) == (27, 27)
  shapes = tree.flatten(abstract(model, (384, 384)))
  assert shapes['position/embedding'].shape == (1, 1 + 27 * 27, 1280)
  with pytest.raises(UserError, match='13x384 pixels .*patches of 14 pixels'):
    model.grid((13, 384))

  small = Model(0, **SIZES, remainder='drop')
  params = noise_params(small, (10, 9))
  images = images_of(1, 10, 9)
  edge = images.at[:, 8:].set(0.5).at[:, :, 8:].set(0.5)
  before = small.apply({'params': params}, images)
  np.testing.assert_array_equal(before, small.apply({'params': params}, edge))
  inner = images.at[:, 7].set(0.5)
  assert np.abs(before - small.apply({'params': params}, inner)).max() > 1e-3


# Parts and intermediate results


@pytest.mark.slow
@pytest.mark.parametrize('pool', ['token', *further('gap', 'map')])
def test_embed_encode_and_readout_give_predict(pool):
  """The parameters are the same."""
  model = Model(5, **SIZES, pool=pool, pre_logits=True, dropout=0.5)
  params, images = noise_params(model, (8, 12)), images_of(2, 8, 12)

  def part(method, *inputs):
    return model.apply({'params': params}, *inputs, method=method)

  for key in (None, KEY):
    tokens = part('encode', part('embed', images), key)
    out, whole = part('readout', tokens), part('predict', images, key)
    for name in ('features', 'logits'):
      np.testing.assert_array_equal(out[name], whole[name])


@pytest.mark.slow
@pytest.mark.parametrize('attention', ['kernel', *further('xla')])
def test_predict_returns_tokens_layers_and_attention(attention):
  """They agree with a computation from the parameters."""
  sizes = SIZES | dict(width=128, num_heads=2)
  model = Model(5, **sizes, attention=attention)
  params, images = noise_params(model, (8, 8), 0.1), images_of(2, 8, 8)
  want = ('tokens', 'layers', 'attention')
  out = model.apply({'params': params}, images, None, want, method='predict')
  assert out['layers'].shape == (2, 3, 5, 128)
  assert out['attention'].shape == (2, 3, 2, 5, 5)
  np.testing.assert_allclose(out['attention'].sum(-1), 1, rtol=1e-5)

  def norm(x, p):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1)[..., None] + 1e-6)
    return x * p['scale'] + p['bias']

  after = np.asarray(out['layers'])
  tokens = norm(after[:, -1], params['encoder']['norm'])
  np.testing.assert_allclose(out['tokens'], tokens, rtol=1e-4, atol=1e-5)
  # Layer 1 from the output of layer 0.
  layer = jax.tree.map(lambda leaf: leaf[1], params['encoder']['layers'])
  x = norm(after[:, 0], layer['norm1'])
  project = {
    name: np.einsum('ntd,dhc->nthc', x, layer['attention'][name]['kernel'])
    + layer['attention'][name]['bias']
    for name in ('query', 'key')
  }
  logits = np.einsum('nqhc,nkhc->nhqk', project['query'], project['key'])
  expected = jax.nn.softmax(logits / np.sqrt(64), axis=-1)
  np.testing.assert_allclose(
    out['attention'][:, 1], expected, rtol=1e-3, atol=1e-5
  )


@pytest.mark.slow
def test_the_reference_is_the_same_function():
  """Without kernels and unrolling, logits are the same."""
  sizes = SIZES | dict(width=128, num_heads=2)
  model = Model(5, **sizes, attention='kernel', remat='dots', unroll=3)
  params, images = noise_params(model, (8, 8), 0.1), images_of(2, 8, 8)
  plain = model.reference
  assert (plain.attention, plain.remat, plain.unroll) == ('xla', 'none', 1)
  np.testing.assert_allclose(
    plain.apply({'params': params}, images),
    model.apply({'params': params}, images),
    rtol=1e-4,
    atol=1e-5,
  )
