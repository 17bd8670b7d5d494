"""Tests that attention is drawn at its position in the photograph."""

import re

import numpy as np
import pytest
from sample_images import encode, noise, smooth

from vit_jax.analysis import gallery, plotting
from vit_jax.analysis.figures import Findings
from vit_jax.analysis.gallery import Photograph, Photographs
from vit_jax.data.augment.transforms import EvalTransform

CENTRE = EvalTransform((32, 32), resize='central', central_fraction=0.5)


def findings(count, grid=(4, 4)):
  """Returns attention of random images."""
  weights = np.random.default_rng(0).random((count, *grid))
  return Findings(
    {
      'images': noise(32 * count, 32).reshape(count, 32, 32, 3),
      'distance': np.ones((count, 2, 1)),
      'rollout': weights,
      'rollout_plain': weights,
      'heads': weights[:, None],
    },
    [],
    True,
  )


def test_masks_are_at_the_position_of_the_patch():
  """The brightest part lies where the patch was cut from the photograph."""
  grey = np.full((80, 160, 3), 128, np.uint8)
  (photograph,) = Photographs([encode(grey, '.png')], CENTRE)
  # The centre has half of the shorter side: rows 20 to 60, columns 60 to 100.
  np.testing.assert_allclose(photograph.box, (20, 60, 40, 40))
  assert not photograph.whole
  weights = np.zeros((4, 4))
  weights[1, 2] = 1  # rows 30 to 40, columns 80 to 90
  masked = photograph.masked(weights)
  assert masked.shape == grey.shape
  y, x = np.unravel_index(masked[20:60, 60:100, 0].argmax(), (40, 40))
  assert abs(20 + y - 34.5) <= 1 and abs(60 + x - 84.5) <= 1
  outside = np.ones((80, 160), bool)
  outside[20:60, 60:100] = False
  assert (masked[outside] == 255).all() and masked[~outside].max() <= 128


def test_whole_photographs_keep_their_resolution():
  """A squashed photograph is masked as a whole, at its own size."""
  image = smooth(30, 90)
  (photograph,) = Photographs([encode(image, '.png')], EvalTransform((32, 32)))
  np.testing.assert_array_equal(photograph.pixels, image)
  assert photograph.whole
  uniform = photograph.masked(np.ones((4, 4)))
  np.testing.assert_array_equal(uniform, image)


def test_all_photographs_are_drawn():
  """Each is drawn once, with its name, on the page of its index."""
  names = [f'{index}.png' for index in range(19)]
  sizes = [(10 + index, 20) for index in range(19)]
  images = [smooth(*size) for size in sizes]
  photographs = Photographs(images, EvalTransform((32, 32)), names)
  found = findings(19)
  pages = list(gallery.rollouts(found, photographs))
  drawn = [
    [
      (axes.get_xlabel(), axes.images[0].get_array().shape[:2])
      for axes in page.axes
      if axes.get_xlabel().endswith('.png')
    ]
    for page in pages
  ]
  assert [len(page) for page in drawn] == [16, 3]
  expected = list(zip(names, sizes, strict=True))
  assert [each for page in drawn for each in page] == expected
  maps = [
    axes.images[0].get_array()
    for page in pages
    for axes in page.axes[2::4]  # after the image and the masked image
    if axes.images
  ]
  np.testing.assert_array_equal(np.stack(maps), found.arrays['rollout'])


@pytest.mark.parametrize('name', plotting.FORMATS)
def test_formats(name):
  """PDF has all pages in one file; vector formats keep the resolution."""
  photograph = Photograph.of_input(noise(300, 400))
  pages = [*gallery.heads(findings(1), [photograph])] * 2
  contents = plotting.encode(pages, plotting.Format(name, dpi=30))
  assert len(contents) == (1 if name == 'pdf' else 2)
  start = {'png': b'\x89PNG', 'pdf': b'%PDF', 'svg': b'<?xml'}[name]
  assert all(content.startswith(start) for content in contents)
  if name == 'pdf':
    assert len(re.findall(rb'/Type /Page\b', contents[0])) == 2
    assert b'/Width 400' in contents[0] and b'/Height 300' in contents[0]
