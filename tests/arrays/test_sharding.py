"""Tests of mesh sizes, the sharding rules of leaves, and constraints."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from vit_jax.arrays import sharding, tree
from vit_jax.errors import UserError
from vit_jax.models import contract
from vit_jax.models.vit import Model
from vit_jax.optim import average as average_lib
from vit_jax.optim import optimizers


def mesh_of(data=1, fsdp=1, model=1):
  """Returns a mesh of as many of the eight devices as needed."""
  devices = jax.devices()[: data * fsdp * model]
  return sharding.make_mesh(devices, data=data, fsdp=fsdp, model=model)


RULES = Model(0, variant='Ti/16').sharding_rules
MESHES = (dict(fsdp=8), dict(data=2, fsdp=2, model=2), dict(model=8))
# The depth is the largest dimension.
SIZES = dict(patch_size=16, width=64, depth=256, mlp_dim=128, num_heads=4)
PARAMS = contract.abstract_params(
  Model(32, **SIZES, pool='map', pre_logits=True), (32, 32)
)


@pytest.mark.parametrize(
  'sizes, shape',
  [
    (dict(), (8, 1, 1)),
    (dict(fsdp=2, model=2), (2, 2, 2)),
    (dict(data=1, fsdp=-1), (1, 8, 1)),
    (dict(data=2, model=-1), (2, 1, 4)),
  ],
)
def test_mesh_sizes(sizes, shape):
  """-1 stands for the remaining devices, and every device occurs once."""
  mesh = sharding.make_mesh(jax.devices(), **sizes)
  assert mesh.devices.shape == shape
  assert mesh.axis_names == ('data', 'fsdp', 'model')
  assert {*mesh.devices.flat} == {*jax.devices()}
  assert mesh.axis_types == (AxisType.Auto,) * 3


@pytest.mark.parametrize(
  'sizes',
  [
    dict(data=3),
    dict(data=16),
    dict(fsdp=0),
    dict(data=-2, fsdp=-4),
    dict(data=-1, fsdp=-1),
    dict(model=-1),
  ],
)
def test_meshes_that_do_not_fit_the_devices(sizes):
  with pytest.raises(UserError, match='8 devices'):
    sharding.make_mesh(jax.devices(), **sizes)


@pytest.mark.parametrize(
  'path, shape, expected',
  [
    # `model` by rule, `fsdp` on the largest dimension that is left.
    ('layers/attention/query/kernel', (12, 64, 4, 16), (None, 'fsdp', 'model')),
    ('layers/attention/key/bias', (12, 4, 16), (None, 'model')),
    (
      'layers/attention/out/kernel',
      (12, 4, 16, 64),
      (None, 'model', None, 'fsdp'),
    ),
    ('layers/mlp/fc1/kernel', (12, 64, 256), (None, 'fsdp', 'model')),
    ('layers/mlp/fc1/bias', (12, 256), (None, 'model')),
    ('layers/mlp/fc2/kernel', (12, 256, 64), (None, 'model', 'fsdp')),
    ('head/kernel', (64, 1000), ('fsdp', 'model')),
    ('head/bias', (1000,), ('model',)),
    # Leaves without a rule.
    ('pre_logits/kernel', (64, 66), (None, 'fsdp')),
    ('position/embedding', (1, 197, 768), (None, None, 'fsdp')),
    ('forehead/kernel', (64, 1000), (None, 'fsdp')),
    # Too small to be worth a gather, or not divisible.
    ('encoder/norm/scale', (768,), ()),
    ('cls', (1, 1, 768), ()),
    ('some/kernel', (4097, 4098), (None, 'fsdp')),
    ('some/kernel', (4097, 4099), ()),
    ('head/kernel', (64, 1001), ('fsdp',)),
    ('step', (), ()),
    # The layer axis is never split.
    ('layers/norm1/scale', (4096, 6), (None, 'fsdp')),
    ('layers/norm1/scale', (4096, 7), ()),
    ('opt_state/1/mu/encoder/layers/norm1/scale', (4096, 6), (None, 'fsdp')),
  ],
)
def test_leaf_spec_of_each_rule(path, shape, expected):
  """Specs agree with rules applied by hand on a 2x2x2 mesh."""
  spec = sharding.leaf_spec(path, shape, mesh_of(2, 2, 2), RULES)
  assert spec == PartitionSpec(*expected)


@pytest.mark.parametrize('sizes', MESHES)
def test_leaves_are_split_evenly_but_not_between_layers(sizes):
  """The layer axis stays whole even if it is the largest and divisible.

  Each mesh axis is used at most once per leaf.
  """
  mesh, used = mesh_of(**sizes), set()
  for path, leaf in tree.flatten(PARAMS).items():
    spec = sharding.leaf_spec(path, leaf.shape, mesh, RULES)
    if 'layers/' in path:
      assert not spec or spec[0] is None
      used |= {*spec}
    named = jax.sharding.NamedSharding(mesh, spec)  # raises if used twice
    split = np.prod([mesh.shape[axis] for axis in spec if axis])
    shard = named.shard_shape(leaf.shape)  # raises if it does not divide
    assert np.prod(shard) * split == np.prod(leaf.shape), path
  assert {axis for axis, size in sizes.items() if size > 1} - {'data'} <= used


@pytest.mark.parametrize('sizes', MESHES)
@pytest.mark.parametrize('name', ['adam', 'sgd'])
def test_moments_and_averages_are_sharded_like_their_parameter(name, sizes):
  """Their paths end with the path of their parameter."""
  mesh = mesh_of(**sizes)
  optimizer = getattr(optimizers, name)(lambda step: 0.1, clip_norm=1.0)
  state = {
    'opt_state': jax.eval_shape(optimizer.init, PARAMS),
    'average': jax.eval_shape(average_lib.init, PARAMS),
  }
  found = 0
  specs = tree.flatten(sharding.shardings(PARAMS, mesh, RULES))
  placed = sharding.with_shardings(state, mesh, RULES)
  for path, leaf in tree.flatten(placed).items():
    owners = [p for p in specs if path.endswith(f'/{p}') and leaf.shape]
    if owners:
      assert leaf.sharding == specs[max(owners, key=len)], path
      found += 1
    else:
      assert leaf.sharding.spec == PartitionSpec(), path
  copies = {'adam': 3, 'sgd': 2}[name]  # moments or trace, and the average
  assert found == copies * len(specs)


def test_zero1_splits_only_the_optimizer_state():
  """Each device holds whole parameters and an eighth of the moments."""
  mesh = mesh_of(data=8)
  state = {
    'params': PARAMS,
    'opt_state': {'mu': PARAMS},
    'average': {'mean': PARAMS},
  }
  placed = sharding.with_shardings(state, mesh, RULES, zero1=True)

  def held(part):
    return sum(
      np.prod(leaf.sharding.shard_shape(leaf.shape))
      for leaf in jax.tree.leaves(placed[part])
    )

  whole = held('params')
  assert whole == tree.size(PARAMS)
  # Small leaves are not worth splitting.
  assert whole / 8 <= held('opt_state') < whole / 7
  assert held('average') == held('opt_state')


@pytest.mark.parametrize(
  'shape, spec, shard',
  [
    # Devices along the model axis hold copies of the same rows.
    ((16, 3), (sharding.BATCH, None), (4, 3)),
    ((8, 4), (sharding.BATCH, 'model'), (2, 2)),
    ((6, 4), (sharding.BATCH, 'model'), (6, 2)),  # 4 does not divide 6
    ((8, 3), (sharding.BATCH, 'model'), (2, 3)),
  ],
)
def test_constrain_drops_axes_that_do_not_divide(shape, spec, shard):
  """Inside jit, dimensions that are divisible get the requested sharding."""
  mesh = mesh_of(2, 2, 2)
  assert sharding.batch_sharding(mesh).shard_shape((16, 3)) == (4, 3)
  with jax.set_mesh(mesh):
    constrained = jax.jit(lambda x: sharding.constrain(x + 1, *spec))
    result = constrained(jnp.zeros(shape))
  assert result.sharding.shard_shape(shape) == shard
