"""Tests of masked patch prediction against appendix B.1.2."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_vit import SIZES

from tests.faults.counts import further
from tests.objectives import torch_vit
from tests.objectives.tiny import (
  COUNT,
  GRID,
  KEY,
  SIDE,
  SIZE,
  batch,
  loss_of,
  noisy,
)
from vit_jax.models.vit import Model
from vit_jax.objectives.contract import Setting
from vit_jax.objectives.masked_patch import Objective, colors

MODEL = Model(0, **SIZES)


def objective(model=MODEL, size=SIZE, **keys):
  return Objective(Setting(model, size), **keys)


def run(of, params, examples):
  """Returns loss and gradients."""
  return jax.jit(jax.value_and_grad(loss_of, argnums=1), static_argnums=0)(
    of, params, examples, KEY
  )


def cut(images, side=SIDE):
  """Cuts images into `[n, patches, side, side, c]` by loops."""
  images = np.asarray(images)
  return np.stack(
    [
      images[:, y : y + side, x : x + side]
      for y in range(0, images.shape[1], side)
      for x in range(0, images.shape[2], side)
    ],
    axis=1,
  )


def seen_patches(of, examples, key=KEY):
  """Returns (which patches are corrupted, which hidden) and their pixels."""
  places, hidden, seen = jax.jit(of._corrupt)(examples['image'], key)
  corrupted = np.zeros(hidden.shape, bool)
  np.put_along_axis(corrupted, np.asarray(places), True, axis=1)
  return corrupted, np.asarray(hidden), cut(seen)


def classes_by_hand(patches, cells):
  """Computes classes `[n, patches, cells²]`: 3 bits of each channel's mean."""
  n, count, side = patches.shape[:3]
  parts = [cut(each, side // cells) for each in patches]  # of each image
  levels = np.mean(parts, axis=(3, 4)) // 32
  classes = 64 * levels[..., 0] + 8 * levels[..., 1] + levels[..., 2]
  return classes.astype(int)


def test_fractions_of_corrupted_patches():
  """Exactly half are corrupted: 80 % hidden, 10 % another, 10 % unchanged.

  Another patch is one of the same image that is not corrupted, uniformly
  chosen.
  """
  of, examples = objective(), batch(4200)
  corrupted, hidden, seen = seen_patches(of, examples)
  own = cut(examples['image'] / np.float32(127.5) - 1)
  assert corrupted.size > 1e5 and (corrupted.sum(1) == COUNT // 2).all()
  assert np.abs(corrupted.mean(0) - 0.5).max() < 5 * 0.5 / np.sqrt(4200)
  assert not (hidden & ~corrupted).any()
  assert not seen[hidden].any()
  same = np.isclose(seen, own, atol=1e-6).all((2, 3, 4))
  assert same[~corrupted].all()
  replaced = corrupted & ~hidden & ~same
  n = corrupted.sum()
  for share, got in ((0.8, hidden), (0.1, replaced)):
    deviation = np.sqrt(share * (1 - share) / n)
    assert abs(got.sum() / n - share) < 5 * deviation
  rows, at = np.nonzero(replaced)
  order = []
  for row, place in zip(rows[:500], at[:500], strict=True):
    equal = np.isclose(own[row], seen[row, place], atol=1e-6).all((1, 2, 3))
    (source,) = np.nonzero(equal)
    assert len(source) == 1 and not corrupted[row, source[0]]
    order.append(source[0])
  assert len(set(order)) == COUNT


@pytest.mark.slow
def test_classes_of_a_known_image():
  """Black, white, colours at the limits of their classes, and halves."""
  image = np.zeros((1, 8, 16, 3), np.uint8)
  image[0, :4, 4:8] = 255
  image[0, :4, 8:12] = (31, 32, 64)
  image[0, :4, 12:] = (223, 224, 192)
  image[0, 4:, :4, 0] = 200
  image[0, 4:, 4:6, 1] = 255  # half of the patch: 127.5
  image[0, 4:, 8:12] = (32, 32, 32)
  image[0, 4, 8] = (31, 32, 33)  # its mean of red is just below 32
  found = np.asarray(colors(jnp.array(image), (2, 4), 1))[0, :, 0]
  # Red, green and blue of each class, in octal.
  expected = 0o000, 0o777, 0o012, 0o676, 0o600, 0o030, 0o011, 0o000
  assert tuple(found) == expected
  examples = batch(3, (16, 16))['image']
  for side, cells in ((4, 1), (4, 4), (8, 4), (8, 2)):
    grid = (16 // side, 16 // side)
    np.testing.assert_array_equal(
      colors(examples, grid, cells), classes_by_hand(cut(examples, side), cells)
    )


def official(tensors, examples, corrupted, hidden, seen, target):
  """Computes the loss with a [mask] embedding in place of hidden patches."""
  model = tensors['model']
  n, kernel = len(seen), model['embedding']['kernel']
  pixels = torch.tensor(seen.reshape(n, COUNT, -1), dtype=torch.float64)
  x = pixels @ kernel.reshape(-1, kernel.shape[-1]) + model['embedding']['bias']
  mask = model['embedding']['bias'] + tensors['mask']
  x = torch.where(torch.tensor(hidden)[..., None], mask, x)
  x = torch.cat([model['cls'].expand(n, -1, -1), x], 1)
  x = x + model['position']['embedding']
  x = torch_vit.encoder(x, model['encoder'], gelu='tanh')[:, 1:]
  outputs = torch_vit.dense(x[torch.tensor(corrupted)], tensors['head'])
  own = cut(examples['image'])
  if target == 'pixels':
    expected = torch.tensor(own / 127.5 - 1)[torch.tensor(corrupted)]
    return ((outputs - expected.reshape(outputs.shape)) ** 2).mean()
  cells = {'mean_color': 1, 'small_patch': 4}[target]
  classes = torch.tensor(classes_by_hand(own, cells))[torch.tensor(corrupted)]
  return F.cross_entropy(outputs.reshape(-1, 512), classes.reshape(-1))


@pytest.mark.slow
@pytest.mark.parametrize(
  'target', ['mean_color', *further('small_patch', 'pixels')]
)
def test_loss_and_gradients_equal_the_paper(target):
  """Gradients agree to 1e-5 of their largest entry."""
  of, examples = objective(target=target), batch()
  params = noisy(of)
  found, grads = run(of, params, examples)
  tensors = torch_vit.leaves(params)
  state = seen_patches(of, examples)
  expected = official(tensors, examples, *state, target)
  expected.backward()
  assert float(found) == pytest.approx(expected.item(), rel=1e-5)
  torch_vit.assert_gradients(grads, tensors)


@pytest.mark.slow
def test_loss_does_not_depend_on_hidden_pixels():
  """Hidden patches are replaced by others of the same mean colour.

  Each is rotated by half a turn, which does not change its class.
  """
  of, examples = objective(), batch()
  params = noisy(of)
  _, hidden, _ = seen_patches(of, examples)
  own = cut(examples['image'])
  turned = np.where(hidden[:, :, None, None, None], own[:, :, ::-1, ::-1], own)
  images = turned.reshape(4, *GRID, SIDE, SIDE, 3).swapaxes(2, 3)
  images = jnp.array(images.reshape(4, *SIZE, 3))
  changed = np.asarray(images) != np.asarray(examples['image'])
  assert changed.any((1, 2, 3)).all()
  first, second = (
    run(of, params, {'image': each}) for each in (examples['image'], images)
  )
  jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.slow
def test_initial_predictions_are_uniform():
  """The [mask] embedding is not zero."""
  of, examples = objective(target='small_patch'), batch()
  params, extra = jax.jit(of.init)(KEY, examples)
  assert extra == {} and not params['head']['kernel'].any()
  assert params['head']['kernel'].shape == (16, 16 * 512)
  assert 0.005 < params['mask'].std() < 0.04


def pictures_of(target, bias):
  """Returns an objective, images, and pictures for a head with this bias."""
  of, examples = objective(target=target), batch(3)
  params = noisy(of)
  head = params['head']
  head['kernel'] *= 0
  assert head['bias'].size == np.size(bias)
  head['bias'] = jnp.float32(bias).ravel()
  return of, examples, jax.jit(of.reconstruct)(params, examples, KEY)


@pytest.mark.slow
@pytest.mark.parametrize(
  'target, cells', [('small_patch', 4), *further(['mean_color', 1])]
)
def test_the_most_likely_colour_of_each_cell_is_drawn(target, cells):
  """The picture's own classes are the chosen ones."""
  chosen = 37 * np.arange(1, cells**2 + 1) % 512
  bias = np.eye(512)[chosen]
  _, _, pictures = pictures_of(target, bias)
  pixels = jnp.round(pictures.predicted * 255).astype(jnp.uint8)
  found = colors(pixels, GRID, cells)
  np.testing.assert_array_equal(found, np.broadcast_to(chosen, found.shape))
  levels = np.array([chosen[0] // 64, chosen[0] // 8 % 8, chosen[0] % 8])
  np.testing.assert_allclose(pictures.predicted[0, 0, 0], (levels + 0.5) / 8)


@pytest.mark.slow
def test_predicted_pixels_and_visible_patches_are_drawn():
  """Corrupted patches are predicted, hidden or not; hidden ones are grey."""
  ramp = np.linspace(-1, 1, SIDE * SIDE * 3).reshape(SIDE, SIDE, 3)
  of, examples, pictures = pictures_of('pixels', ramp)
  corrupted, hidden, _ = seen_patches(of, examples)
  assert hidden.any() and (corrupted & ~hidden).any()
  shown = cut(examples['image'] / 255)
  own = np.broadcast_to(ramp / 2 + 0.5, shown.shape)
  completed = np.where(corrupted[..., None, None, None], own, shown)
  seen, near = cut(pictures.seen), dict(atol=1e-6)
  np.testing.assert_allclose(cut(pictures.predicted), own, **near)
  np.testing.assert_allclose(cut(pictures.completed), completed, **near)
  np.testing.assert_allclose(seen[~corrupted], shown[~corrupted], **near)
  assert (seen[hidden] == 0.5).all()
