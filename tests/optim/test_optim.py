"""Tests of optimizers and averaged weights against formulas and torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from updates import (
  STEPS,
  assert_close,
  gradients,
  parameters,
  run,
  run_torch,
)

from vit_jax.arrays import tree
from vit_jax.optim import average as average_lib
from vit_jax.optim import optimizers
from vit_jax.optim.schedule import make_schedule

PARAMS = parameters('fc/kernel', 'norm/scale')
SCHEDULE = make_schedule(12, lambda _: 3, base_lr=0.05, decay='cosine')


def set_rate(optimizer, step):
  for group in optimizer.param_groups:
    group['lr'] = float(SCHEDULE(step))


@pytest.mark.parametrize(
  'b1, b2, eps, decay', [(0.9, 0.999, 1e-8, 0.0), (0.8, 0.95, 0.1, 0.3)]
)
def test_adam_equals_torch_adamw(b1, b2, eps, decay):
  """Decay is decoupled and multiplied by the learning rate, as in torch."""
  keys = dict(eps=eps, weight_decay=decay)
  ours, _ = run(optimizers.adam(SCHEDULE, b1=b1, b2=b2, **keys), PARAMS)
  theirs = run_torch(
    lambda groups: torch.optim.AdamW(groups, betas=(b1, b2), **keys),
    PARAMS,
    set_rate,
  )
  assert_close(ours, theirs)


@pytest.mark.parametrize('momentum', [0.0, 0.9])
def test_sgd_equals_torch(momentum):
  """Heavy-ball momentum, without dampening and Nesterov's lookahead."""
  ours, _ = run(optimizers.sgd(SCHEDULE, momentum=momentum), PARAMS)
  theirs = run_torch(
    lambda groups: torch.optim.SGD(groups, lr=1.0, momentum=momentum),
    PARAMS,
    set_rate,
  )
  assert_close(ours, theirs)


def test_sgd_decay_is_decoupled():
  """The decay does not enter the momentum: θ ← θ − lr (trace + λ θ)."""
  lr, momentum, decay = 0.01, 0.9, 0.3
  optimizer = optimizers.sgd(
    lambda _: lr, momentum=momentum, weight_decay=decay
  )
  theta, trace = np.float64(PARAMS['fc']['kernel']), 0.0
  for step, found in enumerate(run(optimizer, PARAMS)[0]):
    trace = momentum * trace + gradients(PARAMS, step)['fc']['kernel']
    theta = theta - lr * (trace + decay * theta)
    np.testing.assert_allclose(found['fc/kernel'], theta, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('clip_norm', [None, 0.5, 1e6])
def test_clip_by_global_norm(clip_norm):
  """All leaves shrink by one factor, and only if the norm is too large."""
  optimizer = optimizers.sgd(lambda _: 1.0, momentum=0.0, clip_norm=clip_norm)
  grads = gradients(PARAMS, 0)
  updates, _ = optimizer.update(grads, optimizer.init(PARAMS), PARAMS)
  norm = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
  factor = min(1, (clip_norm or np.inf) / norm)
  expected = jax.tree.map(lambda g: -factor * g, grads)
  assert_close([tree.flatten(updates)], [tree.flatten(expected)])


def test_moment_dtype():
  """The first moment may be bfloat16; the second stays float32."""
  low, state = run(
    optimizers.adam(lambda _: 0.1, moment_dtype='bfloat16'), PARAMS
  )
  dtypes = {
    moment: {
      v.dtype.name for k, v in tree.flatten(state).items() if moment in k
    }
    for moment in ('/mu/', '/nu/')
  }
  assert dtypes == {'/mu/': {'bfloat16'}, '/nu/': {'float32'}}
  # bfloat16 has 8 bits, which is the error of each update of about 0.1.
  full, _ = run(optimizers.adam(lambda _: 0.1), PARAMS)
  assert_close(low, full, rtol=0, atol=STEPS * 0.1 * 2**-8)


@pytest.mark.parametrize('decay', [0.5, 0.9, 0.99])
@pytest.mark.parametrize('length', [1, 2, 30])
def test_average_is_a_weighted_mean(decay, length):
  """The weights are decay^age, normalized to a sum of one."""
  rng = np.random.default_rng(2)
  values = rng.normal(5, 1, (length, 3, 2)).astype(np.float32)
  average = average_lib.init({'w': jnp.array(values[0])})
  update = jax.jit(average_lib.update, static_argnums=2)
  for value in values:
    average = update(average, {'w': jnp.array(value)}, decay)
  weights = decay ** np.arange(length)[::-1]
  expected = np.average(values.astype(np.float64), axis=0, weights=weights)
  np.testing.assert_allclose(average.mean['w'], expected, rtol=1e-5)
