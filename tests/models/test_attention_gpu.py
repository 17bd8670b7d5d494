"""Tests of attention by cuDNN: when it is used, and its padding on a CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_vit import images_of, noise_params

from tests.faults.counts import further
from tests.traced_for_gpu import gpu as gpu
from vit_jax.arrays import sharding
from vit_jax.errors import UserError
from vit_jax.models import swin
from vit_jax.models.vit import Model

SIZES = dict(patch_size=4, width=32, depth=3, mlp_dim=48, num_heads=4)
# Windows of nine tokens, and a second stage whose map is one window
SWIN = dict(width=32, depths=(2, 2), num_heads=4, window_size=3)


@pytest.mark.slow
@pytest.mark.parametrize(
  'options',
  [
    {'layer_scale': 0.1, 'distilled': True, 'unroll': 3},
    *further(
      SWIN,
      {},
      {'pool': 'gap'},  # an even number of tokens
      {'qk_norm': True, 'gelu': 'exact'},
      {'position': 'rope2d', 'gelu': 'quick'},
      {'remat': 'dots'},
    ),
  ],
)
def test_a_model_computes_the_same_on_a_gpu(gpu, monkeypatch, options):
  """Logits and gradients agree with the CPU's to bfloat16's rounding."""
  is_swin = options is SWIN
  model = swin.Model(5, **SWIN) if is_swin else Model(5, **SIZES, **options)
  images = images_of(2, 16, 16)
  params = noise_params(model, (16, 16), 0.1)

  def computed():
    def loss(params):
      logits = model.apply({'params': params}, images)
      return jnp.square(logits).sum(), logits

    (_, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return logits, grads

  gpu.clear()
  ours, our_gradients = computed()
  assert gpu and 'cuDNN' in model.computed_by((16, 16))
  monkeypatch.setattr(sharding, 'on_gpu', lambda: False)
  plain, gradients = computed()
  np.testing.assert_allclose(ours, plain, atol=0.03 * abs(plain).max())
  for a, b in zip(
    jax.tree.leaves(our_gradients), jax.tree.leaves(gradients), strict=True
  ):
    scale = max(np.linalg.norm(b), 0.05 * np.sqrt(b.size))
    assert np.linalg.norm(a - b) / scale < 0.1


def trace(model, size=16, **options):
  """Traces a model without compiling or computing anything."""
  init = functools.partial(model.init, **options)
  images = jnp.zeros((2, size, size, 3))
  return jax.eval_shape(init, jax.random.key(0), images)


def test_tokens_are_padded_once_for_all_layers(gpu):
  """Seventeen tokens are padded once; each layer gets eighteen."""
  model = Model(5, **SIZES, unroll=3)
  trace(model)
  assert {shape[1] for shape in gpu} == {18}
  gpu.clear()
  trace(model, want=('layers',), method='predict')
  assert {shape[1] for shape in gpu} == {17}


@pytest.mark.parametrize(
  'options, used',
  [
    ({}, True),
    ({'qk_norm': True}, True),
    ({'position': 'rope2d'}, True),
    ({'position': 'relative'}, False),
    ({'dtype': 'float32'}, False),
    ({'num_heads': 8}, False),  # four channels
    ({'attention': 'xla'}, False),
    ({'attention': 'xla', 'pool': 'map'}, False),
  ],
)
def test_when_cudnn_is_used(gpu, options, used):
  """XLA computes what cuDNN does not support, and the log says so."""
  model = Model(5, **(SIZES | options))
  assert (model.kernels is not None) == used
  assert ('cuDNN' in model.computed_by((16, 16))) == used
  trace(model)
  assert bool(gpu) == used


def test_windows_are_heads_of_cudnn(gpu):
  """Windows with a bias, of an even size; XLA computes them in float32."""
  model = swin.Model(5, **SWIN)
  assert model.computed_by((24, 24)) == 'attention by cuDNN'
  trace(model, size=24)
  # [n, tokens, windows, heads, channels] of both stages
  assert set(gpu) == {(2, 10, 4, 4, 8), (2, 10, 1, 8, 8)}
  model = swin.Model(5, **SWIN, dtype='float32')
  assert model.kernels is None


def test_kernels_that_do_not_apply_are_refused(gpu):
  """The message names the key, the heads and the dtype."""
  model = Model(5, **SIZES, attention='kernel', dtype='float32')
  with pytest.raises(UserError, match=r"attention='kernel'.*8 .*float32"):
    trace(model)
