"""Tests of runs of `configs/manifest.py` with several labels, and numbers."""

import json

import cv2
import numpy as np
import pytest

import vit_jax
from tests import cli
from tests.faults.counts import further

SMALL = cli.SMALL_FILES | {
  'image_size': 16,
  'model.variant': 'None',
  'mix.mixup': 0.2,
}
KINDS = {'labels': 'separator=|', 'numbers': 'numbers=age+size'}
LABELS = ['cat|dog', 'emu', '|', 'dog', 'emu|dog']


@pytest.fixture(scope='module')
def data(tmp_path_factory):
  """Writes 30 images, a list with labels, and one with numbers."""
  folder = tmp_path_factory.mktemp('lists')
  rng = np.random.default_rng(0)
  lists = {'labels': ['image,label,split'], 'numbers': ['image,age,size,split']}
  for i in range(30):
    pixels = rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)
    cv2.imwrite(str(folder / f'{i}.png'), pixels)
    split = 'train' if i < 20 else 'val'
    lists['labels'].append(f'{i}.png,{LABELS[i % 5]},{split}')
    lists['numbers'].append(f'{i}.png,{i},{1000 + i * i},{split}')
  for name, lines in lists.items():
    (folder / f'{name}.csv').write_text('\n'.join(lines))
  return folder


@pytest.fixture(scope='module')
def runs(data, tmp_path_factory):
  """Trains both kinds; returns their workdirs."""
  folder = tmp_path_factory.mktemp('runs')
  for kind, keys in KINDS.items():
    config = f'configs/manifest.py:path={data}/{kind}.csv,{keys}'
    cli.run(cli.command('train', *cli.flags(config, folder / kind, SMALL)))
    last = cli.lines(folder / kind)[-1]
    assert last['val/count'] == 10
  return folder


@pytest.mark.slow
@pytest.mark.parametrize('kind', further(*KINDS))
def test_two_processes_measure_like_one(runs, kind):
  """10 images in batches of 6."""
  one, two = cli.evaluated_by_one_and_two(runs / kind)
  assert one['count'] == 10
  for name in {*one} - {'checkpoint', 'data', 'preprocess'}:
    assert two[name] == pytest.approx(one[name], rel=1e-4), name


@pytest.mark.slow
def test_commands_of_both_kinds(data, runs, tmp_path):
  """Probabilities are those of a sigmoid; numbers have their units."""
  image = str(data / '29.png')
  for kind, unit in (('labels', 'probability'), ('numbers', 'number')):
    workdir = runs / kind
    command = cli.command('predict', f'--checkpoint={workdir}', '--json', image)
    top = json.loads(cli.run(command)[0])['top']
    found = {each['class']: each[unit] for each in top}
    out = tmp_path / kind
    command = cli.command('features', f'--checkpoint={workdir}', '--split=val')
    cli.run([*command, f'--out={out}'])
    features = vit_jax.read_features(str(out))
    assert features[kind].shape == (10, 3 if kind == 'labels' else 2)
    report = json.loads((workdir / 'report.json').read_text())
    captions = [entry['caption'] for entry in report['judged']['examples']]
    assert len(captions) == 10
    if kind == 'labels':
      assert found.keys() == {'cat', 'dog', 'emu'}
      assert all(0 < value < 1 for value in found.values())
      np.testing.assert_array_equal(features[kind][0], [1, 1, 0])
      assert captions[0][1] == 'is cat 1.00, dog 1.00'
      assert captions[2][1] == 'is none'
    else:
      assert [*found] == ['age', 'size']
      assert -30 < found['age'] < 60 and 500 < found['size'] < 2000
      np.testing.assert_array_equal(features[kind][0], [20, 1400])
      assert captions[0][1] == 'is age 20, size 1400'
    text = (workdir / 'report.html').read_text()
    assert 'Largest errors' in text and 'Confusion of classes' not in text
