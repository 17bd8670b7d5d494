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
from vit_jax.arrays import sharding, tree
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
  (1, 24, 8, 32),  # four heads per group, full rows
  (1, 17, 16, 88),  # g/14
  (1, 600, 4, 32),  # three tiles of queries, the last partly filled
  (1, 1025, 1, 128),
  (1, 750, 2, 64),  # too many tokens for two heads together
)
EPSILON = 1e-6


INPUTS = ('projections', 'biases')


def inputs(shape, size=1.0, dtype='float32'):
  """Returns random projections and biases, and a gradient of the output.

  Their values are rounded to `dtype`.
  """
  *axes, heads, channels = shape
  rng = np.random.default_rng(0)
  x = size * rng.normal(size=(4, *axes, heads * channels))
  biases = size * rng.normal(size=(3, heads * channels))
  x, biases = (np.float64(jnp.asarray(z, dtype)) for z in (x, biases))
  return dict(projections=tuple(x[:3]), biases=tuple(biases)), x[3]


def formula(heads, mask, arrays):
  """Computes attention as in the paper, with all options of the kernels."""
  q, k, v = (
    (x + bias).reshape(*x.shape[:-1], heads, -1)
    for x, bias in zip(arrays['projections'], arrays['biases'], strict=True)
  )
  if 'norms' in arrays:
    q, k = (
      normalized(x, *norm)
      for x, norm in zip((q, k), arrays['norms'], strict=True)
    )
  if 'angles' in arrays:
    q, k = (turned(x, arrays['angles']) for x in (q, k))
  logits = jnp.einsum('...qhc,...khc->...hqk', q, k) / q.shape[-1] ** 0.5
  logits += arrays.get('relative', 0)
  logits += 0 if mask is None else mask[:, None]
  weights = jax.nn.softmax(logits, axis=-1)
  y = jnp.einsum('...hqk,...khc->...qhc', weights, v)
  return y.reshape(arrays['projections'][0].shape)


def normalized(x, scale, bias=None):
  """Computes an RMSNorm, or a LayerNorm if there is a bias."""
  if bias is not None:
    x -= x.mean(-1, keepdims=True)
  y = x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + EPSILON) * scale
  return y if bias is None else y + bias


def turned(x, angles):
  """Rotates `[n, t, h, c]` by angles `[…, t, h or 1, c/2]`."""
  first, second = jnp.split(x, 2, axis=-1)
  sines, cosines = jnp.sin(angles), jnp.cos(angles)
  return jnp.concatenate(
    [first * cosines - second * sines, second * cosines + first * sines], -1
  )


def by_kernels(heads, mask, arrays):
  """Computes the same by the kernels."""
  rotation = None
  if 'angles' in arrays:
    angles = jnp.concatenate([arrays['angles']] * 2, -1)
    angles = angles if angles.shape[2] > 1 else angles[:, :, 0]
    rotation = jnp.sin(angles), jnp.cos(angles)
  return tpu.attend(
    arrays['projections'],
    arrays['biases'],
    heads,
    arrays.get('relative'),
    mask,
    rotation=rotation,
    norms=arrays.get('norms', ()),
    epsilon=EPSILON,
  )


def by_xla(heads, mask, arrays):
  """Computes attention without options by the implementation for XLA."""
  pairs = zip(arrays['projections'], arrays['biases'], strict=True)
  x = [p + b for p, b in pairs]
  y = dot_product_attention(*[z.reshape(*z.shape[:2], heads, -1) for z in x])
  return y.reshape(x[0].shape)


def with_gradients(function, arrays, dy, heads, dtype='float32', mask=None):
  """Returns the output and all gradients, float64, by path.

  Args:
    function: one of the three functions above.
    arrays: arguments of the function.
    dy: gradient of the output.
    heads: number of heads.
    dtype: dtype of projections, biases and `dy`; the others are at least
      float32.
    mask: mask of windows.
  """
  wide = 'float64' if dtype == 'float64' else 'float32'
  with jax.enable_x64(dtype == 'float64'):
    arrays = {
      name: jax.tree.map(
        lambda x, own=dtype if name in INPUTS else wide: jnp.asarray(x, own), x
      )
      for name, x in arrays.items()
    }
    y, pull = jax.vjp(functools.partial(function, heads, mask), arrays)
    gradients = pull(jnp.asarray(dy, y.dtype))[0]
    results = tree.flatten({'y': y, 'd': gradients})
  return {path: np.asarray(x, np.float64) for path, x in results.items()}


def errors(found, exact):
  """Returns the relative error of each norm, by path."""
  # The gradient of the key bias is zero without norms.
  smallest = np.linalg.norm(exact['d/biases/0'])
  return {
    path: np.linalg.norm(found[path] - x) / max(np.linalg.norm(x), smallest)
    for path, x in exact.items()
  }


def check(*inputs, dtype='float32', mask=None, limit=5e-6):
  """Compares values and all gradients with the formula in float64."""
  exact = with_gradients(formula, *inputs, 'float64', mask)
  found = with_gradients(by_kernels, *inputs, dtype, mask)
  for path, error in errors(found, exact).items():
    assert error < limit, path


@pytest.mark.slow
@pytest.mark.parametrize('shape', SHAPES)
def test_float32_kernels_equal_the_formula(shape):
  check(*inputs(shape, size=2.0), shape[2])


