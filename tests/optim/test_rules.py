"""Tests of rules by parameter path."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.arrays import tree
from vit_jax.errors import UserError
from vit_jax.optim import optimizers, rules

PATHS = ('embedding/kernel', 'blocks/0/kernel', 'blocks/0/bias', 'head/kernel')


@pytest.fixture
def params():
  rng = np.random.default_rng(0)
  return tree.unflatten(
    {path: jnp.asarray(rng.normal(size=(3, 4)), jnp.float32) for path in PATHS}
  )


def gradients(params, step):
  rng = np.random.default_rng([1, step])
  return jax.tree.map(
    lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), params
  )


def run(optimizer, params, grads=gradients, steps=5):
  """Returns the parameters by path after some updates."""
  state = optimizer.init(params)
  for step in range(steps):
    updates, state = optimizer.update(grads(params, step), state, params)
    params = jax.tree.map(jnp.add, params, updates)
  return tree.flatten(params), state


TABLE = (
  ('embedding/.*', dict(frozen=True)),
  ('.*/bias', dict(decay=0.0)),
  ('head/.*', dict(lr=10.0, decay=0.5)),
)


@pytest.mark.parametrize('name', ['adam', 'sgd'])
def test_each_leaf_is_trained_by_its_own_rule(name, params):
  """Every leaf moves as with a separate optimizer with its settings."""
  make = getattr(optimizers, name)
  ours, _ = run(make(lambda _: 0.01, weight_decay=0.3, rules=TABLE), params)
  own = {
    'embedding/kernel': (0.0, 0.0),
    'blocks/0/kernel': (0.01, 0.3),
    'blocks/0/bias': (0.01, 0.0),
    'head/kernel': (0.1, 0.15),
  }
  for path, (lr, decay) in own.items():
    optimizer = make(lambda _, lr=lr: lr, weight_decay=decay)
    expected, _ = run(optimizer, params)
    np.testing.assert_allclose(ours[path], expected[path], rtol=1e-6)


def test_a_pattern_matches_the_whole_path(params):
  """'blocks/0' does not match 'blocks/0/kernel' and 'blocks/0/bias'."""
  table = rules.parse((('blocks/0', dict(frozen=True)),))
  with pytest.raises(UserError, match='blocks/0.*whole path'):
    rules.match(table, params)
  table = rules.parse((('blocks/0/b', dict(lr=2.0)), ('.*', dict(lr=3.0))))
  with pytest.raises(UserError, match='blocks/0/b'):
    rules.match(table, params)
  table = rules.parse((('blocks/0/bias', dict(lr=2.0)),))
  rates = tree.flatten(jax.tree.map(lambda r: r.lr, rules.match(table, params)))
  assert rates['blocks/0/bias'] == 2 and rates['blocks/0/kernel'] == 1


def test_rates_per_layer_of_a_stack():
  """Each layer moves as it would alone with its rate."""
  rng = np.random.default_rng(0)
  stack = {'layers': {'kernel': jnp.array(rng.normal(size=(3, 4, 2)))}}
  rates = (0.25, 0.5, 1)
  table = (('layers/.*', dict(lr=rates, decay=0.5)),)
  make = functools.partial(optimizers.adam, weight_decay=0.3)
  ours, _ = run(make(lambda _: 0.01, rules=table), stack)
  for i, rate in enumerate(rates):

    def layer(params, step, i=i):
      del params
      return jax.tree.map(lambda leaf: leaf[i], gradients(stack, step))

    alone = jax.tree.map(lambda leaf, i=i: leaf[i], stack)
    own = optimizers.adam(lambda _, r=rate: 0.01 * r, weight_decay=0.15)
    expected, _ = run(own, alone, layer)
    np.testing.assert_allclose(
      ours['layers/kernel'][i], expected['layers/kernel'], rtol=1e-6
    )
  for path, words in (
    ('layers', 'has 2 rates.*has 3 layers: give one'),
    ('blocks', 'no layer axis'),
  ):
    params = {path: stack['layers']}
    with pytest.raises(UserError, match=words):
      run(make(lambda _: 0.1, rules=((f'{path}/.*', dict(lr=(1, 2))),)), params)


def test_frozen_parameters_are_left_out_of_clipping(params):
  """They do not have moments, either."""
  table = (('embedding/.*', dict(frozen=True)),)
  optimizer = optimizers.adam(lambda _: 0.01, clip_norm=1.0, rules=table)

  def huge(params, step):
    grads = gradients(params, step)
    grads['embedding']['kernel'] *= 1e6
    return grads

  (ours, state), (huger, _) = (
    run(optimizer, params),
    run(optimizer, params, huge),
  )
  for path in PATHS:
    np.testing.assert_array_equal(ours[path], huger[path])
  np.testing.assert_array_equal(
    ours['embedding/kernel'], params['embedding']['kernel']
  )
  moments = [path for path in tree.flatten(state) if '/mu/' in path]
  assert moments and not any('embedding' in path for path in moments)


def test_without_rules_the_state_keeps_its_paths(params):
  """Checkpoints of optimizers without rules can be restored."""
  state = optimizers.adam(lambda _: 0.1, clip_norm=1.0).init(params)
  assert 'opt_state' not in tree.flatten(state)
  assert '1/mu/head/kernel' in tree.flatten(state)


@pytest.mark.parametrize(
  'table, words',
  [
    (('head/.*',), 'pair'),
    ((('head/.*', dict(rate=1.0)),), "'rate'"),
    ((('head/[', dict(lr=1.0)),), 'regular expression'),
    ((('head/.*', dict(lr=-1.0)),), '0 or more'),
    ((('head/.*', dict(frozen=1)),), 'True or False'),
    ((('head/.*', dict(after='soon')),), 'epochs'),
    ((('tail/.*', dict(lr=1.0)),), "'tail/.*'"),
    ((('.*', {}), ('head/.*', dict(lr=2.0))), "'head/.*'"),
  ],
)
def test_messages_of_wrong_rules(table, words, params):
  with pytest.raises(UserError) as error:
    optimizers.adam(lambda _: 0.1, rules=table).init(params)
    rules.match(rules.parse(table), params)
  assert words in str(error.value)
