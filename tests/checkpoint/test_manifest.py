"""Tests of the checksums of manifests and other JSON items."""

import contextlib
import json

import pytest
from etils import epath

from tests.checkpoint.states import ABOUT, state
from vit_jax.checkpoint import Checkpointer, agreement, manifest, steps

LEAVES = {
  'params/head/bias': [[10], 'float32', 123456789],
  'step': [[], 'int32', 4000000000],
}
SUMS = {'about': manifest.json_checksum(ABOUT)}
ORIGIN = {'step': 120, 'run': 'a' * 32, 'seed': 0}


@pytest.mark.parametrize(
  'file, content, read',
  [
    (
      'manifest/metadata',
      manifest.with_checksum({'leaves': LEAVES, 'sums': SUMS, **ORIGIN}),
      manifest.read,
    ),
    (
      'about/metadata',
      ABOUT,
      lambda step: manifest.read_about(step, manifest.Manifest({}, SUMS)),
    ),
    (
      'metrics/metrics',
      manifest.with_checksum({'step': 120, 'val/accuracy': 0.75}),
      steps.read_metrics,
    ),
  ],
)
def test_any_flipped_bit_is_detected(tmp_path, file, content, read):
  """This holds for the manifest, class names and metrics."""
  step = epath.Path(tmp_path)
  path = step / file
  path.parent.mkdir()
  path.write_text(json.dumps(content))
  data, written, detected = path.read_bytes(), read(step), 0
  for position in range(8 * len(data)):
    flipped = bytearray(data)
    flipped[position // 8] ^= 1 << position % 8
    path.write_bytes(flipped)
    try:
      assert read(step) == written
    except agreement.CorruptError:
      detected += 1
  assert detected > 0.98 * 8 * len(data)


@pytest.mark.slow
def test_a_history_that_changes_during_a_save(tmp_path, monkeypatch):
  """The step is not damaged by it."""
  history = {'interval': {'count': 1}}
  prepare = Checkpointer._prepare

  def change_and_prepare(self, step):
    history['interval']['count'] = 2  # after the checksum, before the writing
    prepare(self, step)

  monkeypatch.setattr(Checkpointer, '_prepare', change_and_prepare)
  with contextlib.closing(Checkpointer(tmp_path, ABOUT)) as checkpoints:
    assert checkpoints.save(1, state(1), {}, history)
  step = epath.Path(tmp_path) / '1'
  about = manifest.read_about(step, manifest.read(step))
  assert about['interval'] == {'count': 1}
