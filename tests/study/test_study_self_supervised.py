"""Tests of the study of self-supervised objectives."""

import json

import numpy as np

from vit_jax.config import loading
from vit_jax.config.schema import flatten
from vit_jax.sweeps import grid

ALWAYS = ['from scratch', 'from scratch, 10 %', 'masked patch', 'MAE', 'DINO']


def test_rows_depend_on_the_arguments(tmp_path):
  """A teacher and a file of labels add a row each; there are three seeds."""
  config = 'configs/studies/self_supervised.py'
  study = grid.load_study(config)
  assert [*study.rows] == ALWAYS
  path = tmp_path / 'labels.npz'
  about = json.dumps(dict(count=45_000))
  np.savez(path, soft=np.zeros((1, 10)), copies=[1], index=[0], about=about)
  study = grid.load_study(f'{config}:seeds=4,teacher=runs/big,labels={path}')
  assert [*study.rows] == [*ALWAYS, 'DeiT', 'Noisy Student, 10 %']
  assert study.rows['DeiT'].pretrain.flags['objective.teacher'] == 'runs/big'
  expected = ['neighbours', 'linear probe', '10 % labels', '100 % labels']
  for name, row in study.rows.items():
    assert row.pretrain.seeds == (0, 1, 2, 3)
    assert [*row.transfers] == (expected if name in ALWAYS[2:] else [])
    for each in row.transfers.values():  # a model's sizes come with its weights
      if isinstance(each, grid.Task):
        keys = {key for key in each.final.flags if key.startswith('model.')}
        assert keys == {'model.dtype'}
    config = loading.load(row.pretrain.config)
    evals = config.evals
    unknown = {*row.pretrain.flags} - {*flatten(config)}
    assert unknown <= {'objective.teacher'}  # known once the name is 'distill'
    evaluator = row.pretrain.metric.partition('/')[0]
    assert evaluator.removesuffix('_ema').removesuffix('_teacher') in evals
