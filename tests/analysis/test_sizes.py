"""Tests of plots of the last results over the number of training examples."""

import io
import json

import numpy as np
import pytest
from etils import epath
from PIL import Image

from vit_jax import analyze
from vit_jax.analysis import plotting, runs, sizes
from vit_jax.errors import UserError

VIT = {'name': 'vit', 'depth': 3, 'patch_size': 4}


def run(path, examples, model, *values):
  path.mkdir()
  config = {'batch_size': 8, 'train': {'num_examples': examples}}
  config |= {'model': model} if model else {}
  lines = [
    {'step': step, 'loss': 1.0, 'test/accuracy': value, 'test/count': 100}
    for step, value in enumerate(values)
  ]
  (path / 'config.json').write_text(json.dumps(config))
  text = ''.join(json.dumps(line) + '\n' for line in lines)
  (path / 'metrics.jsonl').write_text(text)
  return runs.read(epath.Path(path))


@pytest.fixture
def several(tmp_path):
  wide = VIT | {'patch_size': 8}
  cases = [
    (50_000, VIT, 0.2, 0.7),
    (2_500, VIT, 0.3),
    (2_500, VIT, 0.5),
    (2_500, wide, 0.4),
    (50_000, {'name': 'resnet', 'depths': [1]}, 0.6),
    (10, None, 0.1),
  ]
  return [
    run(tmp_path / str(number), *case) for number, case in enumerate(cases)
  ]


def test_the_last_result_of_each_run_at_its_data_size(several):
  """Labels are model names, and keys in which models of one name differ."""
  found = sizes.lines(several)
  assert list(found) == ['test/accuracy']  # no count, no training loss
  points = {k: v.T.tolist() for k, v in found['test/accuracy'].items()}
  assert points == {
    'resnet': [[50_000, 0.6]],
    'vit patch_size=4': [[2_500, 0.3], [2_500, 0.5], [50_000, 0.7]],
    'vit patch_size=8': [[2_500, 0.4]],
  }


def test_the_points_of_the_picture_are_returned(several):
  figure, arrays = sizes.compare(several)
  Image.open(io.BytesIO(plotting.png(figure))).load()
  assert arrays['resnet/test/accuracy'].tolist() == [[50_000], [0.6]]
  assert len(arrays) == 3


def test_runs_without_model_or_examples_are_refused(several):
  with pytest.raises(UserError, match='model.*num_examples.*5'):
    sizes.compare(several[-1:])


def test_workdirs_without_metrics_are_left_out(several, tmp_path, caplog):
  """A run that was refused at its start leaves an empty directory."""
  del several
  out, empty = str(tmp_path / 'out'), tmp_path / 'refused'
  empty.mkdir()
  paths = [str(tmp_path / name) for name in ('0', 'refused', '1')]
  with caplog.at_level('WARNING', 'vit_jax'):
    analyze._compare('sizes', paths, out)
  assert str(empty) in caplog.text and 'metrics.jsonl' in caplog.text
  assert np.load(f'{out}/sizes.npz')['vit/test/accuracy'].shape == (2, 2)
  for wrong in ([*paths, str(tmp_path / '9')], [str(empty)]):
    with pytest.raises(UserError, match='refused.*metrics.jsonl'):
      analyze._compare('sizes', wrong, out)
