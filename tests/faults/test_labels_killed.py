"""Tests of `pseudo_label` after SIGKILL."""

import numpy as np
import pytest
import tiny_vit

from tests import cli

SOURCE = dict(num_examples=1600, num_classes=3, height=8, width=8)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_killed_labelling_writes_the_same_file(tmp_path):
  """Parts that were written before are not computed again."""
  weights = str(tmp_path / 'weights.npz')
  tiny_vit.save_classifier(weights)
  keys = [f'--config.source.{key}={value}' for key, value in SOURCE.items()]
  arguments = cli.command(
    'pseudo_label',
    f'--checkpoint={weights}',
    '--dataset=synthetic',
    '--split=train',
    '--batch_size=8',
    '--part_examples=8',
    '--min_confidence=0.35',
    '--per_class=500',
    *keys,
  )
  plain, killed = tmp_path / 'plain.npz', tmp_path / 'killed.npz'
  cli.run([*arguments, f'--out={plain}'])
  parts = killed.with_name('killed.npz.parts')
  again = [*arguments, f'--out={killed}']
  cli.kill_when(
    again, lambda: len([*parts.glob('*.npz')]) >= 3, 'a labelling', 120
  )
  before = len([*parts.glob('*.npz')])
  assert not killed.exists() and 3 <= before < 200
  _, log = cli.run(again)
  assert f'after {8 * before} of 1600 examples' in log
  with np.load(plain) as expected, np.load(killed) as found:
    assert [*found] == [*expected] and len(expected['index'])
    for key in found:
      np.testing.assert_array_equal(found[key], expected[key])
  assert not parts.exists()
