"""Tests of the TPU's attention kernels, interpreted, against the formula."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import cli
from tests.faults.counts import count, further, slow
from tests.models import compile_kernels
from tests.plan.test_plan import needs_libtpu
from vit_jax.arrays import sharding
from vit_jax.errors import UserError
from vit_jax.models.attention import tpu
from vit_jax.models.attention.attention import Attention, dot_product_attention
from vit_jax.models.layers import LayerNorm, RmsNorm
from vit_jax.models.positions import Position

SHAPES = [  # n, tokens, heads, channels of a head
  (2, 7, 2, 64),  # one register of rows, partly filled
  (1, 197, 4, 64),  # two groups of heads
  (2, 9, 3, 64),  # a block with one head of zeros; Ti/16
]
SLOW = [
  (2, 37, 8, 80),  # H/14: heads begin within a register
  (1, 700, 2, 64),  # two tiles of queries
  (2, 250, 10, 80),  # operands are loaded by columns, and six heads are zeros
]
SHAPES += further(
  *SLOW,
  (4, 50, 2, 64),  # several examples at once; MAE's visible patches
  (2, 37, 2, 64),  # DINO's local crops
  (1, 24, 8, 32),  # four heads per group, full rows
  (2, 9, 1, 128),
  (1, 17, 16, 88),  # g/14
  (1, 600, 4, 32),  # three tiles of queries, the last partly filled
  (1, 1025, 1, 128),
  (1, 750, 2, 64),  # too many tokens for two heads together
)
EPSILON = 1e-6
NAMES = (
  'y',
  'd_query',
  'd_key',
  'd_value',
  'd_query_bias',
  'd_key_bias',
  'd_value_bias',
)


def inputs(shape, dtype='float32', size=1.0):
  """Returns (projections, biases) and a gradient of the output."""
  n, tokens, heads, channels = shape
  rng = np.random.default_rng(0)

  def draw(*dims):
    return jnp.asarray(size * rng.normal(size=dims), dtype)

  width = heads * channels
  arrays = tuple(draw(n, tokens, width) for _ in range(4))
  return (arrays[:3], tuple(draw(width) for _ in range(3))), arrays[3]


def formula(projections, biases, heads):
  """Computes attention as in the paper."""
  x = [p + b for p, b in zip(projections, biases, strict=True)]
  q, k, v = (z.reshape(*z.shape[:2], heads, -1) for z in x)
  logits = jnp.einsum('nqhc,nkhc->nhqk', q, k) / q.shape[-1] ** 0.5
  weights = jax.nn.softmax(logits, axis=-1)
  return jnp.einsum('nhqk,nkhc->nqhc', weights, v).reshape(x[0].shape)


def through_xla(projections, biases, heads):
  """Computes attention by the package's implementation for XLA."""
  x = [p + b for p, b in zip(projections, biases, strict=True)]
  y = dot_product_attention(*[z.reshape(*z.shape[:2], heads, -1) for z in x])
  return y.reshape(x[0].shape)


def with_gradients(function, arrays, dy, heads):
  """Returns output and gradients in the order of `NAMES`, float64."""
  y, pull = jax.vjp(lambda p, b: function(p, b, heads), *arrays)
  leaves = jax.tree.leaves((y, pull(dy.astype(y.dtype))))
  return dict(
    zip(NAMES, [np.asarray(x, np.float64) for x in leaves], strict=True)
  )


def exactly(arrays, dy, heads):
  """Returns output and gradients of the formula, float64."""
  with jax.enable_x64(True):
    wide = jax.tree.map(lambda x: x.astype('float64'), (arrays, dy))
    return with_gradients(formula, *wide, heads)


def error(ours, exact, name):
  """Returns relative errors of norms; the key bias has a gradient of zero."""
  scale = exact['d_query_bias' if name == 'd_key_bias' else name]
  return np.linalg.norm(ours[name] - exact[name]) / np.linalg.norm(scale)


@pytest.mark.slow
@pytest.mark.parametrize('shape', SHAPES)
def test_float32_kernels_equal_the_formula(shape):
  """Values and all gradients agree."""
  arrays, dy = inputs(shape, size=2.0)
  exact = exactly(arrays, dy, shape[2])
  ours = with_gradients(tpu.attend, arrays, dy, shape[2])
  for name in NAMES:
    assert error(ours, exact, name) < 5e-6, name


