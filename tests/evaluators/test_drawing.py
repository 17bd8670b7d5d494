"""The evaluator `figures`: what it draws, of which weights, and failures."""

import functools
import json

import jax
import numpy as np
import pytest
from etils import epath
from minimal_config import completed

from vit_jax.analysis import figures as findings
from vit_jax.analysis import gallery
from vit_jax.errors import UserError
from vit_jax.evaluators import contract, figures, spread
from vit_jax.training import data
from vit_jax.training.experiment import Experiment

SOURCE = {'name': 'synthetic', 'num_examples': 64, 'num_classes': 10}
DECODER = dict(width=8, depth=1, num_heads=2, mlp_dim=8, dtype='float32')
FIGURES = dict(name='figures', split='test', num_images=5)


@functools.cache
def plain():
  return started()


def built(tmp_path, **changes):
  """An experiment with figures among its evaluators, and its parameters."""
  experiment, setting, params = started(**changes) if changes else plain()
  return experiment, setting._replace(workdir=epath.Path(tmp_path)), params


def started(**changes):
  """The same, in no workdir."""
  changes |= {'evals': {'figures': FIGURES}, 'model.dtype': 'float32'}
  config = completed(source=SOURCE, **changes)
  experiment = Experiment.build(config, jax.devices()[:2])
  source = data.open_train(config)
  setting = data.setting(
    experiment, source.class_names, judging=lambda: 'step 7'
  )
  state = jax.jit(experiment.init_state)(jax.random.key(0))
  return experiment, setting, state.params


def test_the_figures_of_a_run(tmp_path):
  """What `examine` finds of five images of the split; no metrics."""
  experiment, setting, params = built(tmp_path)
  evaluator = data.evaluator(experiment, 'figures', setting)
  assert evaluator.run(params) == {}
  folder = tmp_path / gallery.FOLDER
  about = json.loads((folder / 'figures.json').read_text())
  assert about == {
    'weights': 'step 7',
    'images': f'5 of {setting.open_source("test").name}',
    'figures': [
      *('attention_distance', 'filters', 'heads', 'positions', 'rollout'),
    ],
  }
  for name in about['figures']:
    assert (folder / f'{name}.png').read_bytes().startswith(b'\x89PNG')
  source = spread.Spread(setting.open_source('test'), 5)
  images = source.images(setting.transform)
  expected = findings.examine(experiment.model, params, images)
  saved = np.load(folder / 'figures.npz')
  for name, array in expected.arrays.items():
    np.testing.assert_allclose(saved[name], array, atol=1e-6)


@pytest.mark.slow
def test_reconstructions_of_a_masked_training(tmp_path):
  """Grey where hidden; the picture says what was predicted."""
  objective = dict(name='mae', mask_ratio=0.5, decoder=DECODER)
  experiment, setting, params = built(
    tmp_path, objective=objective, num_classes=0
  )
  data.evaluator(experiment, 'figures', setting).run(params)
  about = gallery.about(epath.Path(tmp_path) / gallery.FOLDER)
  assert 'reconstructions' in about['figures']
  assert 'mean and deviation of each patch' in experiment.objective.reconstructs
  saved = np.load(tmp_path / gallery.FOLDER / 'figures.npz')
  images, seen = saved['images'] / 255, saved['seen']
  hidden = (seen == 0.5).all(-1)
  assert hidden.mean() == 0.5  # two of four patches of each image
  np.testing.assert_allclose(seen[~hidden], images[~hidden], atol=1e-6)
  np.testing.assert_allclose(
    saved['completed'][hidden], saved['predicted'][hidden], atol=1e-6
  )


def test_weights_by_their_ending(tmp_path):
  _, setting, _ = built(tmp_path)
  weights = {'': 1, '_ema': 2, '_teacher': 3}
  plain = figures.Evaluator(setting, split='test')
  average = figures.Evaluator(setting, split='test', weights='_ema')
  assert contract.judged(plain, weights) == {'': 1}
  assert contract.judged(average, weights) == {'_ema': 2}
  assert contract.judged(lambda: None, weights) == weights


def test_outside_of_a_run(tmp_path):
  _, setting, _ = built(tmp_path)
  with pytest.raises(UserError, match='vit_jax.analyze --checkpoint=PATH'):
    figures.Evaluator(setting._replace(workdir=None), split='test')


def test_what_cannot_be_drawn_ends_nothing(tmp_path, monkeypatch, caplog):
  _, setting, params = built(tmp_path)

  def fail(*arguments):
    raise OSError('no room')

  monkeypatch.setattr(gallery, 'save', fail)
  assert figures.Evaluator(setting, split='test').run(params) == {}
  assert 'no figures: OSError: no room' in caplog.text
