"""Tests of reconstructions of masked patch prediction."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_vit import SIZES

from tests.faults.counts import further
from vit_jax.models.vit import Model
from vit_jax.objectives import masked_patch, supervised
from vit_jax.objectives.contract import Setting

SIZE, GRID, SIDE, KEY = (8, 12), (2, 3), 4, jax.random.key(1)
SETTING = Setting(Model(0, **SIZES | dict(depth=1)), SIZE)


def of_target(target, **head):
  """Returns an objective, images, and pictures for a head with this bias."""
  of = masked_patch.Objective(SETTING, target=target)
  images = np.random.default_rng(0).integers(0, 256, (3, *SIZE, 3), np.uint8)
  batch = {'image': jnp.asarray(images)}
  params, _ = of.init(KEY, batch)
  bias = params['head']['bias']
  params['head']['bias'] = jnp.asarray(head['bias'](len(bias)), bias.dtype)
  pictures = jax.jit(of.reconstruct)(params, batch, KEY)
  return of, images, {k: np.asarray(v) for k, v in pictures._asdict().items()}


@pytest.mark.slow
@pytest.mark.parametrize(
  'target, cells', [('small_patch', 4), *further(['mean_color', 1])]
)
def test_the_most_likely_colour_of_each_cell_is_drawn(target, cells):
  """The picture's own classes are the chosen ones."""
  chosen = 37 * np.arange(1, cells**2 + 1) % 512

  def bias(size):
    values = np.zeros((cells**2, 512))
    values[np.arange(cells**2), chosen] = 1
    assert size == values.size
    return values.ravel()

  _, _, pictures = of_target(target, bias=bias)
  pixels = np.round(pictures['predicted'] * 255).astype(np.uint8)
  found = masked_patch.colors(jnp.asarray(pixels), GRID, cells)
  np.testing.assert_array_equal(found, np.broadcast_to(chosen, found.shape))
  first = chosen[0]
  levels = [first // 64, first // 8 % 8, first % 8]
  np.testing.assert_allclose(
    pictures['predicted'][0, 0, 0], (np.array(levels) + 0.5) / 8
  )


@pytest.mark.slow
def test_predicted_pixels_and_visible_patches_are_drawn():
  """Corrupted patches are predicted, hidden or not; hidden ones are grey."""
  ramp = np.linspace(-1, 1, SIDE * SIDE * 3)
  of, images, pictures = of_target('pixels', bias=lambda size: ramp)
  patch = ramp.reshape(SIDE, SIDE, 3) / 2 + 0.5
  np.testing.assert_allclose(
    pictures['predicted'], np.tile(patch, (3, *GRID, 1)), atol=1e-6
  )
  places, hidden, _ = of._corrupt(jnp.asarray(images), KEY)
  taken = np.zeros(hidden.shape, bool)
  np.put_along_axis(taken, np.asarray(places), True, axis=1)
  assert hidden.any() and (taken & ~np.asarray(hidden)).any()
  shown = images / 255
  for image in range(3):
    for patch in range(6):
      y, x = SIDE * (patch // 3), SIDE * (patch % 3)
      box = np.s_[image, y : y + SIDE, x : x + SIDE]
      corrupted = taken[image, patch]
      expected = pictures['predicted'] if corrupted else shown
      np.testing.assert_allclose(
        pictures['completed'][box], expected[box], atol=1e-6
      )
      if hidden[image, patch]:
        assert (pictures['seen'][box] == 0.5).all()
      elif not corrupted:
        np.testing.assert_allclose(pictures['seen'][box], shown[box], atol=1e-6)
  assert places.shape == (3, 3)


def test_other_objectives_have_no_reconstructions():
  of = supervised.Objective(Setting(Model(5, **SIZES), SIZE))
  assert of.reconstructs == ''
