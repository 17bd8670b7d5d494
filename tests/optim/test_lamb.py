"""Tests of LAMB on stacked layers against separate tensors."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

from benchmarks import peers
from vit_jax.arrays import tree
from vit_jax.optim import optimizers

DEPTH, D, HEADS, SIZE, HIDDEN = 3, 8, 2, 4, 12
SHAPES = {
  'embedding/kernel': (2, 2, 3, D),
  'cls': (1, 1, D),
  'encoder/layers/attention/query/kernel': (DEPTH, D, HEADS, SIZE),
  'encoder/layers/attention/key/kernel': (DEPTH, D, HEADS, SIZE),
  'encoder/layers/attention/value/kernel': (DEPTH, D, HEADS, SIZE),
  'encoder/layers/attention/query/bias': (DEPTH, HEADS, SIZE),
  'encoder/layers/attention/out/kernel': (DEPTH, HEADS, SIZE, D),
  'encoder/layers/mlp/in/kernel': (DEPTH, D, HIDDEN),
  'encoder/layers/norm1/scale': (DEPTH, D),
  'head/kernel': (D, 5),
  'head/bias': (5,),
}
QKV = ('query|key|value',)


def random_tree(seed):
  rng = np.random.default_rng(seed)
  flat = {
    # Layers of different sizes, so that one ratio for a stack would be wrong.
    path: rng.normal(size=shape)
    * 2.0 ** np.arange(shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    for path, shape in SHAPES.items()
  }
  return tree.unflatten({k: jnp.array(v, jnp.float32) for k, v in flat.items()})


def apart(params):
  """Returns {name: array} with one entry per layer."""
  return {
    f'{path}:{i}': np.array(part)
    for path, leaf in tree.flatten(params).items()
    for i, part in enumerate(leaf if 'layers/' in path else [leaf])
  }


def trained(optimizer, steps=3):
  """Returns parameters after updates with different gradients."""
  params = random_tree(0)
  state = optimizer.init(params)
  update = jax.jit(optimizer.update)
  for step in range(steps):
    updates, state = update(random_tree(step + 1), state, params)
    params = optax.apply_updates(params, updates)
  return apart(params)


def test_lamb_equals_timm():
  """With and without decay; query, key and value are one matrix."""
  made = optimizers.lamb(
    optax.constant_schedule(0.01),
    weight_decay=0.05,
    trust_joined=QKV,
  )
  ours = trained(made)
  joined = [name for name in apart(random_tree(0)) if name.endswith('kernel:0')]
  names = {}  # timm's tensor → our tensors, in order

  def key(name):
    for part in ('query', 'key', 'value'):
      if 'kernel' in name:
        name = name.replace(part, 'qkv')
    return name

  for name in apart(random_tree(0)):
    names.setdefault(key(name), []).append(name)
  assert joined and any(len(parts) == 3 for parts in names.values())

  def stacked(values, parts):
    return torch.tensor(
      np.concatenate([values[part].ravel() for part in parts])
    )

  theirs = {
    name: torch.nn.Parameter(stacked(apart(random_tree(0)), parts))
    for name, parts in names.items()
  }
  decays = [p for n, p in theirs.items() if 'kernel' in n]
  others = [p for n, p in theirs.items() if 'kernel' not in n]
  groups = [
    {'params': decays, 'weight_decay': 0.05},
    {'params': others, 'weight_decay': 0.0},
  ]
  peers.import_timm()
  peer = importlib.import_module('timm.optim').Lamb(
    groups, lr=0.01, eps=1e-6, max_grad_norm=None
  )
  for step in range(3):
    grads = apart(random_tree(step + 1))
    for name, parts in names.items():
      theirs[name].grad = stacked(grads, parts)
    peer.step()
  for name, parts in names.items():
    mine = np.concatenate([ours[part].ravel() for part in parts])
    known = theirs[name].detach().numpy()
    np.testing.assert_allclose(mine, known, rtol=2e-5, atol=1e-5, err_msg=name)


def test_lamb_without_decay_is_adam():
  """Leaves that do not decay are not adapted; rules may exclude more."""
  rate = optax.constant_schedule(0.01)
  adam = trained(optimizers.adam(rate, eps=1e-6))
  for name, leaf in trained(optimizers.lamb(rate)).items():
    np.testing.assert_array_equal(leaf, adam[name])
  rules = (('head/.*', dict(decay=0.0)),)
  spared = trained(optimizers.lamb(rate, weight_decay=0.1, rules=rules))
  np.testing.assert_array_equal(spared['head/kernel:0'], adam['head/kernel:0'])
  assert not np.array_equal(
    spared['embedding/kernel:0'], adam['embedding/kernel:0']
  )


def test_lamb_moves_a_zero_head():
  """It moves as with Adam; a ratio of zeros would give NaN."""
  params, grads = {'head': {'kernel': jnp.zeros((2, 2))}}, jnp.ones((2, 2))
  made = optimizers.lamb(optax.constant_schedule(0.1), weight_decay=0.1)
  updates, _ = made.update(
    {'head': {'kernel': grads}}, made.init(params), params
  )
  np.testing.assert_allclose(updates['head']['kernel'], -0.1, rtol=1e-5)
