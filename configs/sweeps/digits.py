"""A small sweep: quickstart.py with two learning rates and two seeds.

python -m vit_jax.sweep --config=configs/sweeps/digits.py

This sweep is not in the paper. The rate is chosen on a tenth of the training
split; three runs on the whole training split are evaluated on the test split.

Expected: about 97 % test accuracy, after seven runs of one to two minutes on
two CPU cores.
"""

from vit_jax.sweeps.grid import Stage, Sweep, Task

_FILE, _METRIC = 'configs/quickstart.py', 'test/accuracy'
_PART = {
  'train.split': 'train[:90%]',
  'train.num_examples': 1_294,
  'evals.test.split': 'train[90%:]',
}


def get_sweep() -> Sweep:
  task = Task(
    command='train',
    dev=Stage(_FILE, _METRIC, flags=_PART, seeds=(0, 1)),
    final=Stage(_FILE, _METRIC, seeds=(0, 1, 2)),
    grid={'schedule.base_lr': (1e-3, 3e-3)},
  )
  return Sweep('digits', {'digits': task})
