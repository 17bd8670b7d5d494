"""Tests of attention by cuDNN: its arguments, its padding, when it is used."""

import functools
import inspect

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
from vit_jax.models.attention import cudnn
from vit_jax.models.attention.attention import relative_attention
from vit_jax.models.vit import Model

# The arguments


@pytest.fixture
def calls(monkeypatch):
  """Replaces the library by the formula, as if on a GPU.

  Returns:
    The arguments of each call.
  """
  made = []
  signature = inspect.signature(jax.nn.dot_product_attention)

  def library(*arrays, **options):
    given = signature.bind(*arrays, **options).arguments
    made.append(given)
    return formula(*arrays, *(given.get(f'{x}_seq_lengths') for x in SIDES))

  monkeypatch.setattr(sharding, 'on_gpu', lambda: True)
  monkeypatch.setattr(jax.nn, 'dot_product_attention', library)
  return made


SIDES = ('query', 'key_value')


def formula(query, key, value, queries=None, keys=None):
  """Computes attention example by example, in NumPy and float64.

  Of each example, `queries` and `keys` are the numbers of those that are not
  padding. Outputs of padding are zero.
  """
  query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
  y = np.zeros((*query.shape[:3], value.shape[-1]))
  for n, heads in np.ndindex(query.shape[0], query.shape[2]):
    rows = query.shape[1] if queries is None else int(queries[n])
    columns = key.shape[1] if keys is None else int(keys[n])
    q, k, v = query[n, :rows, heads], key[n, :columns, heads], value[n]
    weights = np.exp(q @ k.T / np.sqrt(q.shape[-1]))
    weights /= weights.sum(-1, keepdims=True)
    y[n, :rows, heads] = weights @ v[:columns, heads]
  return jnp.asarray(y, jnp.float32)


def inputs(queries, keys):
  rng = np.random.default_rng(0)
  shapes = [(2, length, 3, 8) for length in (queries, keys, keys)]
  return [jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes]


@pytest.mark.parametrize('queries, keys', [(7, 7), (8, 8), (1, 6), (4, 5)])
def test_an_odd_number_of_tokens_is_padded_and_masked(calls, queries, keys):
  """Values agree with the formula; the lengths are those without padding."""
  arrays = inputs(queries, keys)
  actual = cudnn.attend(*arrays)
  np.testing.assert_allclose(actual, formula(*arrays), atol=1e-5)
  (given,) = calls
  assert given['implementation'] == 'cudnn'
  assert given['query'].shape[1] == queries + queries % 2
  assert given['key'].shape == given['value'].shape
  assert given['key'].shape[1] == keys + keys % 2
  for side, length in zip(SIDES, (queries, keys), strict=True):
    lengths = given.get(f'{side}_seq_lengths')
    if queries % 2 or keys % 2:
      assert lengths.dtype == jnp.int32 and lengths.tolist() == [length] * 2
    else:  # the kernel without a mask is faster
      assert lengths is None


@pytest.mark.parametrize('tokens', [5, 7])
def test_padding_of_the_caller_is_masked(calls, tokens):
  """The content of the padding has no effect, and its outputs are zero."""
  padded = [x.at[:, tokens:].set(9.0) for x in inputs(8, 8)]
  actual = cudnn.attend(*padded, tokens=tokens)
  assert actual.shape == padded[0].shape
  expected = formula(*[x[:, :tokens] for x in padded])
  np.testing.assert_allclose(actual[:, :tokens], expected, atol=1e-5)
  assert not actual[:, tokens:].any()
  for side in SIDES:
    assert calls[0][f'{side}_seq_lengths'].tolist() == [tokens] * 2


@pytest.mark.parametrize(
  'tokens, shared, by_caller',
  [(9, False, False), (9, False, True), *further([16, True, False])],
)
def test_windows_with_a_bias(tokens, shared, by_caller):
  """Outputs and gradients agree with XLA's, also the gradient of the bias.

  An odd number of tokens is padded, here or by the caller. Windows may share a
  bias.
  """
  windows, heads = 4, 3
  rng = np.random.default_rng(0)
  sizes = 2, tokens, windows, heads, 8
  shapes = [(1 if shared else windows, heads, tokens, tokens), *[sizes] * 4]
  draws = [jnp.asarray(rng.normal(size=x), jnp.float32) for x in shapes]

  def ours(bias, *arrays):
    if by_caller:
      arrays = [cudnn.even(x) for x in arrays]
    return cudnn.attend(*arrays, bias=bias)[:, :tokens]

  def theirs(bias, *arrays):
    arrays = (x.swapaxes(1, 2) for x in arrays)
    return relative_attention(*arrays, None, bias).swapaxes(1, 2)

  def with_gradients(function, *arrays, dy):
    y, pull = jax.vjp(function, *arrays)
    return y, *pull(dy)

  compute = jax.jit(with_gradients, static_argnums=0)
  results = [compute(f, *draws[:4], dy=draws[4]) for f in (ours, theirs)]
  for actual, expected in zip(*results, strict=True):
    np.testing.assert_allclose(actual, expected, atol=1e-5)


# Models

SIZES = dict(patch_size=4, width=32, depth=3, mlp_dim=48, num_heads=4)
# Windows of nine tokens, and a second stage whose map is one window
SWIN = dict(width=32, depths=(2, 2), num_heads=4, window_size=3)


@pytest.mark.slow
@pytest.mark.parametrize(
  'model',
  [
    Model(5, **SIZES, layer_scale=0.1, distilled=True, unroll=3),
    *further(
      swin.Model(5, **SWIN),
      Model(5, **SIZES, pool='gap'),  # an even number of tokens
      Model(5, **SIZES, qk_norm=True, position='rope2d', gelu='quick'),
      Model(5, **SIZES, remat='dots', gelu='exact'),
    ),
  ],
)
def test_a_model_computes_the_same_on_a_gpu(gpu, monkeypatch, model):
  """Logits and gradients agree with the CPU's to bfloat16's rounding."""
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
  return jax.eval_shape(init, jax.random.key(0), images_of(2, size, size))


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
    ({'width': 1088}, False),  # heads of 272 channels
    ({'attention': 'xla'}, False),
    ({'attention': 'xla', 'pool': 'map'}, False),
  ],
)
def test_when_cudnn_is_used(gpu, options, used):
  """XLA computes what cuDNN does not support, unless kernels are required."""
  model = Model(5, **(SIZES | options))
  assert (model.kernels is not None) == used
  assert ('cuDNN' in model.computed_by((16, 16))) == used
  trace(model)
  assert bool(gpu) == used
  if not used and options.get('attention') != 'xla':
    with pytest.raises(UserError, match=r"attention='kernel'"):
      trace(Model(5, **(SIZES | options), attention='kernel'))


def test_windows_are_heads_of_cudnn(gpu):
  """Windows with a bias, of an even size; XLA computes them in float32."""
  model = swin.Model(5, **SWIN)
  assert model.computed_by((24, 24)) == 'attention by cuDNN'
  trace(model, size=24)
  # [n, tokens, windows, heads, channels] of both stages
  assert set(gpu) == {(2, 10, 4, 4, 8), (2, 10, 1, 8, 8)}
  model = swin.Model(5, **SWIN, dtype='float32')
  assert model.kernels is None
