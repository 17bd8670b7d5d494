"""Tests of scheduled weight decay, decay masks and delayed parameters."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import updates
from updates import STEPS, gradients, parameters, run, run_torch

from vit_jax.arrays import tree
from vit_jax.optim import optimizers

LR, START = 0.05, 4
PARAMS = parameters('body/kernel', 'body/bias', 'head/last/kernel')


def steps(duration):
  number, unit = duration.split(' ')
  return round(float(number) * {'epochs': START, '%': STEPS / 100}.get(unit, 1))


SETTING = optimizers.Setting(steps)
assert_close = functools.partial(updates.assert_close, rtol=2e-5, atol=2e-6)


def adamw(groups):
  return torch.optim.AdamW(groups, lr=LR, weight_decay=0.3)


def late(group, step):
  """Returns whether the rule still delays the parameters of a group."""
  return group['path'].startswith('head') and step < START


@pytest.mark.parametrize('clip', [{}, dict(clip_norm=1e9)])
def test_delayed_parameters_start_with_their_first_update(clip):
  """Moments, bias correction and decay begin with the first update."""
  rules = (('head/last/.*', dict(after='1 epochs')),)
  optimizer = optimizers.adam(
    lambda _: LR, SETTING, weight_decay=0.3, rules=rules, **clip
  )
  history, _ = run(optimizer, PARAMS)

  def prepare(adam, step):
    for group in adam.param_groups:
      if late(group, step):
        group['params'][0].grad = None

  assert_close(history, run_torch(adamw, PARAMS, prepare))
  before = PARAMS['head']['last']['kernel']
  np.testing.assert_array_equal(history[START - 1]['head/last/kernel'], before)


def test_a_rate_of_zero_at_the_start_keeps_moments_and_clipping():
  """Torch's AdamW with its own group, whose rate is 0 at first (DINOv2)."""
  rules = (('head/last/.*', dict(lr_after='1 epochs')),)
  optimizer = optimizers.adam(
    lambda _: LR, SETTING, weight_decay=0.3, clip_norm=2.0, rules=rules
  )

  def prepare(adam, step):
    leaves = [leaf for group in adam.param_groups for leaf in group['params']]
    torch.nn.utils.clip_grad_norm_(leaves, 2.0)
    for group in adam.param_groups:
      group['lr'] = 0.0 if late(group, step) else LR

  assert_close(run(optimizer, PARAMS)[0], run_torch(adamw, PARAMS, prepare))


def test_gradients_of_delayed_parameters_are_ignored():
  """They do not count in the global norm for clipping, either."""

  def given(factor):
    def scaled(params, step):
      grads = gradients(params, step)
      grads['head']['last']['kernel'] *= factor if step < START else 1
      return grads

    return scaled

  rules = (('head/last/.*', dict(after='1 epochs')),)
  optimizer = optimizers.sgd(
    lambda _: LR, SETTING, clip_norm=1.0, weight_decay=0.1, rules=rules
  )
  large, _ = run(optimizer, PARAMS, given(1e6))
  small, _ = run(optimizer, PARAMS, given(0.0))
  jax.tree.map(np.testing.assert_array_equal, large, small)


@pytest.mark.parametrize('start, end', [(0.04, 0.4), (0.0, 0.2), (0.3, 0.0)])
def test_decay_follows_half_a_cosine(start, end):
  """The reference is torch's AdamW with its decay set before every step."""
  optimizer = optimizers.adam(
    lambda _: LR, SETTING, weight_decay=start, weight_decay_end=end
  )

  def prepare(adam, step):
    cosine = (1 + math.cos(math.pi * step / STEPS)) / 2
    for group in adam.param_groups:
      group['weight_decay'] = end + (start - end) * cosine

  assert_close(run(optimizer, PARAMS)[0], run_torch(adamw, PARAMS, prepare))


def test_lamb_adapts_parameters_whose_decay_starts_at_zero():
  """The first update, 0.1, is multiplied by |parameter| / |direction| = 2."""
  params = {'head': {'kernel': jnp.full((2, 2), 2.0)}}
  setting = optimizers.Setting(lambda _: 10)
  keys = dict(weight_decay=0.0, weight_decay_end=0.2)
  optimizer = optimizers.lamb(lambda _: 0.1, setting, **keys)
  ones = jax.tree.map(jnp.ones_like, params)
  found, _ = optimizer.update(ones, optimizer.init(params), params)
  np.testing.assert_allclose(found['head']['kernel'], -0.2, rtol=1e-5)


# Path, shape, and whether the masks 'kernels' and 'tensors' contain it.
MASKED = (
  ('encoder/layers/mlp/fc1/kernel', (2, 8, 16), True, True),
  ('encoder/layers/attention/query/kernel', (2, 8, 2, 4), True, True),
  ('head/kernel', (8, 5), True, True),
  ('cls', (1, 1, 8), False, True),
  ('position/embedding', (1, 5, 8), False, True),
  ('encoder/layers/mlp/fc1/bias', (2, 16), False, False),
  ('encoder/layers/attention/query/bias', (2, 2, 4), False, False),
  ('encoder/layers/norm/scale', (2, 8), False, False),
  ('encoder/norm/scale', (8,), False, False),
  ('map/attention/query/bias', (2, 4), False, False),
  ('head/bias', (5,), False, False),
)


@pytest.mark.parametrize(
  'mask, column', [('all', None), ('kernels', 2), ('tensors', 3)]
)
def test_decay_masks(mask, column):
  """Layer axes, and head axes of biases, are not counted as axes."""
  ones = tree.unflatten({path: jnp.ones(shape) for path, shape, *_ in MASKED})
  zeros = jax.tree.map(jnp.zeros_like, ones)
  optimizer = optimizers.sgd(lambda _: 0.1, weight_decay=0.5, decay_mask=mask)
  found, _ = optimizer.update(zeros, optimizer.init(ones), ones)
  for row in MASKED:
    decays = column is None or row[column]
    leaf = tree.flatten(found)[row[0]]
    np.testing.assert_allclose(leaf, -0.05 * decays, rtol=1e-6)
