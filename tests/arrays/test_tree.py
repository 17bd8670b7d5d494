"""Tests of pytree paths."""

import collections
import dataclasses

import jax
import numpy as np

from vit_jax.arrays import tree

Pair = collections.namedtuple('Pair', 'mu nu')


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
  params: dict
  moments: tuple


STATE = State(
  params={'head': {'kernel': np.zeros((2, 3)), 'bias': np.zeros(3)}},
  moments=(Pair(mu={'w': np.zeros(5)}, nu=[np.zeros(()), None]), {}),
)


def test_flatten_gives_paths_for_all_containers():
  """The i-th path belongs to the i-th leaf of `jax.tree.leaves`."""
  flat, leaves = tree.flatten(STATE), jax.tree.leaves(STATE)
  assert {*flat} == {
    'params/head/bias',
    'params/head/kernel',
    'moments/0/mu/w',
    'moments/0/nu/0',
  }
  assert all(a is b for a, b in zip(flat.values(), leaves, strict=True))


def test_unflatten_inverts_flatten():
  nested = {'a': {'b': {'c': 1, 'd': 2}, 'e': 3}, 'f': 4}
  assert tree.unflatten(tree.flatten(nested)) == nested


def test_stack_layers_inverts_unstack_layers():
  """`unstack_layers` splits named leaves into layers and keeps the others."""
  fc1 = {'kernel': np.arange(24.0).reshape(3, 4, 2), 'bias': np.ones((3, 2))}
  params = {'layers': {'fc1': fc1}, 'head': {'kernel': np.ones((2, 5))}}
  unstacked = tree.unstack_layers(params, ('fc1/kernel',))
  layers = unstacked['layers']['fc1']['kernel']
  assert [layer.shape for layer in layers] == [(1, 4, 2)] * 3
  np.testing.assert_array_equal(layers[1], fc1['kernel'][1:2])
  assert unstacked['head']['kernel'] is params['head']['kernel']
  assert tree.unstack_layers(params, ()) is params
  jax.tree.map(
    np.testing.assert_array_equal, tree.stack_layers(unstacked), params
  )
