"""A sweep with two rates, two seeds and a small model on a part of digits."""

from vit_jax.sweeps.grid import Stage, Sweep, Task

_FLAGS = {
  'total': '24 steps',
  'batch_size': 16,
  'model.width': 16,
  'model.depth': 1,
  'model.mlp_dim': 16,
  'model.num_heads': 2,
  'model.dropout': 0.0,
  'schedule.warmup': '1 steps',
  'evals.test.every': '24 steps',
  'checkpoint.every': '4 steps',
  'log.every': '1 steps',
  'log.tensorboard': 'false',
  'log.curves': 'false',
  'log.report': 'false',
}
_DEV = {
  'train.split': 'train[:90%]',
  'train.num_examples': 1_294,
  'evals.test.split': 'train[90%:]',
}


def get_sweep() -> Sweep:
  config, metric = 'configs/quickstart.py', 'test/accuracy'
  task = Task(
    command='train',
    dev=Stage(config, metric, flags=_FLAGS | _DEV, seeds=(0, 1)),
    final=Stage(config, metric, flags=_FLAGS),
    grid={'schedule.base_lr': (1e-5, 1e-2)},
  )
  return Sweep('Digits', {'digits': task})
