"""Tests of the Vision Transformer; tests/weights compares it with timm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_vit import KEY, SIZES, abstract, images_of, noise_params

from tests.faults.counts import further
from vit_jax.arrays import tree
from vit_jax.models import swin
from vit_jax.models.vit import Model

HEADS = SIZES | dict(width=128)  # of 64 channels, for the kernels of TPUs
SWIN = dict(width=8, depths=(2, 2), num_heads=2, window_size=2, dtype='float32')


def predict(model, size=(8, 12), want=(), **inputs):
  """Returns parameters, images and the results of `predict`, compiled."""
  params, images = noise_params(model, size, 0.1), images_of(2, *size)

  @jax.jit
  def run(params, images):
    variables = {'params': params}
    return model.apply(variables, images, want=want, method='predict', **inputs)

  return params, images, run(params, images)


# Sizes


@pytest.mark.parametrize(
  'variant, classes, side, options, expected',
  [
    ('Ti/16', 0, 224, {}, 5_524_416),
    ('S/16', 0, 224, {}, 21_665_664),
    ('B/32', 0, 224, {}, 87_455_232),
    ('L/16', 0, 224, {}, 303_301_632),
    ('H/14', 21_843, 224, {}, 658_745_683),
    ('B/16', 21_843, 224, dict(pre_logits=True), 103_186_515),
    ('B/16', 1000, 384, {}, 86_859_496),
    *further(
      ['B/16', 0, 224, {}, 85_798_656],
      ['L/32', 0, 224, {}, 305_510_400],
      ['H/14', 0, 224, {}, 630_764_800],
      ['H/14', 1000, 224, {}, 632_045_800],
      ['H/14', 21_843, 224, dict(pre_logits=True), 660_385_363],
      ['L/16', 21_843, 224, {}, 325_690_707],
      ['B/16', 21_843, 224, {}, 102_595_923],
      ['L/16', 21_843, 224, dict(pre_logits=True), 326_740_307],
      ['L/16', 1000, 384, {}, 304_715_752],
    ),
    *(
      ('B/16', 1000, 224, options, expected)
      for options, expected in (
        (dict(registers=4, prefix_positions=False), 86_569_960),
        (dict(distilled=True), 87_338_192),  # DeiT-B distilled
        (dict(layer_scale=1e-4, prefix_positions=False), 86_585_320),
      )
    ),
    # DINOv2's largest, with a head of 1000 classes and without a mask token
    (
      'B/14',
      1000,
      518,
      dict(width=1536, depth=40, num_heads=24, mlp_dim=4096)
      | dict(gated=True, layer_scale=1e-5),
      1_136_480_768 - 1536 + 1537 * 1000,
    ),
  ],
)
def test_parameter_counts(variant, classes, side, options, expected):
  """Counts are those of the public models."""
  model = Model(classes, variant=variant, **options)
  assert tree.size(abstract(model, (side, side))) == expected


def test_the_architecture_builds_the_same_model():
  """`architecture` contains every option that fine-tuning reads."""
  options = dict(registers=2, layer_scale=0.1, qk_norm=True, norm_eps=1e-5)
  options |= dict(gated=True, distilled=True, gelu='exact')
  options |= dict(position='2d', position_at='layers')
  model = Model(5, **SIZES, **options)
  assert model.architecture.items() >= options.items()
  assert Model(5, **model.architecture, dtype='float32') == model


# Images and pooling


@pytest.mark.slow
@pytest.mark.parametrize('make, sizes', [(Model, SIZES), (swin.Model, SWIN)])
@pytest.mark.parametrize('channels', [5, *further(3)])
def test_pixels_are_normalized_by_mean_and_std(make, sizes, channels):
  """Equals a model without them whose input is normalized outside."""
  rng = np.random.default_rng(0)
  pixels = rng.uniform(0, 1, (2, 16, 16, channels))
  mean, std = rng.uniform(0.1, 0.5, (2, channels))
  keys = dict(mean=tuple(mean.tolist()), std=tuple(std.tolist()))
  if channels == 3:
    keys = dict(pixels='imagenet')
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
  plain = make(5, **sizes, channels=channels)
  scaled = make(5, **sizes, channels=channels, **keys)
  params = noise_params(plain, (16, 16))
  np.testing.assert_allclose(
    scaled.apply({'params': params}, np.float32(2 * pixels - 1)),
    plain.apply({'params': params}, np.float32((pixels - mean) / std)),
    rtol=1e-4,
    atol=1e-5,
  )


@pytest.mark.slow
def test_remainder_drop_ignores_the_last_pixels():
  """H/14 at 384 px has 27 x 27 patches; the last 6 pixels have no effect."""
  model = Model(0, variant='H/14', remainder='drop')
  assert model.grid((384, 384)) == (27, 27)
  positions = abstract(model, (384, 384))['position']
  assert positions['embedding'].shape == (1, 1 + 27 * 27, 1280)

  small = Model(0, **SIZES, remainder='drop')
  params, images = noise_params(small, (10, 9)), images_of(1, 10, 9)
  edge = images.at[:, 8:].set(0.5).at[:, :, 8:].set(0.5)
  inner = images.at[:, 7].set(0.5)
  before, same, other = (
    small.apply({'params': params}, x) for x in (images, edge, inner)
  )
  np.testing.assert_array_equal(before, same)
  assert np.abs(before - other).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize('pool', ['map', *further('token', 'gap')])
def test_parts_and_parameters_of_each_pooling(pool):
  """`embed`, `encode` and `readout` together compute what `predict` does."""
  model = Model(5, **SIZES, pool=pool, pre_logits=True, dropout=0.5)
  params, images, out = predict(model)
  flat = tree.flatten(params)
  assert ('cls' in flat) == (pool == 'token')
  assert any(path.startswith('map/') for path in flat) == (pool == 'map')
  assert flat['position/embedding'].shape == (1, 6 + (pool == 'token'), 16)
  assert np.abs(out['features']).max() <= 1  # tanh
  logits = out['features'] @ flat['head/kernel'] + flat['head/bias']
  np.testing.assert_allclose(out['logits'], logits, rtol=1e-4, atol=1e-5)

  def part(method, *inputs):
    return model.apply({'params': params}, *inputs, method=method)

  for key in (None, KEY):
    tokens = part('encode', part('embed', images), key)
    found, whole = part('readout', tokens), part('predict', images, key)
    for name in ('features', 'logits'):
      np.testing.assert_array_equal(found[name], whole[name])


def test_logits_of_a_distilled_model_are_the_mean_of_its_heads():
  *_, out = predict(Model(5, **SIZES, distilled=True), want=('heads',))
  assert out['heads'].shape == (2, 2, 5)
  np.testing.assert_allclose(
    out['logits'], out['heads'].mean(1), rtol=1e-5, atol=1e-6
  )
  assert np.abs(out['heads'][:, 0] - out['heads'][:, 1]).max() > 0.1


def test_registers_are_not_pooled():
  model = Model(0, **SIZES, pool='gap', registers=3)
  *_, out = predict(model, want=('tokens',))
  expected = out['tokens'][:, 3:].mean(1)
  np.testing.assert_allclose(out['features'], expected, rtol=1e-4, atol=1e-5)


# Programs


@pytest.fixture(scope='module')
def train():
  """Returns a function of options: loss and gradient of a training step."""
  params = noise_params(Model(5, **SIZES), (8, 8))
  images = images_of(4, 8, 8)

  def value_and_gradient(**options):
    model = Model(5, **SIZES, dropout=0.2, drop_path=0.3, **options)

    def loss(params):
      logits = model.apply({'params': params}, images, jax.random.key(7))
      return (logits * jnp.cos(jnp.arange(logits.size)).reshape(4, 5)).sum()

    return jax.jit(jax.value_and_grad(loss))(params)

  return value_and_gradient


@pytest.mark.slow
@pytest.mark.parametrize(
  'remat, unroll',
  # 2 does not divide the depth.
  [('full', 1), ('dots', 3), *further(['none', 2], ['full', 3])],
)
def test_remat_and_unrolling_give_the_same_gradients(remat, unroll, train):
  """Dropout masks are the same for each program.

  Another mask would change the loss by far more than rounding does.
  """
  jax.tree.map(
    # atol: sums over tokens in another order, of terms of order one
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
    train(remat=remat, unroll=unroll),
    train(),
  )


def test_the_reference_has_neither_kernels_nor_unrolled_layers():
  model = Model(5, **HEADS, attention='kernel', remat='dots', unroll=3)
  assert model.reference == Model(5, **HEADS, attention='xla')


@pytest.mark.slow
def test_dropout_masks_depend_on_the_key():
  """Without a key, nothing is dropped."""
  model, plain = (
    Model(5, **SIZES, dropout=0.2, drop_path=0.2),
    Model(5, **SIZES),
  )
  params, images = noise_params(model, (8, 8)), images_of(2, 8, 8)
  apply = jax.jit(lambda key: model.apply({'params': params}, images, key))
  first, again = apply(jax.random.key(1)), apply(jax.random.key(1))
  np.testing.assert_array_equal(first, again)
  assert np.abs(first - apply(jax.random.key(2))).max() > 1e-2
  assert np.abs(first - apply(None)).max() > 1e-2
  without, expected = (
    jax.jit(each.apply)({'params': params}, images) for each in (model, plain)
  )
  np.testing.assert_array_equal(without, expected)


@pytest.mark.slow
def test_dropout_follows_the_position_embedding():
  """Layers are zero, so that only the dropout of the embedding remains."""
  model = Model(5, **SIZES, dropout=0.5)
  params, images = noise_params(model, (8, 8)), images_of(2, 8, 8)
  layers = params['encoder']['layers']
  params['encoder']['layers'] = jax.tree.map(jnp.zeros_like, layers)
  quiet, noisy = (
    model.apply({'params': params}, images, key) for key in (None, KEY)
  )
  assert np.abs(noisy - quiet).max() > 0.1


SHARED = 'xla_tpu_enable_deduplicated_calls'
PART = 'xla_jf_crs_combiner_threshold_in_bytes'


def test_compiler_options_of_unrolled_layers(monkeypatch):
  """Other backends reject them, and a scan does not need them.

  The size of an exchange grows with the devices up to libtpu's default, and an
  option in LIBTPU_INIT_ARGS keeps its value.
  """

  def options_of(platform, unroll, num_devices):
    model = Model(0, variant='L/16', unroll=unroll)
    return model.compiler_options(platform, num_devices)

  assert options_of('cpu', 24, 32) == options_of('tpu', 1, 32) == {}
  assert options_of('tpu', 24, 32) == {SHARED: 'ENABLED', PART: 4 * 2**20}
  parts = [options_of('tpu', 2, n)[PART] for n in (8, 128, 2048)]
  assert parts == [2**20, 16 * 2**20, 120 * 2**20]
  monkeypatch.setenv('LIBTPU_INIT_ARGS', f'--{SHARED}=DISABLED --xla_other=1')
  assert list(options_of('tpu', 24, 32)) == [PART]
