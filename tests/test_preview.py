"""Captions of the preview."""

import numpy as np
import pytest

from vit_jax import preview

NAMES = ['a very long name of a class, indeed', 'dog', 'cow']


def test_shares_are_never_cut_off():
  """Names give way."""
  target = np.array([0.7, 0.3, 0.0])
  assert preview._caption(target, NAMES, 16) == ['a very long 0.70', 'dog 0.30']
  assert preview._caption(np.array([0.0, 1.0, 0.0]), NAMES, 16) == [
    'dog 1.00',
    '',
  ]
  assert preview._caption(np.array(0), NAMES, 16) == ['a very long name']


@pytest.mark.parametrize('mixed', [False, True])
def test_tiles_have_room_for_their_captions(mixed):
  """Every tile of a picture has the same size, and the last letter fits."""
  image = np.ones((32, 32, 3), np.float32)
  wide = ['n' * 50] * 2
  targets = [np.array(0), np.array(1)]
  if mixed:
    targets = [np.array([1.0, 0.0]), np.array([0.4, 0.6])]
  tiles = [preview._tile(image, target, wide) for target in targets]
  assert tiles[0].shape == tiles[1].shape == ((164 if mixed else 146), 128, 3)
  assert (tiles[1][:18] < 255).any() and (tiles[1][:18, -1] == 255).all()
