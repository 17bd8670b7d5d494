"""Tests of optimizers and averaged weights against formulas and torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from vit_jax.arrays import tree
from vit_jax.optim import average as average_lib
from vit_jax.optim import optimizers
from vit_jax.optim.schedule import make_schedule

STEPS = 12


@pytest.fixture
def params():
  rng = np.random.default_rng(0)
  return {
    'fc': {
      'kernel': rng.normal(size=(3, 4)).astype(np.float32),
      'bias': rng.normal(size=4).astype(np.float32),
    },
    'norm': {'scale': rng.normal(size=4).astype(np.float32)},
  }


def gradients(params, step):
  """Returns gradients of changing size, the same for every optimizer."""
  rng = np.random.default_rng([1, step])
  return jax.tree.map(
    lambda p: (rng.normal(size=p.shape) * 2.0**step).astype(np.float32), params
  )


def run(optimizer, params, steps=STEPS):
  """Returns the parameters after some updates."""
  state = optimizer.init(params)
  update = jax.jit(optimizer.update)
  for step in range(steps):
    updates, state = update(gradients(params, step), state, params)
    params = jax.tree.map(jnp.add, params, updates)
  return params


def run_torch(make, schedule, params, steps=STEPS):
  """Runs torch's optimizer in float64; `make` gets a list of parameters."""
  leaves, structure = jax.tree.flatten(params)
  tensors = [torch.tensor(p, dtype=torch.float64) for p in leaves]
  optimizer = make(tensors)
  for step in range(steps):
    optimizer.param_groups[0]['lr'] = float(schedule(step))
    for tensor, gradient in zip(
      tensors, jax.tree.leaves(gradients(params, step)), strict=True
    ):
      tensor.grad = torch.tensor(gradient, dtype=torch.float64)
    optimizer.step()
  return jax.tree.unflatten(structure, [t.numpy() for t in tensors])


def assert_close(actual, expected, rtol=1e-5):
  jax.tree.map(
    # atol: values of order one are summed in float32
    lambda a, e: np.testing.assert_allclose(a, e, rtol=rtol, atol=1e-6),
    actual,
    expected,
  )


# Optimizers


@pytest.mark.parametrize(
  'b1, b2, eps, decay', [(0.9, 0.999, 1e-8, 0.0), (0.8, 0.95, 0.1, 0.3)]
)
def test_adam_equals_torch_adamw(params, b1, b2, eps, decay):
  """Decay is decoupled and multiplied by the learning rate, as in torch."""
  schedule = make_schedule(STEPS, lambda _: 3, base_lr=0.1, decay='cosine')
  keys = dict(b1=b1, b2=b2, eps=eps, weight_decay=decay)
  ours = run(optimizers.adam(schedule, **keys), params)
  theirs = run_torch(
    lambda p: torch.optim.AdamW(p, betas=(b1, b2), eps=eps, weight_decay=decay),
    schedule,
    params,
  )
  assert_close(ours, theirs)


@pytest.mark.parametrize('momentum', [0.0, 0.9])
def test_sgd_equals_torch(params, momentum):
  """Heavy-ball momentum, without dampening and Nesterov's lookahead."""
  schedule = make_schedule(STEPS, lambda _: 3, base_lr=0.01, decay='cosine')
  ours = run(optimizers.sgd(schedule, momentum=momentum), params)
  theirs = run_torch(
    lambda p: torch.optim.SGD(p, lr=1.0, momentum=momentum), schedule, params
  )
  assert_close(ours, theirs)


def test_sgd_decay_is_decoupled(params):
  """The decay does not enter the momentum: θ ← θ − lr (trace + λ θ)."""
  lr, momentum, decay = 0.01, 0.9, 0.3
  ours = run(
    optimizers.sgd(lambda _: lr, momentum=momentum, weight_decay=decay), params
  )
  theta = {k: v.astype(np.float64) for k, v in tree.flatten(params).items()}
  trace = {k: np.zeros_like(v) for k, v in theta.items()}
  for step in range(STEPS):
    for key, g in tree.flatten(gradients(params, step)).items():
      trace[key] = momentum * trace[key] + g
      theta[key] = theta[key] - lr * (trace[key] + decay * theta[key])
  assert_close(tree.flatten(ours), theta)


@pytest.mark.parametrize('clip_norm', [None, 0.5, 1e6])
def test_clip_by_global_norm(params, clip_norm):
  """All leaves shrink by one factor, and only if the norm is too large."""
  optimizer = optimizers.sgd(lambda _: 1.0, momentum=0.0, clip_norm=clip_norm)
  grads = gradients(params, 0)
  updates, _ = optimizer.update(grads, optimizer.init(params), params)
  norm = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
  factor = min(1, (clip_norm or np.inf) / norm)
  assert_close(updates, jax.tree.map(lambda g: -factor * g, grads))


def test_moment_dtype(params):
  """The first moment may be bfloat16; the second stays float32."""
  optimizer = optimizers.adam(lambda _: 0.1, moment_dtype='bfloat16')
  for path, leaf in tree.flatten(optimizer.init(params)).items():
    if '/mu/' in path:
      assert leaf.dtype == jnp.bfloat16, path
    elif '/nu/' in path:
      assert leaf.dtype == jnp.float32, path
  # bfloat16 has 8 bits: the direction is accurate to a few thousandths.
  full = run(optimizers.adam(lambda _: 0.1), params)
  low = run(optimizer, params)
  assert_close(low, full, rtol=2e-2)


# The average


def averaged(sequence, decay):
  """Returns the debiased average of a sequence of trees."""
  average = average_lib.init(sequence[0])
  update = jax.jit(average_lib.update, static_argnums=2)
  for params in sequence:
    average = update(average, params, decay)
  return average.mean


@pytest.mark.parametrize('decay', [0.5, 0.9, 0.99])
@pytest.mark.parametrize('length', [1, 2, 30])
def test_average_is_a_weighted_mean(decay, length):
  """The weights are decay^age, normalized to a sum of one."""
  rng = np.random.default_rng(2)
  values = rng.normal(5, 1, (length, 3, 2)).astype(np.float32)
  result = averaged([{'w': jnp.array(v)} for v in values], decay)
  weights = decay ** np.arange(length)[::-1]
  expected = np.average(values.astype(np.float64), axis=0, weights=weights)
  np.testing.assert_allclose(result['w'], expected, rtol=1e-5)
