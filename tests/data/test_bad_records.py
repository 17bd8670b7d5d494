"""Tests of bad records: error messages and deterministic replacement."""

import json

import numpy as np
import pytest
from indexed_source import assert_same, mesh_of, train

from tests import cli
from vit_jax.data.augment.transforms import TrainTransform
from vit_jax.data.pipeline import order, stream
from vit_jax.data.sources import synthetic
from vit_jax.errors import UserError

N, BATCH = 64, 8
BAD = (3, 17, 40)
SKIP = dict(on_bad_record='skip', max_bad_share=0.2)
WHOLE = synthetic.Source('train', num_examples=N, height=8, width=8)


class Damaged(synthetic.Source):
  """Synthetic records, some of which cannot be decoded."""

  def __init__(self):
    super().__init__('train', num_examples=N, height=8, width=8)

  def __getitem__(self, index):
    example = super().__getitem__(index)
    if index in BAD:
      example['image'] = b'no image'
    return example

  def where(self, index):
    return f'file{index}'


def batches_of(source, steps, devices=1, reader=SKIP, **options):
  return train(
    source,
    BATCH,
    steps,
    mesh=mesh_of(data=devices),
    transform=TrainTransform((8, 8)),
    seed=5,
    reader=stream.Reader(**reader),
    **options,
  )


def test_skip_is_a_function_of_the_position():
  """Replacements do not depend on mesh or restarts; each is reported once.

  Runs of earlier versions, which are resumed, had the same ones, except in
  mixtures.
  """
  seen, steps = [], 3 * N // BATCH
  straight = batches_of(
    Damaged(), steps, report=lambda source, record: seen.append(record)
  )
  assert sorted(r.index for r in seen) == sorted(BAD)
  assert {r.where for r in seen} == {f'file{i}' for i in BAD}
  assert_same(straight[7:12], batches_of(Damaged(), 5, devices=4, start=7))
  whole = batches_of(WHOLE, steps)
  indices = order.shuffled(np.arange(3 * N), N, 5).reshape(-1, BATCH)
  for ours, theirs, rows in zip(straight, whole, indices, strict=True):
    bad = np.isin(rows, BAD)
    np.testing.assert_array_equal(ours['replaced'] > 0, bad)
    np.testing.assert_array_equal(ours['image'][~bad], theirs['image'][~bad])
  replaced, labels = (
    np.concatenate([batch[key] for batch in straight])
    for key in ('replaced', 'label')
  )
  for position in np.flatnonzero(replaced).tolist():
    index = order.replacement(position, int(replaced[position]), N, 5)
    assert labels[position] == WHOLE[index]['label']


def test_too_many_bad_records_end_the_run():
  with pytest.raises(UserError, match='max_bad_share'):
    batches_of(Damaged(), N // BATCH, reader=SKIP | dict(max_bad_share=0.02))


@pytest.mark.slow
def test_bad_records_are_counted_and_listed_once(tmp_path):
  """A run over a folder with one broken file is trained and resumed."""
  import cv2

  for name in ('cat', 'dog'):
    (tmp_path / 'photos' / name).mkdir(parents=True)
    for i in range(16):
      pixels = np.random.default_rng(i).integers(0, 255, (40, 50, 3))
      cv2.imwrite(str(tmp_path / f'photos/{name}/{i}.jpg'), pixels)
  (tmp_path / 'photos/cat/3.jpg').write_bytes(b'broken')
  flags = {
    'model.width': 32,
    'model.depth': 1,
    'model.mlp_dim': 32,
    'model.num_heads': 2,
    'image_size': 32,
    'batch_size': 8,
    'log.every': '1 steps',
    'log.tensorboard': 'false',
    'reader.max_bad_share': 0.2,
    'checkpoint.every': '4 steps',
  }
  config = f'configs/folder.py:path={tmp_path}/photos'
  for total in ('8 steps', '12 steps'):
    arguments = cli.flags(config, tmp_path / 'run', flags | {'total': total})
    cli.run(cli.command('train', *arguments, '--allow_config_change'))
  lines = [r for r in cli.records(tmp_path / 'run') if 'loss' in r]
  assert sum(r['bad_records'] for r in lines) >= 2
  events = (tmp_path / 'run/events.jsonl').read_text().splitlines()
  bad = [e for e in map(json.loads, events) if e['event'] == 'bad_record']
  named = [(e['source'], e['where']) for e in bad]
  assert len(named) == len(set(named)) and named
  assert all('cat/3.jpg' in where for _, where in named)


def test_splits_of_synthetic_images_differ():
  """An evaluation on the training images would look like a good one."""
  first, same, other = (
    [synthetic.Source(split)[i]['image'] for i in range(4)]
    for split in ('train', 'train', 'test')
  )
  np.testing.assert_array_equal(first, same)
  assert all((a != b).any() for a, b in zip(first, other, strict=True))
