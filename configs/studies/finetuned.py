"""Tables 2, 5 and 6, Figures 3 and 5: pre-trained, then fine-tuned.

python -m vit_jax.study --config=configs/studies/finetuned.py:table=5

| argument | rows                                      | its figure         |
| table=2  | H/14 and L/16 from JFT, L/16 from i21k    | over core-days     |
| table=5  | ViTs by pre-training set (i1k, i21k, JFT) | Figure 3           |
| table=6  | ViTs, hybrids and ResNets from JFT        | Figure 5, exaFLOPs |

A row pre-trains with configs/vit.py or configs/resnet.py (Table 3), chooses the
learning rate of each data set like configs/sweeps/table4.py, and fine-tunes
three times. Table 2's ImageNet (512 px L/16, 518 px H/14, averaged weights) and
VTAB-1k (means over 19 tasks) have a single rate. To use existing weights:
--weights='B/16 i21k=B_16.npz'. `rows=B/16` selects the rows whose names contain
it.

The paper's values are shown next to the measured ones; none has been repeated
here. The accuracies of pre-training are not in the paper: they are a remark of
an author (google-research/vision_transformer issue 62). Table 5's values from
JFT are those of Table 6, except for H/14, where they differ. JFT-300M is not
public: use your own data with --pretrain.source.dataset=….

Not implemented: ImageNet's ReaL labels; Figure 3's band of BiT ResNets, for
which Table 3 has no recipes on ImageNet-1k and -21k; H/14 from i1k, which is
not in Table 5. The paper's Figure 3 tunes weight decay, dropout and label
smoothing for each data set; here they are Table 3's.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.config import parse_arg
from vit_jax.errors import UserError
from vit_jax.study.contents import UPSTREAM, Figure, Row, Study
from vit_jax.sweeps import grid
from vit_jax.sweeps.grid import Stage, Task

COLUMNS = ('ImageNet', 'CIFAR-10', 'CIFAR-100', 'Pets', 'Flowers')
IMAGES = {'i1k': 1_281_167, 'i21k': 14_145_922, 'jft': 303_000_000}
TITLES = {
  2: 'Table 2: ViTs over the core-days of their pre-training',
  5: 'Table 5 and Figure 3: ViTs by the size of the pre-training set',
  6: 'Table 6 and Figure 5: ViTs, hybrids and ResNets over exaFLOPs',
}
FIGURES = {
  2: Figure('core_days', ('ImageNet', 'VTAB-1k')),
  5: Figure('images', ('ImageNet',)),
  6: Figure('exaflops', COLUMNS),
}
UPSTREAM_NOTE = (
  'Values of pre-training in parentheses are a remark of an author, '
  'google-research/vision_transformer issue 62.'
)
# (variant, data, epochs): core-days, ImageNet, VTAB-1k
TABLE_2 = {
  ('H/14', 'jft', 14): (2_500, 88.55, 77.63),
  ('L/16', 'jft', 14): (680, 87.76, 76.28),
  ('L/16', 'i21k', 90): (230, 85.30, 72.72),
}
# (variant, data, epochs): accuracy of pre-training (the author's remark), and
# Table 5's value of each column
TABLE_5 = {
  ('B/16', 'i1k', 300): (74.79, 77.91, 98.13, 87.13, 93.81, 89.49),
  ('B/32', 'i1k', 300): (69.19, 73.38, 97.77, 86.31, 92.04, 85.43),
  ('L/16', 'i1k', 300): (72.59, 76.53, 97.86, 86.35, 93.64, 89.66),
  ('L/32', 'i1k', 300): (66.90, 71.16, 97.94, 87.07, 91.35, 86.36),
  ('B/16', 'i21k', 90): (47.88, 83.97, 98.95, 91.67, 94.43, 99.38),
  ('B/32', 'i21k', 90): (44.04, 81.28, 98.79, 91.97, 93.02, 99.11),
  ('L/16', 'i21k', 90): (49.90, 85.15, 99.16, 93.44, 94.73, 99.61),
  ('L/32', 'i21k', 90): (45.42, 80.99, 99.13, 93.04, 93.09, 99.19),
  ('H/14', 'i21k', 90): (49.06, 85.13, 99.27, 93.82, 94.82, 99.51),
}
# H/14 from JFT differs from Table 6.
TABLE_5_JFT = {'H/14': (88.04, 99.50, 94.55, 97.56, 99.68)}
# (variant, epochs): exaFLOPs, and each column
TABLE_6 = {
  ('B/32', 7): (55, 80.73, 98.61, 90.49, 93.40, 99.27),
  ('B/16', 7): (224, 84.15, 99.00, 91.87, 95.80, 99.56),
  ('L/32', 7): (196, 84.37, 99.19, 92.52, 95.83, 99.45),
  ('L/16', 7): (783, 86.30, 99.38, 93.46, 96.81, 99.66),
  ('L/16', 14): (1_567, 87.12, 99.38, 94.04, 97.11, 99.56),
  ('H/14', 14): (4_262, 88.08, 99.50, 94.71, 97.11, 99.71),
  ('R50x1', 7): (50, 77.54, 97.67, 86.07, 91.11, 94.26),
  ('R50x2', 7): (199, 82.12, 98.29, 89.20, 93.43, 97.02),
  ('R101x1', 7): (96, 80.67, 98.48, 89.17, 94.08, 95.95),
  ('R152x1', 7): (141, 81.88, 98.82, 90.22, 94.17, 96.94),
  ('R152x2', 7): (563, 84.97, 99.06, 92.05, 95.37, 98.62),
  ('R152x2', 14): (1_126, 85.56, 99.24, 91.92, 95.75, 98.75),
  ('R200x3', 14): (3_306, 87.22, 99.34, 93.53, 96.32, 99.04),
  ('R50+B/32', 7): (106, 84.90, 99.01, 92.24, 95.75, 99.46),
  ('R50+B/16', 7): (274, 85.58, 99.14, 92.63, 96.65, 99.40),
  ('R50+L/32', 7): (246, 85.68, 99.24, 92.93, 96.97, 99.43),
  ('R50+L/16', 7): (859, 86.60, 99.18, 93.64, 97.03, 99.40),
  ('R50+L/16', 14): (1_668, 87.12, 99.31, 93.89, 97.36, 99.11),
}


def get_study(argument: str | None = None) -> Study:
  arg = parse_arg(argument, table=6, rows='')
  makers = {2: _table_2, 5: _table_5, 6: _table_6}
  if arg.table not in makers:
    raise UserError(f'table={arg.table}: allowed are 2, 5 and 6.')
  found = makers[arg.table]()
  rows = {name: row for name, row in found.items() if arg.rows in name}
  if not rows:
    raise UserError(
      f'rows={arg.rows} is in no name of a row; they are {", ".join(found)}.'
    )
  note = UPSTREAM_NOTE if arg.table == 5 else ''
  figure = FIGURES[arg.table]
  return Study(title=TITLES[arg.table], rows=rows, note=note, figure=figure)


def _table_2() -> dict[str, Row]:
  vtab = grid.load('configs/sweeps/vtab.py').tasks
  rows = {}
  for (variant, data, epochs), (days, imagenet, mean) in TABLE_2.items():
    final = Stage(
      f'configs/finetune_imagenet.py:table=2,variant={variant}',
      'val_ema/accuracy',
      seeds=(0, 1, 2),
    )
    tasks = _table_4(variant) | {
      'ImageNet': Task(command='finetune', final=final)
    }
    for name, task in vtab.items():
      tasks[f'VTAB-1k/{name}'] = _fitted(variant, task)
    rows[f'{variant} {data}'] = Row(
      pretrain=_pretraining(variant, data, epochs),
      transfers=tasks,
      paper={'ImageNet': imagenet, 'VTAB-1k': mean},
      place=days,
    )
  return rows


def _table_5() -> dict[str, Row]:
  rows = {}
  jft = {
    (variant, 'jft', epochs): (None, *TABLE_5_JFT.get(variant, numbers))
    for (variant, epochs), (_, *numbers) in TABLE_6.items()
    if (variant, epochs) != ('L/16', 7) and variant in ('H/14', *_plain())
  }
  for (variant, data, epochs), numbers in (TABLE_5 | jft).items():
    rows[f'{variant} {data}'] = Row(
      pretrain=_pretraining(variant, data, epochs),
      transfers=_table_4(variant),
      paper=_beside((UPSTREAM, *COLUMNS), numbers),
      lines=(variant,),
      place=IMAGES[data],
    )
  return rows


def _plain() -> set[str]:
  """The ViTs of Table 5 on every data set."""
  return {variant for variant, data, _ in TABLE_5 if data == 'i1k'}


def _table_6() -> dict[str, Row]:
  rows = {}
  for (variant, epochs), (exaflops, *numbers) in TABLE_6.items():
    kind = 'ViT'
    if variant.startswith('R'):
      kind = 'hybrid' if '+' in variant else 'ResNet'
    rows[f'{variant} {epochs} epochs'] = Row(
      pretrain=_pretraining(variant, 'jft', epochs),
      transfers=_table_4(variant),
      paper=_beside(COLUMNS, numbers),
      lines=(kind,),
      place=exaflops,
    )
  return rows


def _beside(
  columns: Sequence[str], numbers: Sequence[float | None]
) -> dict[str, float]:
  pairs = zip(columns, numbers, strict=False)
  return {name: number for name, number in pairs if number is not None}


def _pretraining(variant: str, data: str, epochs: int) -> Stage:
  if variant.startswith('R') and '+' not in variant:
    config = f'configs/resnet.py:variant={variant},epochs={epochs}'
  else:
    config = f'configs/vit.py:variant={variant},data={data},epochs={epochs}'
  return Stage(config, 'val/accuracy')


def _table_4(variant: str) -> dict[str, Task]:
  """The five data sets, each with its rates."""
  model = 'vit'
  if variant.startswith('R'):
    model = 'hybrid' if '+' in variant else 'resnet'
  tasks = grid.load(f'configs/sweeps/table4.py:model={model}').tasks
  fitted = [_fitted(variant, task) for task in tasks.values()]
  return dict(zip(COLUMNS, fitted, strict=True))


def _fitted(variant: str, task: Task) -> Task:
  """The task with the keys that a ResNet, or H/14, needs."""
  flags: Mapping[str, Any] = {}
  if variant.startswith('R') and '+' not in variant:
    flags = {'model.name': 'resnet'}
  elif variant == 'H/14':  # 27x27 patches at 384 px, and 6 pixels dropped
    flags = {'model.remainder': 'drop', 'mesh.data': 1, 'mesh.fsdp': -1}
  stages = {
    name: stage._replace(flags={**stage.flags, **flags})
    for name in ('dev', 'final')
    if (stage := getattr(task, name)) is not None
  }
  return dataclasses.replace(task, **stages)
