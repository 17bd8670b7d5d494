"""Table 4: the learning rate of each data set by its dev split, and the result.

python -m vit_jax.sweep --config=configs/sweeps/table4.py --config.init_from=P

or one data set: `:data=cifar10`. Rates and dev splits are the paper's (section
B.1.1):

| data              | steps  | rates tried         | dev  |
| imagenet          | 20,000 | .003 .01 .03 .06    | 1 %  |
| cifar10           | 10,000 | .001 .003 .01 .03   | 2 %  |
| cifar100          | 10,000 | .001 .003 .01 .03   | 2 %  |
| oxford_iiit_pet   | 500    | .001 .003 .01 .03   | 10 % |
| oxford_flowers102 | 500    | .001 .003 .01 .03   | 10 % |

Expected (%, Table 5, from ImageNet-21k; B/16 B/32 L/16 L/32 H/14): ImageNet
83.97 81.28 85.15 80.99 85.13; the others in finetune.py's header.

Results are the mean over three fine-tunings, as in Table 2. Deviation: the
paper does not say how many seeds chose the rate; here it is one. Recipes are
those of finetune_imagenet.py and finetune.py: 20 runs to choose, 15 final ones.
"""

from vit_jax.config import parse_arg
from vit_jax.errors import UserError, closest
from vit_jax.sweeps.grid import Stage, Sweep, Task

_RATES = (0.001, 0.003, 0.01, 0.03)
RATES = {
  'imagenet': (0.003, 0.01, 0.03, 0.06),
  'cifar10': _RATES,
  'cifar100': _RATES,
  'oxford_iiit_pet': _RATES,
  'oxford_flowers102': _RATES,
}


def get_sweep(argument: str | None = None) -> Sweep:
  arg = parse_arg(argument, data='')
  if arg.data and arg.data not in RATES:
    raise UserError(f'data={arg.data!r}; {closest(arg.data, RATES)}.')
  chosen = [arg.data] if arg.data else [*RATES]
  return Sweep('Table 4', {name: _task(name) for name in chosen})


def _task(name: str) -> Task:
  dev = f'configs/finetune.py:data={name},dev=1'
  final, metric = f'configs/finetune.py:data={name}', 'test/accuracy'
  if name == 'imagenet':
    dev = 'configs/finetune_imagenet.py:dev=1'
    final, metric = 'configs/finetune_imagenet.py', 'val/accuracy'
  return Task(
    command='finetune',
    dev=Stage(dev, metric),
    final=Stage(final, metric, seeds=(0, 1, 2)),
    grid={'schedule.base_lr': RATES[name]},
  )
