"""Tests of rules by parameter path."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from updates import gradients, parameters, run

from vit_jax.arrays import tree
from vit_jax.errors import UserError
from vit_jax.optim import optimizers, rules

PATHS = ('embedding/kernel', 'blocks/0/kernel', 'blocks/0/bias', 'head/kernel')
PARAMS = parameters(*PATHS)
TABLE = (
  ('embedding/.*', dict(frozen=True)),
  ('.*/bias', dict(decay=0.0)),
  ('head/.*', dict(lr=10.0, decay=0.5)),
)


@pytest.mark.parametrize('name', ['adam', 'sgd'])
def test_each_leaf_is_trained_by_its_own_rule(name):
  """Every leaf moves as with a separate optimizer with its settings."""
  make = getattr(optimizers, name)
  ours, _ = run(make(lambda _: 0.01, weight_decay=0.3, rules=TABLE), PARAMS)
  own = {
    'embedding/kernel': (0.0, 0.0),
    'blocks/0/kernel': (0.01, 0.3),
    'blocks/0/bias': (0.01, 0.0),
    'head/kernel': (0.1, 0.15),
  }
  for path, (lr, decay) in own.items():
    optimizer = make(lambda _, lr=lr: lr, weight_decay=decay)
    expected, _ = run(optimizer, PARAMS)
    # Programs of different optimizers round differently.
    np.testing.assert_allclose(ours[-1][path], expected[-1][path], rtol=1e-5)


def test_rates_per_layer_of_a_stack():
  """Each layer moves as it would alone with its rate."""
  stack = parameters('layers/kernel', shape=(3, 4, 2))
  rates = (0.25, 0.5, 1)
  table = (('layers/.*', dict(lr=rates, decay=0.5)),)
  ours, _ = run(
    optimizers.adam(lambda _: 0.01, weight_decay=0.3, rules=table), stack
  )
  for i, rate in enumerate(rates):

    def layer(params, step, i=i):
      del params
      return jax.tree.map(lambda leaf: leaf[i], gradients(stack, step))

    alone = jax.tree.map(lambda leaf, i=i: leaf[i], stack)
    own = optimizers.adam(lambda _, r=rate: 0.01 * r, weight_decay=0.15)
    expected, _ = run(own, alone, layer)
    np.testing.assert_allclose(
      ours[-1]['layers/kernel'][i], expected[-1]['layers/kernel'], rtol=1e-5
    )


def test_frozen_parameters_are_left_out_of_clipping():
  """They do not have moments, either."""
  table = (('embedding/.*', dict(frozen=True)),)
  optimizer = optimizers.adam(lambda _: 0.01, clip_norm=1.0, rules=table)

  def huge(params, step):
    grads = gradients(params, step)
    grads['embedding']['kernel'] *= 1e6
    return grads

  (ours, state), (huger, _) = (
    run(optimizer, PARAMS),
    run(optimizer, PARAMS, huge),
  )
  jax.tree.map(np.testing.assert_array_equal, ours, huger)
  np.testing.assert_array_equal(
    ours[-1]['embedding/kernel'], PARAMS['embedding']['kernel']
  )
  moments = [path for path in tree.flatten(state) if '/mu/' in path]
  assert moments and not any('embedding' in path for path in moments)


def test_without_rules_the_state_keeps_its_paths():
  """Checkpoints of optimizers without rules can be restored."""
  state = optimizers.adam(lambda _: 0.1, clip_norm=1.0).init(PARAMS)
  assert 'opt_state' not in tree.flatten(state)
  assert '1/mu/head/kernel' in tree.flatten(state)


STACK = {path: {'kernel': jnp.ones((3, 4))} for path in ('layers', 'blocks')}


@pytest.mark.parametrize(
  'table, message, params',
  [
    (('head/.*',), 'pair', PARAMS),
    ((('head/.*', dict(rate=1.0)),), "'rate'", PARAMS),
    ((('head/[', dict(lr=1.0)),), 'regular expression', PARAMS),
    ((('head/.*', dict(lr=-1.0)),), '0 or more', PARAMS),
    ((('head/.*', dict(frozen=1)),), 'True or False', PARAMS),
    ((('head/.*', dict(after='soon')),), 'epochs', PARAMS),
    ((('tail/.*', dict(lr=1.0)),), "'tail/.*'", PARAMS),
    # A pattern must match the whole path, and not only what others match.
    ((('blocks/0', dict(lr=2.0)),), 'blocks/0.*whole path', PARAMS),
    ((('blocks/0/b', {}), ('.*', dict(lr=3.0))), 'blocks/0/b', PARAMS),
    ((('.*', {}), ('head/.*', dict(lr=2.0))), "'head/.*'", PARAMS),
    ((('layers/.*', dict(lr=(1, 2))),), 'has 2 rates.*has 3 layers', STACK),
    ((('blocks/.*', dict(lr=(1, 2))),), 'no layer axis', STACK),
  ],
)
def test_wrong_rules_are_refused(table, message, params):
  with pytest.raises(UserError, match=message):
    optimizers.adam(lambda _: 0.1, rules=table).init(params)
    rules.match(rules.parse(table), params)
