"""Tests of figures drawn during a run."""

import functools
import json
from contextlib import nullcontext

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


@functools.cache
def plain():
  return started()


def built(tmp_path, **changes):
  """Returns an experiment, a setting, sets of weights and its evaluations."""
  experiment, setting, weights = started(**changes) if changes else plain()
  evaluations = Evaluations(
    experiment,
    setting._replace(workdir=epath.Path(tmp_path)),
    lambda kind: nullcontext(),
  )
  return experiment, setting, weights, evaluations


def started(**changes):
  """Returns the same without a workdir."""
  changes |= {'evals': {'figures': FIGURES}, 'model.dtype': 'float32'}
  config = completed(source=SOURCE, **changes)
  experiment = Experiment.build(config, jax.devices()[:2])
  source = data.open_train(experiment)
  setting = data.evaluation_setting(experiment, source.class_names)
  state = jax.jit(experiment.init_state)(jax.random.key(0))
  return experiment, setting, experiment.trainer.weights(state, {})


@pytest.mark.slow
def test_figures_are_drawn_at_the_end(tmp_path):
  """Five images of the split are used, and there are no metrics."""
  experiment, setting, weights, evaluations = built(tmp_path)
  last = experiment.total_steps
  assert evaluations.due(last) == ['figures']
  assert evaluations.run(['figures'], weights, 7) == {}
  folder = tmp_path / gallery.FOLDER
  about = json.loads((folder / 'figures.json').read_text())
  assert about == {
    'weights': 'step 7',
    'images': f'5 of {setting.open_source("test").name}',
    'figures': [
      'attention_distance',
      'components',
      'filters',
      'heads',
      'positions',
      'rollout',
    ],
  }
  for name in about['figures']:
    assert (folder / f'{name}.png').read_bytes().startswith(b'\x89PNG')
  source = features.Spread(setting.open_source('test'), 5)
  images, _ = source.images(setting.transform)
  expected = findings.examine(experiment.objective, weights['params'], images)
  saved = np.load(folder / 'figures.npz')
  for name, array in expected.arrays.items():
    np.testing.assert_allclose(saved[name], array, atol=1e-6)


@pytest.mark.parametrize(
  ('name', 'found', 'title'),
  [
    ('params', 'params', 'step 7'),
    ('ema', 'ema', 'step 7, ema'),
  ],
)
def test_figures_use_the_weights_of_the_config(
  tmp_path, monkeypatch, name, found, title
):
  """Figures of different weights do not overwrite each other."""
  experiment, setting, _, _ = built(tmp_path)
  drawn = []
  monkeypatch.setattr(
    Figures,
    '_draw',
    lambda self, setting, params, title: drawn.append((params, title)),
  )
  figures = Figures(setting, split='test', weights=name)
  weights = {'params': 'params', 'ema': 'ema'}
  figures.run_all(weights, 7)
  assert drawn == [(found, title)]
  figures.run_all({'teacher': 'params'}, 7)
  assert len(drawn) == 1


@pytest.mark.slow
def test_an_error_while_drawing_does_not_end_the_run(
  tmp_path, monkeypatch, caplog
):
  _, _, weights, evaluations = built(tmp_path)

  def fail(*arguments):
    raise OSError('no room')

  monkeypatch.setattr(gallery, 'save', fail)
  assert evaluations.run(['figures'], weights, 7) == {}
  assert 'OSError: no room' in caplog.text
