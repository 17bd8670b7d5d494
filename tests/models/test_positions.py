"""Tests of positions against a plain Transformer in torch, SciPy and timm."""

import functools
import itertools
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.ndimage
import torch
from tiny_vit import abstract, images_of, noise_params

from benchmarks.peers import import_timm
from tests.faults.counts import further
from tests.objectives import torch_vit
from tests.objectives.torch_vit import dense, norm
from vit_jax.arrays import sharding, tree
from vit_jax.errors import UserError
from vit_jax.models import positions
from vit_jax.models.contract import Patches
from vit_jax.models.vit import Model

SIZE, GRID = (8, 12), (2, 3)
SIZES = dict(
  patch_size=4, width=32, depth=2, mlp_dim=40, num_heads=2, dtype='float32'
)
KINDS = [
  (kind, at) for kind, places in positions.KINDS.items() for at in places
] + [('rope2d', None), ('none', None)]
LEARNT = [  # the others are tested with tokens left out
  ('learned', 'layers'),
  ('2d', 'stem'),
  ('2d', 'layers'),
  ('relative', 'layers'),
  ('relative', 'shared'),
  ('relative_bias', 'layers'),
  ('rope2d', None),
]
WITHOUT_PARAMETERS = [
  ('sincos2d', None),
  ('sincos2d_mae', None),
  ('none', None),
]
IN_LAYERS = [each for each in KINDS if each[1] != 'stem' and each[0] != 'none']


def model_of(kind, at, **options):
  """Returns a model with a class token and a register: patches begin at 2."""
  return Model(
    5, **SIZES, position=kind, position_at=at, registers=1, **options
  )


# The reference: loops and index arithmetic in float64, without shared code.


def added(kind, p, prefix, width):
  """Returns the added embeddings `[prefix + patches, d]`."""
  if kind == 'learned':
    return p['embedding'][0]
  if kind == '2d':
    patches = torch.stack(
      [torch.cat([row, column]) for row in p['rows'] for column in p['columns']]
    )
  elif kind.startswith('sincos2d'):
    patches = torch_vit.sincos(*GRID, width, kind == 'sincos2d')
  else:
    patches = torch.zeros(GRID[0] * GRID[1], width, dtype=torch.float64)
  return torch.cat([torch.zeros(prefix, width, dtype=torch.float64), patches])


