"""Tests of the compiler options of a model."""

from vit_jax.models.vit import Model

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
