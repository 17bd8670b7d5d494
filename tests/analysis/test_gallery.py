"""Tests of the grids of images, and of the formats of figures."""

import re

import numpy as np
import pytest

from vit_jax.analysis import figures, gallery, plotting
from vit_jax.analysis.figures import Findings


def findings(count, grid=(4, 4), size=(32, 32)):
  """Returns attention of random images."""
  rng = np.random.default_rng(0)
  weights = rng.random((count, *grid))
  return Findings(
    {
      'images': rng.integers(0, 256, (count, *size, 3), dtype=np.uint8),
      'distance': np.ones((count, 2, 1)),
      'rollout': weights,
      'rollout_plain': weights**2,
      'heads': weights[:, None],
    },
    [],
    True,
  )


def test_all_images_are_drawn_with_their_attention():
  """Each has a row, on the page of its index, whose cells are large enough."""
  names = [f'{"x" * 30}{index}.png' for index in range(11)]
  found = findings(11, size=(64, 32), grid=(4, 2))
  pages = list(gallery.all_figures(found, names)['rollout'])
  assert [len(page.axes) for page in pages] == [8 * 4, 3 * 4]
  cells = np.array([axes for page in pages for axes in page.axes])
  image, masked, rollout, plain = (
    np.stack([axes.images[0].get_array() for axes in column])
    for column in cells.reshape(11, 4).T
  )
  np.testing.assert_array_equal(image, found.arrays['images'])
  np.testing.assert_array_equal(rollout, found.arrays['rollout'])
  np.testing.assert_array_equal(plain, found.arrays['rollout_plain'])
  mask = figures.image_mask(rollout[3], (64, 32))[..., None]
  np.testing.assert_array_equal(masked[3], (mask * image[3]).astype(np.uint8))
  captions = [axes.get_xlabel() for axes in cells]
  assert captions[::4] == [f'…{name[-23:]}' for name in names]
  assert captions[2] == f'maximum {100 * rollout[0].max():.1f} %'
  pages[0].canvas.draw()
  widths = [axes.get_window_extent().width for axes in cells[: 8 * 4]]
  assert min(widths) > 100  # pixels of a PNG file


@pytest.mark.parametrize('name', plotting.FORMATS)
def test_formats(name):
  """PDF has all pages in one file; vector formats keep the resolution."""
  found = findings(1, size=(300, 400))
  pages = [*gallery.all_figures(found)['heads']] * 2
  contents = plotting.encode(pages, plotting.Format(name, dpi=30))
  assert len(contents) == (1 if name == 'pdf' else 2)
  start = {'png': b'\x89PNG', 'pdf': b'%PDF', 'svg': b'<?xml'}[name]
  assert all(content.startswith(start) for content in contents)
  if name == 'pdf':
    assert len(re.findall(rb'/Type /Page\b', contents[0])) == 2
    assert b'/Width 400' in contents[0] and b'/Height 300' in contents[0]


def test_components_of_two_patches_are_drawn():
  """There is one component, and all pictures need three."""
  tokens = np.random.default_rng(0).normal(size=(1, 1, 2, 8))
  found = findings(1, grid=(1, 2))
  found.arrays['components'] = figures.patch_components(tokens)
  components = found.arrays['components'][0, 0]  # [patches, 3]
  np.testing.assert_allclose(np.sort(components[:, 0]), [0, 1])
  np.testing.assert_allclose(components[:, 1:], 0, atol=1e-6)
  [page] = gallery.all_figures(found)['components']
  page.canvas.draw()
