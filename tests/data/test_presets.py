"""Tests of preprocessing presets against the code of their projects."""

import numpy as np
import pytest
from minimal_config import completed
from pillow_files import saved
from sample_images import noise

from benchmarks import preprocessing as originals
from vit_jax.data.augment import presets
from vit_jax.data.augment.transforms import EvalTransform
from vit_jax.errors import UserError

# Tolerances in grey levels: OpenCV rounds in fixed point, big_vision truncates.
LARGEST = {'vit': 0.85, 'big_vision': 1.1, 'timm': 0, 'dino': 0, 'mae': 0}


def picture(height, width):
  """Returns an image of noise and waves, some of which alias."""
  y, x = np.mgrid[:height, :width]
  waves = [np.sin(x * y / 500), np.sin((x + y) / 3), np.cos(y / 40)]
  return np.uint8(np.stack(waves, -1) * 90 + 128 + noise(height, width) / 8)


@pytest.mark.parametrize('size', [224, 384])
@pytest.mark.parametrize('name', presets.PRESETS)
def test_each_preset_equals_its_project(name, size):
  """Normalized pixels of wide and tall images agree, in grey levels."""
  for shape in [(480, 641), (707, 455), (449, 449)]:
    levels = originals.difference(name, picture(*shape), size)
    assert levels.max() <= LARGEST[name] + 1e-3, shape
    assert levels.shape == (size, size, 3)
  section = presets.section(name, (size, size))
  whole = name == 'vit' or (name, size) == ('mae', 384)
  assert (section.get('central_fraction', 1) == 1) == whole


def test_presets_of_encoded_files_equal_pillow():
  data = saved(originals.pillow_image(picture(300, 401)), 'JPEG', quality=85)
  for name in ('timm', 'dino', 'mae'):
    assert originals.difference(name, data, 224).max() < 1e-3


def test_a_config_uses_a_preset():
  """The config contains the keys of the preset; given keys override them."""
  section = presets.section('mae', (8, 8), interpolation='area')
  preset = dict(resize='torchvision', central_fraction=8 / 9)
  stored = completed(preprocess=section).preprocess.to_dict()
  assert stored | preset | dict(interpolation='area') == stored
  assert EvalTransform((8, 8), **section).interpolation == 'area'
  with pytest.raises(UserError, match="'may'.*'mae'"):
    presets.section('may', (8, 8))
