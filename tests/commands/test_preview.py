"""Tests of the captions and images of preview."""

import cv2
import numpy as np
import pytest
from minimal_config import completed

from vit_jax import preview
from vit_jax.errors import UserError
from vit_jax.training.reporting import caption

NAMES = ['a very long name of a class, indeed', 'dog', 'cow']


def test_captions_shorten_names_not_fractions():
  target = np.array([0.7, 0.3, 0.0])
  assert caption(target, NAMES, 16) == ['a very long 0.70', 'dog 0.30']
  assert caption(np.array([0.0, 1.0, 0.0]), NAMES, 16) == ['dog 1.00']
  assert caption(np.array(0), NAMES, 16) == ['a very long name']


def test_preview_of_an_evaluator(tmp_path, caplog):
  """It shows the evaluator's split and transform, without bad images."""
  caplog.set_level('INFO', 'vit_jax')
  for split, value, count in (('train', 0, 16), ('val', 200, 3)):
    for name in ('cat', 'dog'):
      (tmp_path / split / name).mkdir(parents=True)
      for number in range(count):
        pixels = np.full((8, 12, 3), value, np.uint8)
        pixels[:, :2] = pixels[:, -2:] = 100  # outside of the centre
        cv2.imwrite(str(tmp_path / split / name / f'{number}.png'), pixels)
  (tmp_path / 'val/cat/0.png').write_bytes(b'no image at all')
  config = completed(
    source={'name': 'folder', 'path': str(tmp_path)},
    evals={
      'val': {'name': 'classification', 'split': 'val'},
      'other': {
        'name': 'calibration',
        'split': 'val',
        'source': {'name': 'synthetic', 'num_examples': 3, 'num_classes': 2},
      },
    },
    reader={'on_bad_record': 'skip', 'max_bad_share': 0.5},
    preprocess={'resize': 'central', 'central_fraction': 1.0},
    num_classes=2,
  )
  picture = preview.run_evaluation(config, 'val', 32)
  assert 'val, 6 examples, 2 classes' in caplog.text
  shown = (picture == 200).all(-1).sum()
  assert shown == 5 * 128 * 128  # five images, each pixel enlarged 16 times
  with pytest.raises(UserError, match="did you mean 'val'"):
    preview.run_evaluation(config, 'vla', 32)
  preview.run_evaluation(config, 'other', 32)
  assert '3 examples, 2 classes' in caplog.text.splitlines()[-1]