@pytest.mark.slow
@pytest.mark.parametrize(
  'shape',
  # The second: one head at a time, in tiles of 128 queries
  [SHAPES[1], *further((1, 500, 8, 80), *SLOW[:2], (1, 1500, 2, 64))],
)
@pytest.mark.parametrize('size', [0.3, *further(1.0)])
def test_bfloat16_kernels_are_as_exact_as_xla(shape, size):
  given = *inputs(shape, size, 'bfloat16'), shape[2]
  exact = with_gradients(formula, *given, 'float64')
  ours, xla = (
    errors(with_gradients(function, *given, 'bfloat16'), exact)
    for function in (by_kernels, by_xla)
  )
  for path, error in ours.items():
    assert error < 2**-6 and error < 1.1 * xla[path], path


@pytest.mark.slow
@pytest.mark.parametrize(
  'shape',
  [
    (2, 4, 49, 4, 32),  # four windows of an image in a block
    # First stage of Swin-T: one head of four is zeros
    *further((2, 4, 9, 3, 32), (3, 4, 9, 8, 32), (1, 1, 144, 8, 80)),
    *further((2, 3, 49, 3, 128)),  # three blocks of windows
  ],
)
@pytest.mark.parametrize('masked', [True, *further(False)])
def test_offsets_equal_the_formula(shape, masked):
  """Offsets of heads, with gradients, and masks of windows (Swin)."""
  _, windows, tokens, heads, _ = shape
  arrays, dy = inputs(shape)
  rng = np.random.default_rng(1)
  arrays['relative'] = rng.normal(size=(heads, tokens, tokens))
  hidden = rng.normal(size=(windows, tokens, tokens)) > 0.5
  mask = np.where(hidden, -100.0, 0.0) if masked else None
  check(arrays, dy, heads, mask=mask)


# Shape, vectors of the norms (2 for LayerNorms), and axes of the angles
PREPARED = [
  [(2, 9, 3, 64), 1, 't1'],  # as ViT-5; the last block has a head of zeros
  *slow([(3, 50, 2, 64), 0, 'nh']),
  *further(
    [(2, 37, 8, 80), 1, 'n1'],  # heads of H/14
    [(1, 384, 2, 64), 2, 'th'],
    [(2, 9, 4, 32), 2, 'th'],
    [(1, 197, 2, 64), 2, ''],
    [(1, 201, 12, 64), 1, 't1'],  # ViT-5 B
    [(1, 1029, 2, 64), 1, 't1'],  # two tiles
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
  arrays, dy = inputs(shape, 1.5, dtype)
  rng = np.random.default_rng(1)
  if axes:
    sizes = (n if 'n' in axes else 1, tokens, heads if 'h' in axes else 1)
    arrays['angles'] = rng.normal(size=(*sizes, channels // 2))
  if vectors:
    norms = rng.normal(1, 0.5, (2, vectors, channels))
    arrays['norms'] = [list(norm) for norm in norms]
  check(arrays, dy, heads, dtype=dtype, limit=PREPARED_LIMITS[dtype])


@pytest.mark.parametrize(
  'tokens, channels, dtype, transformed, expected',
  [
    (603, 80, 'float32', False, True),
    (703, 80, 'float32', False, False),
    (9, 60, 'float32', False, False),
    (9, 16, 'float32', False, False),
    (9, 136, 'float32', False, False),
    # With norms or rotations, fewer tokens fit into the memory of a core.
    (261, 64, 'float32', True, True),
    (577, 64, 'bfloat16', True, True),
    (1029, 64, 'bfloat16', True, False),
    (1029, 64, 'bfloat16', False, True),
  ],
)
def test_sizes_that_fit(tokens, channels, dtype, transformed, expected):
  """Other sizes raise an error with 'kernel', and use XLA with 'auto'."""
  dtype = jnp.dtype(dtype)
  fits = tpu.fits(tokens, channels, dtype, transformed=transformed)
  assert fits == expected
  if not expected and not transformed:
    x = jax.ShapeDtypeStruct((1, tokens, 2 * channels), dtype)
    key = jax.random.key(0)
    words = f'attention=.*{tokens} tokens, width {2 * channels}'
    with pytest.raises(UserError, match=words):
      jax.eval_shape(Attention(2, dtype, 'kernel').init, key, x)
    jax.eval_shape(Attention(2, dtype, 'auto').init, key, x)


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
    # The kernels do not return weights, so XLA computes them.
    _, weights = attention.apply(params, x, want_weights=True)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
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
  found = with_gradients(by_kernels, *inputs((1, 21, 2, 64), 60.0), 2)
  assert all(np.isfinite(x).all() for x in found.values())


@pytest.mark.slow
def test_kernels_on_a_mesh_give_the_same():
  """Devices share examples and heads."""
  arrays, dy = jax.tree.map(jnp.float32, inputs((8, 9, 4, 64)))
  alone = with_gradients(by_kernels, arrays, dy, 4)
  mesh = sharding.make_mesh(jax.devices(), data=2, fsdp=2, model=2)
  by_batch = sharding.batch_sharding(mesh)

  @jax.jit
  def gradients(arrays, dy):
    return jax.vjp(functools.partial(by_kernels, 4, None), arrays)[1](dy)[0]

  with jax.set_mesh(mesh):
    arrays['projections'], dy = jax.device_put(
      (arrays['projections'], dy), by_batch
    )
    text = gradients.lower(arrays, dy).as_text()
    found = tree.flatten({'d': gradients(arrays, dy)})
  assert 'manual_computation' in text or 'shard_map' in text
  for path, x in found.items():
    np.testing.assert_allclose(x, alone[path], atol=2e-5, err_msg=path)


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
