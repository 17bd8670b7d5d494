"""Tests of masked autoencoders against the authors' equations in torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
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
from vit_jax.arrays import sharding, tree
from vit_jax.models.vit import Model
from vit_jax.objectives import patches
from vit_jax.objectives.contract import Setting
from vit_jax.objectives.mae import Objective
from vit_jax.objectives.mixing import normalize

VISIBLE = 6
MAE_KEYS = dict(position='sincos2d_mae', gelu='exact', start_values='mae')
MODEL = Model(0, **SIZES, **MAE_KEYS)
DECODER = dict(width=24, depth=2, num_heads=3, mlp_dim=20, dtype='float32')
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def objective(model=MODEL, size=SIZE, **keys):
  return Objective(Setting(model, size), **dict(decoder=DECODER) | keys)


def order_of(of, examples, key=KEY):
  """Returns the visible patches, then the others, of each image."""
  return np.asarray(jax.jit(of._order)(examples, key))


def official(params, images, order, norm_pixels):
  """Computes predictions and target from the paper and the code's README."""
  model, decoder = params['model'], params['decoder']
  order = torch.tensor(order)
  n, pixels = len(images), torch.tensor(np.asarray(images, np.float64))
  x = torch_vit.embed(pixels / 127.5 - 1, model['embedding'], SIDE)
  x = x + torch_vit.sincos(*GRID, x.shape[-1])
  kept = order[:, :VISIBLE, None].expand(-1, -1, x.shape[-1])
  x = torch.cat([model['cls'].expand(n, -1, -1), x.gather(1, kept)], 1)
  x = torch_vit.encoder(x, model['encoder'])
  x = torch_vit.dense(x, decoder['embedding'])
  full = decoder['mask'].expand(n, COUNT, -1).clone()
  rows = torch.arange(n)[:, None]
  full[rows, order[:, :VISIBLE]] = x[:, 1:]
  full = full + torch_vit.sincos(*GRID, full.shape[-1])
  x = torch_vit.encoder(torch.cat([x[:, :1], full], 1), decoder['blocks'])
  predicted = torch_vit.dense(x[:, 1:], decoder['prediction'])
  target = (pixels / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
  target = torch_vit.patches(target, SIDE)
  if norm_pixels:
    mean = target.mean(-1, keepdim=True)
    variance = target.var(-1, keepdim=True)  # unbiased
    target = (target - mean) / (variance + 1e-6) ** 0.5
  return predicted, target


@pytest.mark.parametrize('norm_pixels', [True, *further(False)])
def test_loss_and_gradients_equal_the_authors(norm_pixels):
  """The mean over pixels, then over hidden patches.

  Gradients agree to 1e-5 of their largest entry.
  """
  of, examples = objective(norm_pixels=norm_pixels), batch()
  params, order = noisy(of), order_of(of, examples)
  compiled = jax.jit(jax.value_and_grad(loss_of, 1), static_argnums=0)
  found, grads = compiled(of, params, examples, KEY)
  tensors = torch_vit.leaves(params)
  images = examples['image']
  predicted, target = official(tensors, images, order, norm_pixels)
  errors = ((predicted - target) ** 2).mean(-1)
  expected = errors.gather(1, torch.tensor(order[:, VISIBLE:])).mean()
  expected.backward()
  assert float(found) == pytest.approx(expected.item(), rel=1e-5)
  torch_vit.assert_gradients(grads, tensors)


def test_hidden_patches_are_uniform():
  """Exactly three quarters are hidden; the key determines which."""
  of = objective()
  orders = order_of(of, batch(2000))
  assert (np.sort(orders, 1) == np.arange(COUNT)).all()
  hidden = np.asarray(of._is_hidden(jnp.asarray(orders)))
  assert (hidden.sum(1) == COUNT - VISIBLE).all()
  assert not np.take_along_axis(hidden, orders[:, :VISIBLE], 1).any()
  # The standard deviation of a fraction is √(.75 · .25 / 2000) = .0097.
  assert np.abs(hidden.mean(0) - 0.75).max() < 0.049
  # Pairs of patches are hidden independently.
  together = (hidden[:, :, None] & hidden[:, None]).mean(0)
  pair = 18 / 24 * 17 / 23
  off = together[~np.eye(COUNT, dtype=bool)]
  assert np.abs(off - pair).max() < 5.5 * np.sqrt(pair * (1 - pair) / 2000)
  again = order_of(of, batch(8))
  np.testing.assert_array_equal(again, order_of(of, batch(8)))
  assert (again != order_of(of, batch(8), jax.random.key(6))).any()


@pytest.mark.parametrize(
  'mask_ratio, visible', [(0.6, 9), (0.7, 7), (0.77, 5), (0.9, 2)]
)
def test_the_number_of_visible_patches_is_rounded_down(mask_ratio, visible):
  """Of 24 patches, as the authors' `int(L * (1 - mask_ratio))`."""
  of = objective(mask_ratio=mask_ratio)
  assert of.num_visible == visible == int(COUNT * (1 - mask_ratio))
  hidden = of._is_hidden(of._order(batch(), KEY))
  assert (hidden.sum(axis=1) == COUNT - visible).all()


@pytest.mark.slow
def test_masks_and_dropout_have_different_keys(monkeypatch):
  """Otherwise, hidden patches and dropped paths would be correlated."""
  of, keys = objective(), {}
  params = noisy(of)
  shuffled, encode = patches.shuffled, Objective._encode

  def record_masks(key, *args):
    keys['masks'] = jax.random.key_data(key).tolist()
    return shuffled(key, *args)

  def record_dropout(self, params, images, order, key):
    keys['dropout'] = jax.random.key_data(key).tolist()
    return encode(self, params, images, order, key)

  monkeypatch.setattr(patches, 'shuffled', record_masks)
  monkeypatch.setattr(Objective, '_encode', record_dropout)
  loss_of(of, params, batch(), KEY)
  assert keys['masks'] != keys['dropout']
  assert keys['dropout'] == jax.random.key_data(KEY).tolist()


STEM = dict(name='resnet', depths=(1,), width_factor=1)


@pytest.mark.slow
@pytest.mark.parametrize('keys', [{}, dict(patch_size=1, stem=STEM)])
def test_predictions_do_not_depend_on_hidden_pixels(keys):
  """Changing them changes only the target, also with a hybrid's stem.

  Its convolutions get zeros at hidden pixels.
  """
  of = objective(Model(0, **SIZES | MAE_KEYS | keys), (16, 16))
  examples = batch(2, (16, 16))
  params, order = noisy(of), of._order(examples, KEY)
  hidden = of._hidden_pixels(order)

  @jax.jit
  def run(is_changed):
    images = jnp.where(is_changed, 255 - examples['image'], examples['image'])
    tokens = of._encode(params['model'], normalize(images), order, None)
    return of._decode(params['decoder'], tokens, order)

  same = run(jnp.zeros_like(hidden))
  np.testing.assert_array_equal(same, run(hidden))
  assert np.abs(same - run(~hidden)).max() > 1e-2


@pytest.mark.slow
def test_initial_values_equal_the_authors():
  """Bounds and standard deviations of random values; zeros elsewhere."""
  sizes = SIZES | dict(width=64, mlp_dim=128, num_heads=4)
  model = Model(0, **sizes, **MAE_KEYS)
  of = objective(model, decoder=DECODER | dict(width=96, mlp_dim=160))
  params = tree.flatten(jax.jit(of.init)(KEY, batch())[0])
  d = 'decoder/blocks/layers/'
  for path, fan in (
    ('model/embedding/kernel', 48 + 64),
    ('model/encoder/layers/attention/value/kernel', 64 + 3 * 64),
    ('model/encoder/layers/attention/out/kernel', 64 + 64),
    ('decoder/embedding/kernel', 64 + 96),
    (f'{d}attention/query/kernel', 96 + 3 * 96),
    (f'{d}mlp/fc1/kernel', 96 + 160),
    ('decoder/prediction/kernel', 96 + 48),
  ):
    largest = np.abs(params[path]).max() / np.sqrt(6 / fan)
    assert 0.98 < largest <= 1, path
  for path in ('model/cls', 'decoder/mask'):
    assert 0.01 < params[path].std() < 0.03, path
  for path in ('model/embedding/bias', f'{d}attention/out/bias'):
    assert not np.any(params[path])
  assert 'model/position/embedding' not in params


def test_hidden_patches_are_the_same_on_a_mesh():
  """Bit for bit."""
  of, examples = objective(), batch(8)
  mesh = sharding.make_mesh(jax.devices(), data=2, fsdp=2, model=2)
  with jax.set_mesh(mesh):
    split = jax.device_put(examples, sharding.batch_sharding(mesh))
    order = jax.jit(of._order)(split, KEY)
  np.testing.assert_array_equal(order, order_of(of, examples))


@pytest.mark.slow
def test_reconstructions_show_visible_pixels():
  """Hidden patches are grey; predictions are converted to pixels."""
  of, examples = objective(), batch()
  params, order = noisy(of), order_of(of, examples)
  pictures = jax.jit(of.reconstruct)(params, examples, KEY)
  shown = np.asarray(examples['image']) / 255
  hidden = np.asarray(of._hidden_pixels(jnp.asarray(order)))
  tensors = torch_vit.leaves(params)
  predicted, _ = official(tensors, examples['image'], order, True)
  pixels = torch.tensor((shown - MEAN) / STD)
  cut = torch_vit.patches(pixels, SIDE)
  mean, variance = cut.mean(-1, keepdim=True), cut.var(-1, keepdim=True)
  expected = predicted * (variance + 1e-6) ** 0.5 + mean
  expected = expected.detach().numpy().reshape(4, *GRID, SIDE, SIDE, 3)
  expected = expected.swapaxes(2, 3).reshape(4, *SIZE, 3) * STD + MEAN
  expected = expected.clip(0, 1)
  for name, picture, near in (
    ('image', shown, 1e-6),
    ('seen', np.where(hidden, 0.5, shown), 1e-6),
    ('predicted', expected, 1e-4),
    ('completed', np.where(hidden, expected, shown), 1e-4),
  ):
    found = getattr(pictures, name)
    np.testing.assert_allclose(found, picture, atol=near, err_msg=name)


def test_other_channels_are_normalized_like_the_input():
  """The target has the mean and std of the model; pictures are RGB."""
  mean, std = (0.1, 0.2, 0.3, 0.4), (0.05, 0.1, 0.15, 0.2)
  model = Model(0, **SIZES, **MAE_KEYS, channels=4, mean=mean, std=std)
  of = objective(model, norm_pixels=False)
  rng = np.random.default_rng(0)
  images = rng.integers(0, 65536, (2, *SIZE, 4)).astype(np.uint16)
  target, _ = of._target(jnp.asarray(images))
  pixels = jnp.asarray((images / 65535 - mean) / std, jnp.float32)
  expected = patches.cut(pixels, of.grid)
  np.testing.assert_allclose(target, expected, rtol=1e-4, atol=1e-4)
  pictures = jax.eval_shape(of.reconstruct, noisy(of), {'image': images}, KEY)
  assert {each.shape for each in pictures} == {(2, *SIZE, 3)}
