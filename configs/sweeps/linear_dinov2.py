"""Linear evaluation of DINOv2 on ImageNet-1k: a grid of rates and features.

  python -m vit_jax.sweep --config=configs/sweeps/linear_dinov2.py
    --config.init_from=runs/dinov2 --config.init_weights=teacher

Without --config.init_weights for the authors' released weights
(hf:facebook/dinov2-small).

Source: the authors' eval/linear.py: 12,500 steps with batch size 1024, SGD with
momentum 0.9, no weight decay, cosine decay to 0; 13 learning rates from 1e-5 to
0.1 per 256 images; features are the class tokens of the last block or of the
last four, each after the last LayerNorm, with or without the mean of the patch
tokens of the last block. The recipe is otherwise that of linear_dino.py, with
bicubic crops.

Expected ImageNet top-1, the authors': 82.9 (short recipe of L/16), 84.5 (long
recipe of L/14). Neither has been repeated with this code.

Differences: the authors train the 52 classifiers in one pass over the data and
report the one with the best accuracy on the validation split. Here, each is a
run of its own, the best is chosen on 1 % of the training split, and trained
again on all of it. For a cheaper choice, fit classifiers to fixed features: the
evaluator `linear_probe`, or the command `features` with --layers=-4,-3,-2,-1.
"""

from vit_jax.sweeps.grid import Stage, Sweep, Task

_FILE, _METRIC = 'configs/linear_dino.py:model=S', 'val/accuracy'
_RATES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
_RECIPE = {'total': '12500 steps', 'augment.interpolation': 'bicubic'}
_PART = {
  'train.split': 'train[:99%]',
  'train.num_examples': 1_268_355,
  'evals.val.split': 'train[99%:]',
}


def get_sweep() -> Sweep:
  task = Task(
    command='finetune',
    dev=Stage(_FILE, _METRIC, flags=_RECIPE | _PART),
    final=Stage(_FILE, _METRIC, flags=_RECIPE),
    grid={
      'schedule.base_lr': [1e-5 * rate * 1024 / 256 for rate in _RATES],
      'objective.last_blocks': (1, 4),
      'objective.patch_mean': (False, True),
    },
  )
  return Sweep('linear DINOv2', {'imagenet2012': task})