def turned(x, number, prefix):
  """Rotates complex planes (i, i + c/2) of `[n, h, t, c]` by row and column."""
  half = x.shape[-1] // 2
  angles = torch.zeros(prefix + GRID[0] * GRID[1], half, dtype=torch.float64)
  for row, column in np.ndindex(*GRID):
    at = (2 * row + 1) / GRID[0] - 1, (2 * column + 1) / GRID[1] - 1
    for axis in range(2):
      for i in range(half // 2):
        turn = 2 * math.pi / 100 ** (2 * i / half)
        token = prefix + row * GRID[1] + column
        angles[token, axis * half // 2 + i] = at[axis] * turn
  planes = torch.complex(x[..., :half], x[..., half:])
  planes = (
    planes * torch.polar(torch.ones_like(angles), angles)[number][:, None]
  )
  return torch.cat([planes.real, planes.imag], -1)


def biases(table, number, prefix):
  """Returns the biases of BEiT `[n, h, q, k]`, one pair after the other."""
  rows = []
  for example in number.tolist():
    for q, k in itertools.product(example, repeat=2):
      if q < prefix or k < prefix:
        row = (q >= prefix) + 2 * (q < prefix and k < prefix)
      else:
        (y, x), (z, w) = divmod(q - prefix, 3), divmod(k - prefix, 3)
        row = 3 + (y - z + GRID[0] - 1) * 5 + x - w + GRID[1] - 1
      rows.append(row)
  n, t = number.shape
  return table[rows].reshape(n, t, t, -1).permute(0, 3, 1, 2)


def reference(model, p, images, kept):
  """Returns the results of `predict` for the patches `kept` [n, t]."""
  kind, at, n = model.position, model.position_at, len(images)
  images = torch.tensor(np.asarray(images, np.float64))
  x = torch_vit.embed(images, p['embedding'], model.patch_size)
  first = torch.cat([p['cls'], p['registers']], 1).expand(n, -1, -1)
  prefix = first.shape[1]
  number = torch.arange(prefix).expand(n, -1)
  number = torch.cat([number, prefix + torch.tensor(kept)], 1)
  x = torch.cat([first, x], 1)[torch.arange(n)[:, None], number]
  if at == 'stem':
    x = x + added(kind, p.get('position'), prefix, model.width)[number]
  results = {'layers': [], 'attention': []}
  for i in range(model.depth):
    layer = jax.tree.map(operator.itemgetter(i), p['encoder']['layers'])
    attention, own = layer['attention'], p.get('position')
    if at == 'layers':
      own = layer['position']
    if at != 'stem' and kind in ('learned', '2d'):
      x = x + added(kind, own, prefix, model.width)[number]
    y = norm(x, layer['norm1'])
    q, k, v = (
      dense(y, attention[name]).transpose(1, 2)
      for name in ('query', 'key', 'value')
    )
    if kind == 'rope2d':
      q, k = (turned(z, number, prefix) for z in (q, k))
    logits = torch.einsum('nhqc,nhkc->nhqk', q, k)
    if kind == 'relative':
      between = number[:, :, None] - number[:, None, :]
      middle = (len(own['offsets']) - 1) // 2
      r = own['offsets'][between + middle]  # [n, q, k, c]
      logits = logits + (q[:, :, :, None] * r[:, None]).sum(-1)
    logits = logits / q.shape[-1] ** 0.5
    if kind == 'relative_bias':
      logits = logits + biases(own['biases'], number, prefix)
    weights = logits.softmax(-1)
    y = torch.einsum('nhqk,nhkc->nqhc', weights, v)
    x = x + dense(y, attention['out'], 2)
    y = dense(norm(x, layer['norm2']), layer['mlp']['fc1'])
    y = torch.nn.functional.gelu(y, approximate='tanh')
    x = x + dense(y, layer['mlp']['fc2'])
    results['layers'].append(x)
    results['attention'].append(weights)
  results = {name: torch.stack(each, 1) for name, each in results.items()}
  tokens = norm(x, p['encoder']['norm'])
  return results | {'tokens': tokens, 'logits': dense(tokens[:, 0], p['head'])}


WEIGHTS = np.cos(np.arange(10.0)).reshape(2, 5)


@pytest.mark.slow
@pytest.mark.parametrize(
  'kind, at',
  [
    *LEARNT[1::2],
    *WITHOUT_PARAMETERS,
    *further(*map(list, LEARNT[::2])),
  ],
)
def test_results_and_gradients_equal_torch(kind, at):
  """Outputs and weights of all layers, logits and all gradients agree."""
  model, images = model_of(kind, at), images_of(2, *SIZE)
  params = noise_params(model, SIZE)

  def run(params):
    want = ('layers', 'attention', 'tokens')
    out = model.apply({'params': params}, images, None, want, method='predict')
    return (out['logits'] * WEIGHTS).sum(), out

  (_, out), gradients = jax.jit(jax.value_and_grad(run, has_aux=True))(params)
  theirs = torch_vit.leaves(params)
  expected = reference(model, theirs, images, np.tile(np.arange(6), (2, 1)))
  for name, x in expected.items():
    np.testing.assert_allclose(out[name], x.detach(), atol=2e-5, err_msg=name)
  (expected['logits'] * torch.tensor(WEIGHTS)).sum().backward()
  found = tree.flatten(gradients)
  for path, leaf in tree.flatten(torch_vit.gradients(theirs)).items():
    largest = max(np.abs(leaf).max(), 1e-3)
    np.testing.assert_allclose(found[path], leaf, atol=1e-4 * largest)


@pytest.mark.parametrize('kind, at', IN_LAYERS)
def test_kept_tokens_have_the_positions_of_their_patches(kind, at):
  model, images = model_of(kind, at), images_of(2, *SIZE)
  params = noise_params(model, SIZE)
  kept = np.array([[0, 2, 5], [4, 3, 1]])

  @jax.jit
  def logits(params, kept):
    apply = functools.partial(model.apply, {'params': params})
    tokens = apply(images, method='embed')
    tokens = jnp.take_along_axis(tokens, kept[..., None], axis=1)
    places = Patches(model.grid(SIZE), kept)
    tokens = apply(tokens, None, places, method='encode')
    return apply(tokens, method='readout')['logits']

  with torch.no_grad():
    expected = reference(model, torch_vit.leaves(params), images, kept)
  found = logits(params, kept)
  np.testing.assert_allclose(found, expected['logits'], atol=2e-5)


def test_fixed_tables_equal_timm():
  """MAE's is timm's with rows and columns exchanged; DINOv3's rotations."""
  import_timm()
  from timm.layers import RotaryEmbeddingDinoV3, build_sincos2d_pos_embed

  table = build_sincos2d_pos_embed([3, 5], dim=32).numpy()
  # timm's: sines of rows, of columns, then cosines of both
  table = table.reshape(15, 2, 2, 8).transpose(0, 2, 1, 3)[:, ::-1]
  np.testing.assert_allclose(
    positions.sincos2d((3, 5), 32, last_included=False),
    table.reshape(15, 32),
    atol=1e-6,
  )
  rope = RotaryEmbeddingDinoV3(16, feat_shape=[3, 5])
  expected = np.split(rope.get_embed([3, 5]).numpy(), 2, axis=-1)
  config = Model(0, **SIZES, position='rope2d', pool='gap').config
  found = positions.rotary(config, Patches((3, 5))).rotation
  for mine, theirs in zip(found, expected, strict=True):
    np.testing.assert_allclose(mine[0], theirs, atol=1e-5)


# Another image size

GRIDS = [
  ((14, 14), (24, 24)),
  ((14, 14), (7, 7)),
  ((16, 16), (16, 32)),
  ((7, 7), (12, 5)),
  ((4, 6), (9, 3)),
  ((5, 3), (1, 1)),
]


def random_table(grid, prefix=1):
  """Returns random embeddings of `prefix` tokens and of a grid."""
  shape = (1, prefix + grid[0] * grid[1], 6)
  return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def resized(name, table, *grids_and_method):
  return positions.resize({f'x/{name}': table}, *grids_and_method)[f'x/{name}']


@pytest.mark.parametrize('old, new', GRIDS)
def test_interpolation_equals_scipy_and_torch(old, new):
  """SciPy's zoom of the authors' code, and timm's antialiased torch."""
  table = random_table(old)
  maps = table[0, 1:].reshape(*old, 6)
  aligned = resized('embedding', table, old, new, 'aligned')
  zoom = (new[0] / old[0], new[1] / old[1], 1)
  expected = scipy.ndimage.zoom(maps, zoom, order=1).reshape(-1, 6)
  np.testing.assert_allclose(aligned[0, 1:], expected, rtol=1e-5, atol=1e-6)
  default = resized('embedding', table, old, new, None)
  np.testing.assert_array_equal(default, aligned)

  bicubic = resized('embedding', table, old, new, 'bicubic')
  expected = torch.nn.functional.interpolate(
    torch.tensor(maps).permute(2, 0, 1)[None],
    size=new,
    mode='bicubic',
    antialias=True,
    align_corners=False,
  )
  expected = expected[0].permute(1, 2, 0).reshape(-1, 6)
  np.testing.assert_allclose(bicubic[0, 1:], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('method', positions.METHODS)
@pytest.mark.parametrize('prefix', [0, 2])
def test_prefix_same_grid_and_constants_do_not_change(method, prefix):
  table = random_table((4, 6), prefix)
  result = resized('embedding', table, (4, 6), (5, 5), method)
  assert result.shape == (1, prefix + 25, 6) and result.dtype == np.float32
  np.testing.assert_array_equal(result[:, :prefix], table[:, :prefix])
  same = resized('embedding', table, (4, 6), (4, 6), method)
  np.testing.assert_array_equal(same, table)
  # Weights sum to one everywhere, also at the edges.
  constant = np.full_like(table, 0.7)
  result = resized('embedding', constant, (4, 6), (11, 3), method)
  np.testing.assert_allclose(result, 0.7, rtol=1e-5)


@pytest.mark.parametrize('kind, at', KINDS)
def test_adapt_gives_the_shapes_of_the_new_size(kind, at):
  model, new = model_of(kind, at), (16, 8)
  old = tree.flatten(abstract(model, SIZE))
  expected = tree.flatten(abstract(model, new))
  leaves = {
    path: np.ones(leaf.shape, np.float32)
    for path, leaf in old.items()
    if path.startswith(model.sized)
  }
  assert bool(leaves) == (kind in ('learned', '2d', *positions.IN_ATTENTION))
  adapted = model.adapt(leaves, SIZE, new, 'bicubic')
  assert adapted.keys() == leaves.keys()
  for path, leaf in expected.items():
    assert adapted.get(path, old[path]).shape == leaf.shape


def test_rows_and_columns_are_stretched_to_their_ends():
  """A ramp stays a ramp, and an offset of zero stays zero."""
  ramp = np.linspace(0, 1, 3)[:, None]
  for name, grid, new in (
    ('rows', (3, 2), (5, 9)),
    ('columns', (2, 3), (9, 5)),
  ):
    stretched = resized(name, ramp, grid, new, 'aligned')
    np.testing.assert_allclose(stretched[:, 0], np.linspace(0, 1, 5), atol=1e-6)
  offsets = np.linspace(-1, 1, 15)[:, None]  # 8 tokens, 2 before 6 patches
  stretched = resized('offsets', offsets, (2, 3), (4, 3), 'aligned')
  np.testing.assert_allclose(stretched[:, 0], np.linspace(-1, 1, 27), atol=1e-6)
  for method in positions.METHODS[:3]:  # DINO's axis is not symmetric
    middle = resized('offsets', offsets, (2, 3), (4, 3), method)[13, 0]
    assert abs(middle) < 1e-6


# Programs


def pallas_calls(model, monkeypatch):
  monkeypatch.setattr(sharding, 'on_tpu', lambda: True)
  params = abstract(model, SIZE)
  images = jax.ShapeDtypeStruct((1, *SIZE, 3), np.float32)
  program = jax.make_jaxpr(lambda p, x: model.apply({'params': p}, x))
  return 'pallas_call' in str(program(params, images))


@pytest.mark.parametrize(
  'options, kernels',
  [
    (dict(position_at='layers', registers=2, layer_scale=0.1), True),
    (dict(position='relative'), False),
    (dict(position='relative_bias'), False),
    (dict(position='rope2d', rope_registers=10.0, registers=4), True),
    (dict(rope='mixed', qk_norm=True, norm='rms'), True),
  ],
)
def test_options_that_kernels_do_not_support_use_xla(
  options, kernels, monkeypatch
):
  """The log names the implementation."""
  sizes = SIZES | dict(width=128)
  model = Model(5, **sizes, **options)
  assert pallas_calls(model, monkeypatch) == kernels
  assert (model.kernels is not None) == kernels
  text = model.computed_by(SIZE)
  assert text.startswith(
    'attention by kernels' if kernels else 'attention by X'
  )
  if not kernels:
    assert next(iter(options)) in text
    with pytest.raises(UserError, match='kernel.*support'):
      Model(5, **sizes, **options, attention='kernel').computed_by(SIZE)
