"""Tests that a forced collapse of DINO is detected.

The paper's Figure 7: without centring, the teacher gives the same output for
all images (its entropy falls to 0); without sharpening, its output is uniform
(ln k). In both cases it no longer differs from its student.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from tiny_vit import SIZES

from tests.faults.counts import further
from vit_jax.config import loading
from vit_jax.models.vit import Model
from vit_jax.objectives.contract import Setting
from vit_jax.objectives.dino import Objective
from vit_jax.optim import optimizers
from vit_jax.run import guards
from vit_jax.run.ledger import Ledger
from vit_jax.training.step import Trainer

MODEL = SIZES | dict(depth=1)
HEAD = dict(outputs=64, hidden=32, bottleneck=16, dtype='float32')
TOTAL, SIZE, N, LR = 120, (16, 16), 32, 1e-3


def steps(duration):
  number, unit = duration.split(' ')
  return round(float(number) * {'steps': 1, 'epochs': 1, '%': 1.2}[unit])


def batch_of(step):
  """Returns two noisy views of images, each with a colour and a pattern."""
  rng = np.random.default_rng(step)
  colour = rng.integers(0, 128, (N, 1, 1, 1, 3))
  pattern = 127 * rng.random((N, 1, 4, 4, 3)).repeat(4, 2).repeat(4, 3)
  noise = rng.normal(0, 25, (N, 2, *SIZE, 3))
  pixels = np.clip(colour + pattern + noise, 0, 255)
  return {'global': jnp.array(pixels, jnp.uint8)}


def metrics_of(centre_momentum=0.9, **settings):
  """Returns the metrics of every step of a small training."""
  setting = Setting(Model(0, **MODEL), SIZE, steps=steps)
  of = Objective(setting, head=HEAD, momentum=0.9, **settings)
  of.centre_momentum = centre_momentum
  optimizer = optimizers.adam(lambda _: LR, weight_decay=0.04)
  trainer = Trainer(of, optimizer, lambda _: LR, 1, None)
  key = jax.random.key(0)
  state = jax.jit(lambda key: trainer.state_of(*of.init(key, None)))(key)
  step = jax.jit(trainer.train_step, donate_argnums=0)
  history = []
  for number in range(TOTAL):
    state, metrics = step(state, batch_of(number), key, {})
    history.append({k: float(v) for k, v in metrics.items()})
  return history


@pytest.mark.slow
@pytest.mark.parametrize(
  'settings, last_share',
  [
    ({}, None),
    (dict(centre_momentum=1.0), 0.0),
    *further([dict(teacher_temperature=10.0), 1.0]),
  ],
  ids=['healthy', 'no centring', 'no sharpening'],
)
def test_the_limit_of_the_shipped_config_detects_collapse(
  settings, last_share, tmp_path
):
  """The metric and the bound are from `configs/dino.py`, for 20 steps."""
  config = loading.load('configs/dino.py')
  section = config.recovery.limits.collapse.to_dict()
  limit = {'collapse': section | dict(during='20 steps')}
  path = epath.Path(tmp_path) / 'events.jsonl'
  watch = guards.Limits(limit, steps, Ledger(path))
  history = metrics_of(**settings)
  for step, metrics in enumerate(history, 1):
    watch.step(step, metrics)
  events = path.read_text().splitlines() if path.exists() else []
  if last_share is None:
    assert not events
    assert min(m['teacher_kl'] for m in history) > 5 * section['at_least']
    assert all(m['feature_deviation'] > 0.5 for m in history)
  else:
    (event,) = map(json.loads, events)
    assert event['metric'] == 'teacher_kl' and event['step'] > 20
    share = history[-1]['entropy_share']
    assert share == pytest.approx(last_share, abs=0.02)