@pytest.mark.slow
@pytest.mark.parametrize(
  'shape',
  [
    SHAPES[1],
    # The first: one head at a time, in tiles of 128 queries
    *further((1, 500, 8, 80), (4, 50, 2, 64), *SLOW[:2], (1, 17, 16, 88)),
    *further((1, 1500, 2, 64)),
  ],
)
@pytest.mark.parametrize('size', [0.3, *further(1.0)])
def test_bfloat16_kernels_are_as_exact_as_xla(shape, size):
  arrays, dy = inputs(shape, 'bfloat16', size)
  exact = exactly(arrays, dy, shape[2])
  ours = with_gradients(tpu.attend, arrays, dy, shape[2])
  xla = with_gradients(through_xla, arrays, dy, shape[2])
  for name in NAMES:
    assert error(ours, exact, name) < 2**-6, name
    assert error(ours, exact, name) < 1.1 * error(xla, exact, name), name


@pytest.mark.slow
@pytest.mark.parametrize(
  'shape',
  [
    (2, 4, 49, 4, 32),  # four windows of an image in a block
    # First stage of Swin-T: one head of four is zeros
    *further((2, 4, 9, 3, 32), (3, 4, 9, 8, 32)),
    *further((2, 3, 49, 3, 128), (1, 1, 144, 8, 80)),
  ],
)
@pytest.mark.parametrize('masked', [True, *further(False)])
def test_offsets_equal_the_formula(shape, masked):
  """Offsets of heads, with gradients, and masks of windows (Swin)."""
  n, windows, tokens, heads, channels = shape
  rng = np.random.default_rng(1)

  def draw(*dims):
    return rng.normal(size=dims)

  arrays = [draw(n, windows, tokens, heads * channels) for _ in range(4)]
  biases = [draw(heads * channels) for _ in range(3)]
  relative = draw(heads, tokens, tokens)
  mask = np.where(draw(windows, tokens, tokens) > 0.5, -100.0, 0.0)
  mask = mask if masked else None

  def exact(projections, biases, relative):
    x = [p + b for p, b in zip(projections, biases, strict=True)]
    q, k, v = (z.reshape(*z.shape[:3], heads, -1) for z in x)
    logits = jnp.einsum('nwqhc,nwkhc->nwhqk', q, k) / channels**0.5 + relative
    if masked:
      logits += mask[None, :, None]
    weights = jax.nn.softmax(logits, axis=-1)
    return jnp.einsum('nwhqk,nwkhc->nwqhc', weights, v).reshape(x[0].shape)

  def ours(projections, biases, relative):
    return tpu.attend(projections, biases, heads, relative, mask)

  def all_of(function, dtype):
    given = (tuple(arrays[:3]), tuple(biases), relative)
    given = jax.tree.map(lambda x: jnp.asarray(x, dtype), given)
    y, pull = jax.vjp(function, *given)
    leaves = jax.tree.leaves((y, pull(jnp.asarray(arrays[3], dtype))))
    names = (*NAMES, 'd_relative')
    return dict(
      zip(names, [np.asarray(x, np.float64) for x in leaves], strict=True)
    )

  with jax.enable_x64(True):
    theirs = all_of(exact, 'float64')
  found = all_of(ours, 'float32')
  for name in theirs:
    assert error(found, theirs, name) < 5e-6, name


def turned(x, angles):
  """Rotates `[n, t, h, c]` by angles `[…, t, h or 1, c/2]`."""
  first, second = jnp.split(x, 2, axis=-1)
  sines, cosines = jnp.sin(angles), jnp.cos(angles)
  return jnp.concatenate(
    [first * cosines - second * sines, second * cosines + first * sines], -1
  )


def normalized(x, scale, bias=None):
  """Computes an RMSNorm, or a LayerNorm if there is a bias."""
  if bias is not None:
    x -= x.mean(-1, keepdims=True)
  y = x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + EPSILON) * scale
  return y if bias is None else y + bias


