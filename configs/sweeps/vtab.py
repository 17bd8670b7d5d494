"""VTAB-1k: fine-tunes on 19 tasks and averages each group and all tasks.

python -m vit_jax.sweep --config=configs/sweeps/vtab.py --config.init_from=PATH

Argument:
  tasks: one group (Natural, Specialized or Structured) or one task, for
    example dtd; all by default.

All tasks have one recipe (Table 4: 2,500 steps, learning rate 0.01), so
nothing is chosen. Each task is trained on its 1,000 examples with three seeds,
and evaluated on the test split. The header of finetune.py lists the tasks,
their preprocessing and the differences from the paper.

The table of results has the groups of Figure 2 and the mean next to Table 9's
three models. Table 2 gives their means with two decimals: 77.63 (H/14, JFT),
76.28 (L/16, JFT), 72.72 (L/16, ImageNet-21k).
"""

from vit_jax.config import parse_arg
from vit_jax.errors import UserError, closest
from vit_jax.sweeps.grid import Stage, Sweep, Task

# In the order of Table 9.
GROUPS = {
  'Natural': (
    'caltech101',
    'cifar100',
    'dtd',
    'oxford_flowers102',
    'oxford_iiit_pet',
    'sun397',
    'svhn',
  ),
  'Specialized': (
    'patch_camelyon',
    'eurosat',
    'resisc45',
    'diabetic_retinopathy',
  ),
  'Structured': (
    'clevr_count',
    'clevr_distance',
    'dmlab',
    'dsprites_location',
    'dsprites_orientation',
    'kitti',
    'smallnorb_azimuth',
    'smallnorb_elevation',
  ),
}
# Table 9: accuracies of the tasks of each group, %.
TABLE_9 = {
  'H/14 JFT': {
    'Natural': (95.3, 85.5, 75.2, 99.7, 97.2, 65.0, 88.9),
    'Specialized': (83.3, 96.7, 91.4, 76.6),
    'Structured': (91.7, 63.8, 53.1, 79.4, 63.3, 84.5, 33.2, 51.2),
  },
  'L/16 JFT': {
    'Natural': (95.4, 81.9, 74.3, 99.7, 96.7, 63.5, 87.4),
    'Specialized': (83.6, 96.5, 89.7, 77.1),
    'Structured': (86.4, 63.1, 49.7, 74.5, 60.5, 82.2, 36.2, 51.1),
  },
  'L/16 i21k': {
    'Natural': (90.8, 84.1, 74.1, 99.3, 92.7, 61.0, 80.9),
    'Specialized': (82.5, 95.6, 85.2, 75.3),
    'Structured': (70.3, 56.1, 41.9, 74.7, 64.9, 79.9, 30.5, 41.7),
  },
}


def get_sweep(argument: str | None = None) -> Sweep:
  arg = parse_arg(argument, tasks='')
  group_of = {name: group for group, names in GROUPS.items() for name in names}
  wanted = GROUPS.get(arg.tasks, [arg.tasks] if arg.tasks else group_of)
  unknown = [name for name in wanted if name not in group_of]
  if unknown:
    allowed = [*GROUPS, *group_of]
    raise UserError(f'tasks={arg.tasks!r}; {closest(arg.tasks, allowed)}.')
  tasks = {}
  for name in wanted:
    config = f'configs/finetune.py:data=vtab,task={name}'
    final = Stage(config, 'test/accuracy', seeds=(0, 1, 2))
    tasks[name] = Task(command='finetune', final=final, group=group_of[name])
  published = {
    model: {
      name: value
      for group, values in groups.items()
      for name, value in zip(GROUPS[group], values, strict=True)
    }
    for model, groups in TABLE_9.items()
  }
  return Sweep('VTAB-1k', tasks, published)
