"""Tests of python -m vit_jax.analyze on a weight file, at any resolution."""

import cv2
import numpy as np
import pytest
from etils import epath
from sample_images import encode, smooth
from tiny_vit import SIZES, noise_params

from vit_jax import analyze
from vit_jax.analysis import figures, plotting
from vit_jax.analyze import Request
from vit_jax.errors import UserError
from vit_jax.models.vit import Model
from vit_jax.weights.formats import npz

FIGURES = (
  'attention_distance components filters heads positions rollout'.split()
)


@pytest.fixture(scope='module')
def weights(tmp_path_factory):
  """Writes an .npz in the official format for 12 px images, and two images."""
  folder = tmp_path_factory.mktemp('analyze')
  model = Model(5, **SIZES | dict(num_heads=1), pool='token')
  params = noise_params(model, (12, 12))
  npz.save(str(folder / 'small.npz'), params, None)
  for name, size in (('a.png', (30, 20)), ('b.png', (24, 24))):
    (folder / name).write_bytes(encode(smooth(*size), '.png'))
  (folder / 'c.png').write_text('no image')
  return folder, params


@pytest.mark.slow
def test_analyze_accepts_another_resolution(weights, tmp_path):
  folder, params = weights
  files = [str(folder / name) for name in ('a.png', 'b.png')]
  out = epath.Path(tmp_path / 'figures')
  path = str(folder / 'small.npz')
  request = Request(images=files, image_size=(20, 20))
  found = analyze.run(path, out, request)
  assert found.missing == []
  assert found.arrays['images'].shape == (2, 20, 20, 3)
  assert found.arrays['similarity'].shape == (5, 5, 5, 5)
  saved = np.load(out / 'figures.npz')
  for name, array in found.arrays.items():
    np.testing.assert_array_equal(saved[name], array)
  kernel = np.asarray(params['embedding']['kernel'])
  filters, _ = figures.components(kernel)
  np.testing.assert_allclose(saved['filters'], filters, atol=1e-5)
  pictures = list(out.glob('*.png'))
  assert sorted(path.stem for path in pictures) == FIGURES
  for path in pictures:
    assert min(cv2.imread(str(path)).shape[:2]) > 100


@pytest.mark.slow
def test_all_files_are_drawn_in_the_given_format(weights, tmp_path):
  """The attention of more images is kept than of an evaluation split."""
  folder, _ = weights
  out = epath.Path(tmp_path / 'figures')
  out.mkdir()
  (out / 'figures.json').write_text('{}')  # describes PNG files
  files = [str(folder / name) for name in ('a.png', 'b.png')] * 5
  path, request = str(folder / 'small.npz'), Request(images=files)
  found = analyze.run(path, out, request, plotting.Format('pdf', 50))
  for name in ('images', 'rollout', 'rollout_plain', 'heads', 'components'):
    assert len(found.arrays[name]) == 10, name
  assert sorted(path.stem for path in out.glob('*.pdf')) == FIGURES
  assert not [*out.glob('*.png')] and (out / 'figures.npz').exists()
  assert (out / 'figures.json').read_text() == '{}'


def test_messages_of_invalid_requests(weights, tmp_path):
  folder, _ = weights
  path, out = str(folder / 'small.npz'), epath.Path(tmp_path)
  for name, size, message in (
    (None, None, '--images'),
    ('c.png', None, 'c.png'),
    ('a.png', (18, 18), '18.*patches of 4 pixels'),
  ):
    files = [str(folder / name)] if name else []
    request = Request(images=files, image_size=size)
    with pytest.raises(UserError, match=message):
      analyze.run(path, out, request)
  with pytest.raises(UserError, match='--out'):
    analyze._output_directory(path, None)
  assert list(out.iterdir()) == []
  with pytest.raises(UserError, match='none.npz'):
    analyze._output_directory(str(folder / 'none.npz'), None)