# Shape, vectors of the norms (2 for LayerNorms), and axes of the angles
PREPARED = [
  [(2, 9, 3, 64), 1, 't1'],  # as ViT-5; the last block has a head of zeros
  *slow([(3, 50, 2, 64), 0, 'nh']),
  *further(
    [(2, 37, 8, 80), 1, 'n1'],  # heads of H/14
    [(1, 384, 2, 64), 2, 'th'],
    [(2, 9, 4, 32), 2, 'th'],
    [(2, 37, 2, 64), 1, 't1'],
    [(1, 197, 2, 64), 2, ''],
    [(1, 201, 6, 64), 1, 't1'],  # ViT-5 S
    [(1, 1029, 2, 64), 1, 't1'],  # two tiles
    [(1, 201, 12, 64), 1, 't1'],  # ViT-5 B
    [(1, 261, 12, 64), 0, 't1'],  # B/16, 256 px, four registers
    [(1, 261, 16, 64), 0, 't1'],  # the same for L/16
    [(1, 1029, 2, 128), 2, 'nh'],
  ),
]
# Errors relative to the norm. In bfloat16, a gradient depends on five operands
# of products, each rounded once, by at most 2^-9 of a number, and is itself
# rounded.
PREPARED_LIMITS = {'float32': 5e-6, 'bfloat16': 6 * 2**-9}


@pytest.mark.parametrize('dtype', ['float32', *slow('bfloat16')])
@pytest.mark.parametrize('shape, vectors, axes', PREPARED)
def test_norms_and_rotations_equal_the_formula(
  shape, vectors, axes, dtype, monkeypatch
):
  """Values and all gradients agree, also those of learned angles."""
  # When they are interpreted, kernels do not have to fit into a core.
  monkeypatch.setattr(tpu, '_TRANSFORMED', 2.0)
  n, tokens, heads, channels = shape
  arrays, dy = inputs(shape, dtype, size=1.5)
  rng = np.random.default_rng(1)
  sizes = (n if 'n' in axes else 1, tokens, heads if 'h' in axes else 1)
  angles = rng.normal(size=(*sizes, channels // 2)) if axes else None
  norms = [list(rng.normal(1, 0.5, (vectors, channels))) for _ in range(2)]
  norms = norms if vectors else []

  def exact(arrays, norms, angles):
    *x, value = (
      (p + b).reshape(n, tokens, heads, channels)
      for p, b in zip(*arrays, strict=True)
    )
    if vectors:
      x = [normalized(z, *norm) for z, norm in zip(x, norms, strict=True)]
    if axes:
      x = [turned(z, angles) for z in x]
    logits = jnp.einsum('nqhc,nkhc->nhqk', *x) / channels**0.5
    weights = jax.nn.softmax(logits, axis=-1)
    return jnp.einsum('nhqk,nkhc->nqhc', weights, value).reshape(dy.shape)

  def ours(arrays, norms, angles):
    rotation = None
    if axes:
      both = jnp.concatenate([angles, angles], -1)
      both = both if 'h' in axes else both[:, :, 0]
      rotation = jnp.sin(both), jnp.cos(both)
    return tpu.attend(
      *arrays, heads, rotation=rotation, norms=norms, epsilon=EPSILON
    )

  def all_of(function, arrays, dy, dtype):
    others = jax.tree.map(lambda x: jnp.asarray(x, dtype), (norms, angles))
    y, pull = jax.vjp(function, arrays, *others)
    leaves = jax.tree.leaves((y, pull(dy)))
    return [np.asarray(x, np.float64) for x in leaves]

  with jax.enable_x64(True):
    wide = jax.tree.map(lambda x: x.astype('float64'), (arrays, dy))
    theirs = all_of(exact, *wide, 'float64')
  size = np.linalg.norm(theirs[4])  # of a bias: that of keys may be zero
  found = all_of(ours, arrays, dy, 'float32')
  for x, y in zip(found, theirs, strict=True):
    limit = PREPARED_LIMITS[dtype] * max(np.linalg.norm(y), size)
    assert np.linalg.norm(x - y) < limit


def test_long_sequences_with_norms_or_rotations():
  """They do not fit into the memory of a core, so `auto` uses XLA."""
  for tokens, dtype, fit in (
    (261, 'float32', True),
    (577, 'bfloat16', True),
    (1029, 'bfloat16', False),
  ):
    assert tpu.fits(tokens, 64, jnp.dtype(dtype), transformed=True) == fit
    assert tpu.fits(tokens, 64, jnp.dtype('bfloat16'))


@pytest.mark.parametrize('norm', [RmsNorm, *further(LayerNorm)])
def test_module_with_norms_and_rotations(norm):
  """Both implementations have the same parameters and the same output."""
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(2, 9, 128)), 'float32')
  angles = jnp.asarray(rng.normal(size=(1, 9, 32)), 'float32')
  angles = jnp.concatenate([angles, angles], -1)
  position = Position(rotation=(jnp.sin(angles), jnp.cos(angles)))
  results = []
  for by in ('kernel', 'xla'):
    new_norm = functools.partial(norm, jnp.dtype('float32'))
    attention = Attention(2, jnp.dtype('float32'), by, qk_norm=new_norm)
    params = attention.init(jax.random.key(0), x, position=position)
    params = jax.tree.map(lambda leaf: leaf + leaf.mean() + 0.1, params)
    results.append(attention.apply(params, x, position=position)[0])
  np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-5)


