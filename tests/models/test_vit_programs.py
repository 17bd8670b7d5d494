"""Tests of rematerialization, unrolling and noise of one model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_vit import KEY, SIZES, images_of, noise_params

from tests.faults.counts import further
from vit_jax.models.vit import Model


def value_and_gradient(params, **settings):
  """Returns loss and gradient of a training step with these settings."""
  model = Model(5, **SIZES, dropout=0.2, drop_path=0.3, **settings)
  images = images_of(4, 8, 8)

  def loss(params):
    logits = model.apply({'params': params}, images, jax.random.key(7))
    return (logits * jnp.cos(jnp.arange(logits.size)).reshape(4, 5)).sum()

  return jax.jit(jax.value_and_grad(loss))(params)


@pytest.fixture(scope='module')
def baseline():
  """Returns parameters, and the results of the plain scan."""
  params = noise_params(Model(5, **SIZES), (8, 8))
  return params, value_and_gradient(params)


PROGRAMS = [  # without the plain ('none', 1); 2 does not divide the depth
  ('none', 2),
  ('none', 3),
  ('full', 1),
  ('full', 3),
  ('dots', 1),
  ('dots', 3),
]


@pytest.mark.slow
@pytest.mark.parametrize(
  'remat, unroll',
  [*PROGRAMS[2::3], *further(*map(list, (*PROGRAMS[:2], *PROGRAMS[3:5])))],
)
def test_remat_and_unrolling_give_the_same_gradients(remat, unroll, baseline):
  """Dropout masks are the same for each program.

  Another mask would change the loss by far more than rounding does.
  """
  params, (expected_loss, expected) = baseline
  loss, gradient = value_and_gradient(params, remat=remat, unroll=unroll)
  np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
  jax.tree.map(
    # atol: sums over tokens in another order, of terms of order one
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
    gradient,
    expected,
  )


@pytest.mark.slow
def test_dropout_masks_depend_on_the_key():
  """Without a key, nothing is dropped."""
  model = Model(5, **SIZES, dropout=0.2, drop_path=0.2)
  params = noise_params(model, (8, 8))
  apply = jax.jit(lambda key: model.apply({'params': params}, images, key))
  images = images_of(2, 8, 8)
  first, again = apply(jax.random.key(1)), apply(jax.random.key(1))
  np.testing.assert_array_equal(first, again)
  assert np.abs(first - apply(jax.random.key(2))).max() > 1e-2
  assert np.abs(first - apply(None)).max() > 1e-2
  without, plain = (
    jax.jit(each.apply)({'params': params}, images)
    for each in (model, Model(5, **SIZES))
  )
  np.testing.assert_array_equal(without, plain)


@pytest.mark.slow
def test_dropout_follows_the_position_embedding():
  """Layers are zero, so that only the dropout of the embedding remains."""
  model = Model(5, **SIZES, dropout=0.5)
  params = noise_params(model, (8, 8))
  params['encoder']['layers'] = jax.tree.map(
    jnp.zeros_like, params['encoder']['layers']
  )
  images = images_of(2, 8, 8)
  quiet = model.apply({'params': params}, images)
  assert (
    np.abs(model.apply({'params': params}, images, KEY) - quiet).max() > 0.1
  )
