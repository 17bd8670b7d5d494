"""Tests of figures drawn during a run."""

import json
from contextlib import nullcontext
from unittest import mock

import jax
import numpy as np
import pytest
from etils import epath
from minimal_config import completed

from vit_jax.analysis import figures as findings
from vit_jax.analysis import gallery
from vit_jax.evaluators import features
from vit_jax.evaluators.figures import Evaluator as Figures
from vit_jax.training import data
from vit_jax.training.evaluations import Evaluations
from vit_jax.training.experiment import Experiment

SOURCE = {'name': 'synthetic', 'num_examples': 64, 'num_classes': 10}
FIGURES = dict(name='figures', split='test', num_images=5)


@pytest.fixture(scope='module')
def started():
  """Returns an experiment, the setting of its evaluators, and weights."""
  changes = {'evals': {'figures': FIGURES}, 'model.dtype': 'float32'}
  config = completed(source=SOURCE, **changes)
  experiment = Experiment.build(config, jax.devices()[:2])
  source = data.open_train(experiment)
  setting = data.evaluation_setting(experiment, source.class_names)
  state = jax.jit(experiment.init_state)(jax.random.key(0))
  return experiment, setting, experiment.trainer.weights(state, {})


@pytest.fixture
def evaluations(started, tmp_path):
  experiment, setting, _ = started
  setting = setting._replace(workdir=epath.Path(tmp_path))
  return Evaluations(experiment, setting, lambda kind: nullcontext())


@pytest.mark.slow
def test_figures_are_drawn_at_the_end(started, evaluations, tmp_path):
  """Five images of the split are used, and there are no metrics."""
  experiment, setting, weights = started
  last = experiment.total_steps
  assert evaluations.due(last) == ['figures']
  assert evaluations.run(['figures'], weights, 7) == {}
  folder = tmp_path / gallery.FOLDER
  about = json.loads((folder / 'figures.json').read_text())
  assert about['weights'] == 'step 7'
  assert about['images'] == f'5 of {setting.open_source("test").name}'
  assert {'attention_distance', 'rollout'} < set(about['figures'])
  for name in about['figures']:
    assert (folder / f'{name}.png').read_bytes().startswith(b'\x89PNG')
  source = features.Spread(setting.open_source('test'), 5)
  images, _ = source.images(setting.transform)
  expected = findings.examine(experiment.objective, weights['params'], images)
  saved = np.load(folder / 'figures.npz')
  for name, array in expected.arrays.items():
    np.testing.assert_allclose(saved[name], array, atol=1e-6)


@pytest.mark.parametrize(
  ('name', 'title'), [('params', 'step 7'), ('ema', 'step 7, ema')]
)
def test_figures_use_the_weights_of_the_config(
  started, monkeypatch, name, title
):
  """Figures of different weights do not overwrite each other."""
  draw = mock.Mock()
  monkeypatch.setattr(Figures, '_draw', draw)
  figures = Figures(started[1], split='test', weights=name)
  figures.run_all({'params': 'params', 'ema': 'ema'}, 7)
  assert draw.call_args.args[1:] == (name, title)
  figures.run_all({'teacher': 'params'}, 7)
  draw.assert_called_once()


@pytest.mark.slow
def test_an_error_while_drawing_does_not_end_the_run(
  started, evaluations, monkeypatch, caplog
):
  failing = mock.Mock(side_effect=OSError('no room'))
  monkeypatch.setattr(gallery, 'save', failing)
  assert evaluations.run(['figures'], started[2], 7) == {}
  assert 'OSError: no room' in caplog.text