def test_gradients_of_constant_angles_are_not_computed():
  """Most angles are constants, whose gradients would take memory and time."""
  x, angles = jnp.ones((1, 9, 128)), jnp.ones((1, 9, 64))

  def attend(x, angles):
    biases = (jnp.zeros(128),) * 3
    return tpu.attend((x,) * 3, biases, 2, rotation=(angles, angles)).sum()

  counts = []
  for argument in (0, 1):
    gradient = jax.grad(attend, argument)
    program = jax.make_jaxpr(gradient)(x, angles)
    [*_, kernel] = [
      e for e in program.eqns if e.primitive.name == 'pallas_call'
    ]
    counts.append(len(kernel.outvars))
  assert counts == [4, 6]  # projections, vectors; and sines and cosines


def test_huge_logits_do_not_overflow():
  """Logits of thousands do not overflow, and nothing is NaN."""
  arrays, dy = inputs((1, 21, 2, 64), size=60.0)
  for name, x in with_gradients(tpu.attend, arrays, dy, 2).items():
    assert np.isfinite(x).all(), name


@pytest.mark.slow
def test_kernels_on_a_mesh_give_the_same():
  """Devices share examples and heads."""
  arrays, dy = inputs((8, 9, 4, 64))
  alone = with_gradients(tpu.attend, arrays, dy, 4)
  mesh = sharding.make_mesh(jax.devices(), data=2, fsdp=2, model=2)
  with jax.set_mesh(mesh):
    function = jax.jit(
      lambda p, b, d: jax.vjp(lambda p, b: tpu.attend(p, b, 4), p, b)[1](d)
    )
    split = jax.device_put((*arrays[0], dy), sharding.batch_sharding(mesh))
    text = function.lower(split[:3], arrays[1], split[3]).as_text()
    gradients = jax.tree.leaves(function(split[:3], arrays[1], split[3]))
  assert text.count('manual_computation') or text.count('shard_map')
  for name, x in zip(NAMES[1:], gradients, strict=True):
    np.testing.assert_allclose(x, alone[name], atol=2e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
  'tokens, width, heads',
  [
    (703, 640, 8),  # many tokens
    *further(
      [9, 180, 3], [1201, 128, 2], [1201, 128, 4], [9, 128, 8], [9, 272, 2]
    ),
  ],
)
def test_unsupported_sizes(tokens, width, heads):
  """They raise an error with 'kernel' and use XLA with 'auto'."""
  x = jnp.zeros((1, tokens, width))
  with pytest.raises(
    UserError, match=f'attention=.*{tokens} tokens, width {width}'
  ):
    Attention(heads, jnp.dtype('float32'), 'kernel').init(jax.random.key(0), x)
  Attention(heads, jnp.dtype('float32'), 'auto').init(jax.random.key(0), x)


@needs_libtpu
@pytest.mark.long
def test_kernels_compile_for_every_tpu_version():
  """The largest sequences only for v3; with --all, also for v2 and v6e."""
  largest_on = ('v3', 'v2', 'v6e')[: count(1, 3)]
  done = subprocess.run(
    [sys.executable, compile_kernels.__file__, *largest_on],
    env=cli.environment(level=3) | {'PYTHONPATH': str(cli.ROOT)},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  lines = [line.split() for line in done.stdout.splitlines()]
  versions, large = compile_kernels.TOPOLOGIES, compile_kernels.LARGEST
  number = len(compile_kernels.SHAPES) + len(compile_kernels.WINDOWS)
  number = len(versions) * number + len(largest_on) * len(large)
  assert len(lines) == number
  assert {line[0] for line in lines} == set(versions)
  assert all(line[-1] == '2' for line in lines)
