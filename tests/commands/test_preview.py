"""Tests of the images that preview draws."""

import cv2
import numpy as np
import pytest
from minimal_config import completed

from vit_jax import preview
from vit_jax.errors import UserError


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
  shown = preview.run_evaluation(config, 'val', 32)
  assert '/val, 6 examples, 2 classes' in caplog.text
  assert [lines for _, lines in shown] == [['cat']] * 2 + [['dog']] * 3
  assert all((pixels == 200).all() for pixels, _ in shown)
  preview.draw(shown, str(tmp_path / 'grid.png'))
  drawn = cv2.imread(str(tmp_path / 'grid.png'))
  count = (drawn == 200).all(-1).sum()
  assert count == pytest.approx(5 * 130 * 130, rel=0.2)  # enlarged
  with pytest.raises(UserError, match="did you mean 'val'"):
    preview.run_evaluation(config, 'vla', 32)
  preview.run_evaluation(config, 'other', 32)
  assert '3 examples, 2 classes' in caplog.text.splitlines()[-1]


def test_preview_of_training_images():
  """They are those of the step, with both classes of mixed images."""
  config = completed(
    source={'name': 'synthetic', 'num_examples': 64, 'num_classes': 10},
    **{'mix.mixup': 1.0},
  )
  first = preview.run(config, 12, 0)
  later = preview.run(config, 4, 1)
  assert len(first) == 12 and max(len(lines) for _, lines in first) == 2
  for (one, _), (other, _) in zip(first[8:], later, strict=True):
    np.testing.assert_array_equal(one, other)
