"""Tests of the checksums of manifests and other JSON items."""

import contextlib
import json

import pytest
from etils import epath

from tests.checkpoint.states import ABOUT, restore, same, save, state
from tests.faults.counts import further
from vit_jax.checkpoint import Checkpointer, agreement, manifest, steps
from vit_jax.errors import UserError
from vit_jax.weights import pretrained

LEAVES = {
  'params/head/bias': [[10], 'float32', 123456789],
  'step': [[], 'int32', 4000000000],
}


def _flips(data: bytes):
  """Yields every version of the data with one bit flipped."""
  for position in range(len(data)):
    for bit in range(8):
      flipped = bytearray(data)
      flipped[position] ^= 1 << bit
      yield bytes(flipped)


@pytest.mark.parametrize('name', ['manifest', 'about', 'metrics'])
def test_any_flipped_bit_is_detected(tmp_path, name):
  """This holds for the manifest, class names and metrics."""
  step = epath.Path(tmp_path)
  sums = {'about': manifest.json_checksum(ABOUT)}
  origin = {'step': 120, 'run': 'a' * 32, 'seed': 0}
  content, read = {
    'manifest': (
      manifest.with_checksum({'leaves': LEAVES, 'sums': sums, **origin}),
      lambda: manifest.read(step),
    ),
    'about': (
      ABOUT,
      lambda: manifest.read_about(step, manifest.Manifest({}, sums)),
    ),
    'metrics': (
      manifest.with_checksum({'step': 120, 'val/accuracy': 0.75}),
      lambda: steps.read_metrics(step),
    ),
  }[name]
  file = step / name / ('metrics' if name == 'metrics' else 'metadata')
  file.parent.mkdir()
  file.write_text(json.dumps(content))
  written, seen = read(), 0
  for data in _flips(file.read_bytes()):
    file.write_bytes(data)
    try:
      assert read() == written
    except agreement.CorruptError:
      seen += 1
  assert seen > 0.98 * 8 * len(json.dumps(content))


@pytest.mark.slow
@pytest.mark.parametrize('item', ['about', *further('manifest')])
def test_a_step_with_a_damaged_item_is_not_used(tmp_path, item):
  """The manifest and class names are checked; the older step is restored."""
  save(tmp_path, 1, 2)
  file = tmp_path / '2' / item / 'metadata'
  old, new = {'manifest': ('"float32"', '"float33"'), 'about': ('cat', 'bat')}[
    item
  ]
  assert old in file.read_text()
  file.write_text(file.read_text().replace(old, new, 1))
  with pytest.raises(UserError, match='is damaged: the checksum'):
    pretrained.find(str(tmp_path))
  restored, step = restore(tmp_path)
  assert step == 1 and same(restored, state(1))
  assert (tmp_path / '2.bad').is_dir()


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
