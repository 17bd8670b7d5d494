"""VTAB-1k: 19 tasks, the mean of each group and of all.

python -m vit_jax.sweep --config=configs/sweeps/vtab.py --config.init_from=PATH

One recipe for all tasks (Table 4: 2,500 steps, rate .01), so nothing is chosen.
Each task is trained on its 1,000 examples with three seeds, and evaluated on
the test split. The header of finetune.py lists the tasks, their preprocessing
and the differences from the paper. `:tasks=Natural` selects one group,
`:tasks=dtd` one task.

Expected means (%, Table 2): 77.63 (H/14, JFT), 76.28 (L/16, JFT), 72.72 (L/16,
ImageNet-21k). Figure 2 has the groups: Natural, Specialized, Structured.
"""

from vit_jax.config import parse_arg
from vit_jax.errors import UserError, closest
from vit_jax.sweeps.grid import Stage, Sweep, Task

GROUPS = {
  'Natural': (
    *('caltech101', 'cifar100', 'dtd', 'oxford_flowers102'),
    *('oxford_iiit_pet', 'sun397', 'svhn'),
  ),
  'Specialized': (
    *('patch_camelyon', 'eurosat', 'resisc45', 'diabetic_retinopathy'),
  ),
  'Structured': (
    *('clevr_count', 'clevr_distance', 'dmlab', 'kitti'),
    *('dsprites_location', 'dsprites_orientation'),
    *('smallnorb_azimuth', 'smallnorb_elevation'),
  ),
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
  return Sweep('VTAB-1k', tasks)
