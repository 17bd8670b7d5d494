"""Tests of scheduled weight decay, decay masks and delayed parameters."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from vit_jax.arrays import tree
from vit_jax.optim import optimizers
from vit_jax.optim.schedule import cosine

STEPS, LR, START = 9, 0.05, 4
PATHS = ('body/kernel', 'body/bias', 'head/last/kernel')
RULES = (('head/last/.*', dict(after='1 epochs')),)


def steps(duration):
  number, unit = duration.split(' ')
  return round(float(number) * {'epochs': START, '%': STEPS / 100}.get(unit, 1))


SETTING = optimizers.Setting(steps)


def params():
  rng = np.random.default_rng(0)
  return tree.unflatten(
    {path: rng.normal(size=(3, 4)).astype(np.float32) for path in PATHS}
  )


def gradients(step):
  rng = np.random.default_rng([1, step])
  made = {path: rng.normal(size=(3, 4)) * 3.0**step for path in PATHS}
  return tree.unflatten({k: v.astype(np.float32) for k, v in made.items()})


def ours(optimizer, given=gradients, count=STEPS):
  """Returns the parameters by path after each update."""
  current, state, history = params(), optimizer.init(params()), []
  update = jax.jit(optimizer.update)
  for step in range(count):
    updates, state = update(given(step), state, current)
    current = jax.tree.map(jnp.add, current, updates)
    history.append({k: np.asarray(v) for k, v in tree.flatten(current).items()})
  return history, state


def torchs(decay, absent=lambda path, step: False):
  """Runs AdamW in float64 with a decay per step; some gradients are None."""
  tensors = {
    path: torch.tensor(leaf, dtype=torch.float64, requires_grad=True)
    for path, leaf in tree.flatten(params()).items()
  }
  optimizer, history = torch.optim.AdamW(tensors.values(), lr=LR), []
  for step in range(STEPS):
    optimizer.param_groups[0]['weight_decay'] = decay(step)
    for path, gradient in tree.flatten(gradients(step)).items():
      gone = absent(path, step)
      tensors[path].grad = None if gone else torch.tensor(gradient).double()
    optimizer.step()
    history.append({k: t.detach().numpy().copy() for k, t in tensors.items()})
  return history


def assert_close(first, second):
  for step, (one, other) in enumerate(zip(first, second, strict=True)):
    for path in PATHS:
      np.testing.assert_allclose(
        one[path],
        other[path],
        rtol=2e-5,
        atol=2e-6,
        err_msg=f'{step} {path}',
      )


@pytest.mark.parametrize('clip', [{}, dict(clip_norm=1e9)])
def test_delayed_parameters_start_with_their_first_update(clip):
  """Moments, bias correction and decay begin with the first update."""
  optimizer = optimizers.adam(
    lambda _: LR, SETTING, weight_decay=0.3, rules=RULES, **clip
  )
  history, _ = ours(optimizer)
  late = lambda path, step: path.startswith('head') and step < START  # noqa: E731
  assert_close(history, torchs(lambda step: 0.3, late))
  before = tree.flatten(params())['head/last/kernel']
  np.testing.assert_array_equal(history[START - 1]['head/last/kernel'], before)
  assert np.abs(history[START]['head/last/kernel'] - before).max() > LR / 2


def test_a_rate_of_zero_at_the_start_keeps_moments_and_clipping():
  """Torch's AdamW with its own group, whose rate is 0 at first (DINOv2)."""
  optimizer = optimizers.adam(
    lambda _: LR,
    SETTING,
    weight_decay=0.3,
    clip_norm=2.0,
    rules=(('head/last/.*', dict(lr_after='1 epochs')),),
  )
  history, _ = ours(optimizer)
  tensors = {
    path: torch.tensor(leaf, dtype=torch.float64, requires_grad=True)
    for path, leaf in tree.flatten(params()).items()
  }
  groups = [dict(params=[t], path=path) for path, t in tensors.items()]
  adam, expected = torch.optim.AdamW(groups, lr=LR, weight_decay=0.3), []
  for step in range(STEPS):
    for path, gradient in tree.flatten(gradients(step)).items():
      tensors[path].grad = torch.tensor(gradient).double()
    torch.nn.utils.clip_grad_norm_(tensors.values(), 2.0)
    for group in adam.param_groups:
      late = group['path'].startswith('head') and step < START
      group['lr'] = 0.0 if late else LR
    adam.step()
    expected.append({k: t.detach().numpy().copy() for k, t in tensors.items()})
  assert_close(history, expected)


def test_gradients_of_delayed_parameters_are_ignored():
  """They do not count in the global norm for clipping, either."""

  def given(step, late=1e6):
    grads = gradients(step)
    grads['head']['last']['kernel'] *= late if step < START else 1
    return grads

  optimizer = optimizers.sgd(
    lambda _: LR, SETTING, clip_norm=1.0, weight_decay=0.1, rules=RULES
  )
  large, _ = ours(optimizer, given)
  small, _ = ours(optimizer, lambda step: given(step, 0.0))
  for one, other in zip(large, small, strict=True):
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize('start, end', [(0.04, 0.4), (0.0, 0.2), (0.3, 0.0)])
def test_decay_follows_half_a_cosine(start, end):
  """The reference is torch's AdamW with its decay set before every step."""
  schedule = [
    end + (start - end) * (1 + math.cos(math.pi * step / STEPS)) / 2
    for step in range(STEPS)
  ]
  optimizer = optimizers.adam(
    lambda _: LR, SETTING, weight_decay=start, weight_decay_end=end
  )
  assert_close(ours(optimizer)[0], torchs(lambda step: schedule[step]))
  for step in (0, 1, 4, 8, 9, 12):
    done = min(step / STEPS, 1)
    value = end + (start - end) * (1 + np.cos(np.pi * done)) / 2
    assert float(cosine(start, end, STEPS)(step)) == pytest.approx(value, 1e-5)


def test_lamb_adapts_parameters_whose_decay_starts_at_zero():
  """The first update, 0.1, is multiplied by |parameter| / |direction| = 2."""
  given = {'head': {'kernel': jnp.full((2, 2), 2.0)}}
  optimizer = optimizers.lamb(
    lambda _: 0.1,
    optimizers.Setting(lambda _: 10),
    weight_decay=0.0,
    weight_decay_end=0.2,
  )
  ones = jax.tree.map(jnp.ones_like, given)
  update = jax.jit(optimizer.update)
  updates, _ = update(ones, optimizer.init(given), given)
  np.testing.assert_allclose(updates['head']['kernel'], -0.2, rtol=1e-5)


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


@pytest.mark.slow
@pytest.mark.parametrize('name', ['adam', 'sgd'])
def test_decay_masks(name):
  """Layer axes, and head axes of biases, are not counted as axes."""
  ones = tree.unflatten({path: jnp.ones(shape) for path, shape, *_ in MASKED})
  zeros = jax.tree.map(jnp.zeros_like, ones)
  for mask, column in (('all', None), ('kernels', 2), ('tensors', 3)):
    optimizer = getattr(optimizers, name)(
      lambda _: 0.1, weight_decay=0.5, decay_mask=mask
    )
    updates, _ = optimizer.update(zeros, optimizer.init(ones), ones)
    for row in MASKED:
      decays = column is None or row[column]
      leaf = tree.flatten(updates)[row[0]]
      np.testing.assert_allclose(leaf, -0.05 * decays, rtol=1e-6)
