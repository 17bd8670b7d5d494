"""Tests of options of the Vision Transformer; `weights` compares with timm."""

import jax
import numpy as np
from tiny_vit import images_of, noise_params

from vit_jax.models.vit import Model

SIZE = (12, 16)
SIZES = dict(
  patch_size=4, width=32, depth=2, mlp_dim=64, num_heads=2, dtype='float32'
)


def predict(model, *want):
  params, images = noise_params(model, SIZE), images_of(2, *SIZE)
  return jax.jit(
    lambda params: model.apply(
      {'params': params}, images, want=want, method='predict'
    )
  )(params)


def test_logits_of_a_distilled_model_are_the_mean_of_its_heads():
  out = predict(Model(5, **SIZES, distilled=True), 'heads')
  assert out['heads'].shape == (2, 2, 5)
  np.testing.assert_allclose(out['logits'], out['heads'].mean(1), rtol=1e-5)
  assert np.abs(out['heads'][:, 0] - out['heads'][:, 1]).max() > 0.1


def test_registers_are_not_pooled():
  out = predict(Model(0, **SIZES, pool='gap', registers=3), 'tokens')
  expected = out['tokens'][:, 3:].mean(1)
  np.testing.assert_allclose(out['features'], expected, rtol=1e-4, atol=1e-5)


def test_the_architecture_builds_the_same_model():
  """`architecture` contains every option that fine-tuning reads."""
  options = dict(registers=2, layer_scale=0.1, qk_norm=True, norm_eps=1e-5)
  options |= dict(gated=True, distilled=True, gelu='exact')
  options |= dict(position='2d', position_at='layers')
  model = Model(5, **SIZES, **options)
  assert model.architecture.items() >= options.items()
  again = Model(5, **model.architecture, dtype='float32')
  assert again == model


# Compiler options

SHARED = 'xla_tpu_enable_deduplicated_calls'
PART = 'xla_jf_crs_combiner_threshold_in_bytes'


def options_of(platform, unroll, num_devices):
  """Returns the options of a model with this number of unrolled layers."""
  model = Model(0, variant='L/16', unroll=unroll)
  return model.compiler_options(platform, num_devices)


def test_compiler_options_are_for_unrolled_layers_on_tpus():
  """Other backends reject them, and a scan does not need them."""
  assert options_of('cpu', 24, 32) == {}
  assert options_of('tpu', 1, 32) == {}
  options = options_of('tpu', 24, 32)
  assert options == {SHARED: 'ENABLED', PART: 4 * 2**20}


def test_exchange_size_grows_with_the_slice():
  """It grows with the devices up to libtpu's default."""
  parts = [options_of('tpu', 2, n)[PART] for n in (8, 128, 2048)]
  assert parts == [2**20, 16 * 2**20, 120 * 2**20]


def test_options_of_the_user_are_not_overridden(monkeypatch):
  """An option in LIBTPU_INIT_ARGS keeps its value."""
  monkeypatch.setenv('LIBTPU_INIT_ARGS', f'--{SHARED}=DISABLED --xla_other=1')
  assert list(options_of('tpu', 24, 32)) == [PART]
