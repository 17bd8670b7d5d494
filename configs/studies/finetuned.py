"""Tables 2, 5, 6 and 7, Figures 3 and 5: pre-trained, then fine-tuned.

python -m vit_jax.study --config=configs/studies/finetuned.py:table=5

| argument | rows                                      | its figure         |
| table=2  | H/14 and L/16 from JFT, L/16 from i21k    | over core-days     |
| table=5  | ViTs by pre-training set (i1k, i21k, JFT) | Figure 3           |
| table=6  | ViTs, hybrids and ResNets from JFT        | Figure 5, exaFLOPs |
| table=7  | ResNets from JFT by Adam and by SGD       |                    |

A row pre-trains with configs/vit.py or configs/resnet.py (Table 3), chooses the
learning rate of each data set like configs/sweeps/table4.py, and fine-tunes
three times. Table 2's ImageNet (512 px L/16, 518 px H/14, averaged weights) and
VTAB-1k (means over 19 tasks) have a single rate. ReaL is the accuracy of
ImageNet's models on the labels of ImageNet-ReaL, for which the dataset
imagenet2012_real has to be prepared; `real=0` leaves it out. Its column and the
figures are made by `python -m examples.study_results CONFIG WORKDIR`. To use
existing weights: --weights='B/16 i21k=B_16.npz'. `rows=B/16` selects the rows
whose names contain it.

ResNets of Table 6 are also fine-tuned with BiT's recipe
(configs/finetune_bit.py), in columns such as "Pets (BiT)"; the paper reports
the better of the two (section B.1.1), so that its number belongs to the better
column.

The paper's values are shown next to the measured ones; none has been repeated
here. Table 2 also shows BiT-L (R152x4) and Noisy Student (EfficientNet-L2) as
published. Figure 3 has a band of BiT ResNets; Table 5 shows its upper end,
R152x4, with the numbers of "Big Transfer" (arXiv 1912.11370, Tables 1 and 2,
from memory). Table 5's accuracies before fine-tuning ("pre-training") are not
in the paper; an author published them (google-research/vision_transformer
issue 62). Its values from JFT are those of Table 6, except for H/14, where they
differ. JFT-300M is not public: use your own data with
--pretrain.source.dataset=….

Not implemented: H/14 from i1k, which is not in Table 5. The paper's Figure 3
tunes weight decay, dropout and label smoothing for each data set; here they are
Table 3's.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.config import parse_arg
from vit_jax.errors import UserError
from vit_jax.sweeps import grid
from vit_jax.sweeps.grid import (
  UPSTREAM,
  Number,
  Row,
  Stage,
  Study,
  Sweep,
  Task,
)

DATA = ('ImageNet', 'CIFAR-10', 'CIFAR-100', 'Pets', 'Flowers')
COLUMNS = ('ImageNet', 'ReaL', 'CIFAR-10', 'CIFAR-100', 'Pets', 'Flowers')
IMAGES = {'i1k': 1_281_167, 'i21k': 14_145_922, 'jft': 303_000_000}
TITLES = {
  2: 'Table 2: ViTs over the core-days of their pre-training',
  5: 'Table 5 and Figure 3: ViTs by the size of the pre-training set',
  6: 'Table 6 and Figure 5: ViTs, hybrids and ResNets over exaFLOPs',
  7: 'Table 7: ResNets pre-trained by Adam and by SGD',
}
# x axis and columns of the figures
FIGURES = {
  2: ('core_days', ('ImageNet', 'ReaL', 'VTAB-1k')),
  5: ('images', ('ImageNet',)),
  6: ('exaflops', COLUMNS),
}
UPSTREAM_NOTE = (
  'Values of pre-training in parentheses are a remark of an author, '
  'google-research/vision_transformer issue 62.'
)
# (variant, data, epochs): core-days, and mean and std of each column
TABLE_2_COLUMNS = (*COLUMNS, 'VTAB-1k')
TABLE_2 = {
  ('H/14', 'jft', 14): (
    2_500,
    (88.55, 0.04),
    (90.72, 0.05),
    (99.50, 0.06),
    (94.55, 0.04),
    (97.56, 0.03),
    (99.68, 0.02),
    (77.63, 0.23),
  ),
  ('L/16', 'jft', 14): (
    680,
    (87.76, 0.03),
    (90.54, 0.03),
    (99.42, 0.03),
    (93.90, 0.05),
    (97.32, 0.11),
    (99.74, 0.00),
    (76.28, 0.46),
  ),
  ('L/16', 'i21k', 90): (
    230,
    (85.30, 0.02),
    (88.62, 0.05),
    (99.15, 0.03),
    (93.25, 0.05),
    (94.67, 0.15),
    (99.61, 0.02),
    (72.72, 0.21),
  ),
}
# Models that are not trained here: core-days, and the columns
TABLE_2_OTHERS = {
  'BiT-L (R152x4) jft': (
    9_900,
    (87.54, 0.02),
    (90.54,),
    (99.37, 0.06),
    (93.51, 0.08),
    (96.62, 0.23),
    (99.63, 0.03),
    (76.29, 1.70),
  ),
  # The paper prints 88.4/88.5; the second number is a later improvement.
  'Noisy Student (EfficientNet-L2)': (12_300, (88.4,), (90.55,)),
}
# (variant, data, epochs): upstream accuracy, and each column
TABLE_5 = {
  ('B/16', 'i1k', 300): (74.79, 77.91, 83.57, 98.13, 87.13, 93.81, 89.49),
  ('B/32', 'i1k', 300): (69.19, 73.38, 79.56, 97.77, 86.31, 92.04, 85.43),
  ('L/16', 'i1k', 300): (72.59, 76.53, 82.19, 97.86, 86.35, 93.64, 89.66),
  ('L/32', 'i1k', 300): (66.90, 71.16, 77.83, 97.94, 87.07, 91.35, 86.36),
  ('B/16', 'i21k', 90): (47.88, 83.97, 88.35, 98.95, 91.67, 94.43, 99.38),
  ('B/32', 'i21k', 90): (44.04, 81.28, 86.63, 98.79, 91.97, 93.02, 99.11),
  ('L/16', 'i21k', 90): (49.90, 85.15, 88.40, 99.16, 93.44, 94.73, 99.61),
  ('L/32', 'i21k', 90): (45.42, 80.99, 85.65, 99.13, 93.04, 93.09, 99.19),
  ('H/14', 'i21k', 90): (49.06, 85.13, 88.70, 99.27, 93.82, 94.82, 99.51),
}
# H/14 from JFT differs from Table 6.
TABLE_5_JFT = {'H/14': (88.04, 90.33, 99.50, 94.55, 97.56, 99.68)}
# Upper end of Figure 3's band, R152x4: ImageNet by pre-training set
BIT = {'i1k': 81.30, 'i21k': 85.39, 'jft': 87.54}
# (variant, epochs): exaFLOPs, and each column
TABLE_6 = {
  ('B/32', 7): (55, 80.73, 86.27, 98.61, 90.49, 93.40, 99.27),
  ('B/16', 7): (224, 84.15, 88.85, 99.00, 91.87, 95.80, 99.56),
  ('L/32', 7): (196, 84.37, 88.28, 99.19, 92.52, 95.83, 99.45),
  ('L/16', 7): (783, 86.30, 89.43, 99.38, 93.46, 96.81, 99.66),
  ('L/16', 14): (1_567, 87.12, 89.99, 99.38, 94.04, 97.11, 99.56),
  ('H/14', 14): (4_262, 88.08, 90.36, 99.50, 94.71, 97.11, 99.71),
  ('R50x1', 7): (50, 77.54, 84.56, 97.67, 86.07, 91.11, 94.26),
  ('R50x2', 7): (199, 82.12, 87.94, 98.29, 89.20, 93.43, 97.02),
  ('R101x1', 7): (96, 80.67, 87.07, 98.48, 89.17, 94.08, 95.95),
  ('R152x1', 7): (141, 81.88, 87.96, 98.82, 90.22, 94.17, 96.94),
  ('R152x2', 7): (563, 84.97, 89.69, 99.06, 92.05, 95.37, 98.62),
  ('R152x2', 14): (1_126, 85.56, 89.89, 99.24, 91.92, 95.75, 98.75),
  ('R200x3', 14): (3_306, 87.22, 90.15, 99.34, 93.53, 96.32, 99.04),
  ('R50+B/32', 7): (106, 84.90, 89.15, 99.01, 92.24, 95.75, 99.46),
  ('R50+B/16', 7): (274, 85.58, 89.65, 99.14, 92.63, 96.65, 99.40),
  ('R50+L/32', 7): (246, 85.68, 89.04, 99.24, 92.93, 96.97, 99.43),
  ('R50+L/16', 7): (859, 86.60, 89.72, 99.18, 93.64, 97.03, 99.40),
  ('R50+L/16', 14): (1_668, 87.12, 89.76, 99.31, 93.89, 97.36, 99.11),
}
# (variant, optimizer): columns of DATA
TABLE_7 = {
  ('R50x1', 'adam'): (77.54, 97.67, 86.07, 91.11, 94.26),
  ('R50x1', 'sgd'): (78.24, 97.46, 85.17, 91.00, 92.06),
  ('R152x2', 'adam'): (84.97, 99.06, 92.05, 95.37, 98.62),
  ('R152x2', 'sgd'): (84.37, 99.07, 91.06, 94.79, 99.32),
}


def get_study(argument: str | None = None) -> Study:
  arg = parse_arg(argument, table=6, rows='', real=1)
  studies = {2: _table_2, 5: _table_5, 6: _table_6, 7: _table_7}
  if arg.table not in studies:
    raise UserError(f'table={arg.table}: allowed are 2, 5, 6 and 7.')
  study = studies[arg.table](bool(arg.real))
  rows = {name: row for name, row in study.rows.items() if arg.rows in name}
  if not rows:
    raise UserError(
      f'rows={arg.rows} is in no name of a row; they are '
      f'{", ".join(study.rows)}.'
    )
  return dataclasses.replace(study, rows=rows)


def get_extras(argument: str | None = None) -> dict[str, Any]:
  """Returns the column ReaL and the figure, see examples/study_results.py."""
  arg = parse_arg(argument, table=6, rows='', real=1)
  if arg.table == 7:
    return {}
  x, shown = FIGURES[arg.table]
  columns = [each for each in shown if arg.real or each != 'ReaL']
  figure: dict[str, Any] = dict(x=x, columns=columns)
  extras: dict[str, Any] = {'figure': figure}
  numbers: dict[str, Sequence[Any]] = {}  # those of `COLUMNS`, by row
  if arg.table == 2:
    table = {f'{v} {data}': row for (v, data, _), row in TABLE_2.items()}
    table |= TABLE_2_OTHERS
    numbers = {name: row for name, (_, *row) in table.items()}
    figure['places'] = {name: days for name, (days, *_) in table.items()}
  if arg.table == 5:
    table = _rows_of_table_5()
    keys = {f'{variant} {data}': (variant, data) for variant, data, _ in table}
    numbers = {
      f'{variant} {data}': row
      for (variant, data, _), (_, *row) in table.items()
    }
    keys |= {f'BiT R152x4 {data}': ('BiT R152x4', data) for data in BIT}
    figure['lines'] = {name: (line,) for name, (line, _) in keys.items()}
    figure['places'] = {name: IMAGES[data] for name, (_, data) in keys.items()}
  if arg.table == 6:
    keys = {f'{variant} {n} epochs': (variant, n) for variant, n in TABLE_6}
    numbers = {name: TABLE_6[key][1:] for name, key in keys.items()}
    figure['lines'] = {n: (_kind(variant),) for n, (variant, _) in keys.items()}
    figure['places'] = {name: TABLE_6[key][0] for name, key in keys.items()}
  if arg.real:
    metric = 'real_ema/accuracy' if arg.table == 2 else 'real/accuracy'

    def real(runs: Mapping[str, Any]) -> list[float]:
      return [metrics[metric] for metrics in runs['ImageNet']]

    papers = {
      name: _numbers(COLUMNS, row)['ReaL']
      for name, row in numbers.items()
      if arg.rows in name or name in TABLE_2_OTHERS
    }
    extras['columns'] = {'ReaL': (real, papers)}
  return extras


def _table_2(real: bool) -> Study:
  vtab = grid.load('configs/sweeps/vtab.py', Sweep).tasks
  rows = {}
  for (variant, data, epochs), (_, *numbers) in TABLE_2.items():
    final = Stage(
      f'configs/finetune_imagenet.py:table=2,variant={variant},real={real:d}',
      'val_ema/accuracy',
      seeds=(0, 1, 2),
    )
    tasks = _table_4(variant, real) | {
      'ImageNet': Task(command='finetune', final=final)
    }
    for name, task in vtab.items():
      tasks[f'VTAB-1k/{name}'] = _fitted(variant, task)
    rows[f'{variant} {data}'] = Row(
      pretrain=_pretraining(variant, data, epochs),
      transfers=tasks,
      paper=_shown(TABLE_2_COLUMNS, numbers),
    )
  published = {
    name: _shown(TABLE_2_COLUMNS, numbers)
    for name, (_, *numbers) in TABLE_2_OTHERS.items()
  }
  return _study(2, rows, published)


def _table_5(real: bool) -> Study:
  rows = {}
  for (variant, data, epochs), numbers in _rows_of_table_5().items():
    rows[f'{variant} {data}'] = Row(
      pretrain=_pretraining(variant, data, epochs),
      transfers=_table_4(variant, real),
      paper=_shown((UPSTREAM, *COLUMNS), numbers),
    )
  published = {
    f'BiT R152x4 {data}': {'ImageNet': Number(number)}
    for data, number in BIT.items()
  }
  return _study(5, rows, published)


def _rows_of_table_5() -> Mapping[tuple[str, str, int], Sequence[Any]]:
  """Returns Table 5 with the ViTs from JFT."""
  plain = {variant for variant, data, _ in TABLE_5 if data == 'i1k'}
  jft = {
    (variant, 'jft', epochs): (None, *TABLE_5_JFT.get(variant, numbers))
    for (variant, epochs), (_, *numbers) in TABLE_6.items()
    if (variant, epochs) != ('L/16', 7) and variant in ('H/14', *plain)
  }
  return TABLE_5 | jft


def _table_6(real: bool) -> Study:
  rows = {}
  for (variant, epochs), (_, *numbers) in TABLE_6.items():
    tasks = _table_4(variant, real)
    if _kind(variant) == 'ResNet':
      tasks |= {f'{name} (BiT)': task for name, task in _bit().items()}
    rows[f'{variant} {epochs} epochs'] = Row(
      pretrain=_pretraining(variant, 'jft', epochs),
      transfers=tasks,
      paper=_shown(COLUMNS, numbers),
    )
  return _study(6, rows)


def _kind(variant: str) -> str:
  """Returns the kind of a model of Table 6."""
  if not variant.startswith('R'):
    return 'ViT'
  return 'hybrid' if '+' in variant else 'ResNet'


def _table_7(real: bool) -> Study:
  del real  # Table 7 has no such column
  rows = {}
  for (variant, optimizer), numbers in TABLE_7.items():
    config = (
      f'configs/resnet.py:variant={variant},epochs=7,optimizer={optimizer}'
    )
    rows[f'{variant} {optimizer}'] = Row(
      pretrain=Stage(config, 'val/accuracy'),
      transfers=_table_4(variant, real=False),
      paper=_shown(DATA, numbers),
    )
  return _study(7, rows)


def _study(
  table: int,
  rows: Mapping[str, Row],
  published: Mapping[str, Mapping[str, Number]] | None = None,
) -> Study:
  return Study(
    title=TITLES[table],
    rows=rows,
    published=published or {},
    note=UPSTREAM_NOTE if table == 5 else '',
  )


def _shown(columns: Sequence[str], values: Sequence[Any]) -> dict[str, Number]:
  """Returns the numbers of the table, without ReaL; see `_numbers`."""
  numbers = _numbers(columns, values)
  return {column: numbers[column] for column in numbers if column != 'ReaL'}


def _numbers(
  columns: Sequence[str], values: Sequence[Any]
) -> dict[str, Number]:
  """Returns published numbers by column.

  Args:
    columns: columns in the order of the values.
    values: means, or tuples (mean, std); None where there is none. The last
      columns may have none.
  """
  return {
    column: Number(*(value if isinstance(value, tuple) else (value,)))
    for column, value in zip(columns, values, strict=False)
    if value is not None
  }


def _pretraining(variant: str, data: str, epochs: int) -> Stage:
  if variant.startswith('R') and '+' not in variant:
    config = f'configs/resnet.py:variant={variant},epochs={epochs}'
  else:
    config = f'configs/vit.py:variant={variant},data={data},epochs={epochs}'
  return Stage(config, 'val/accuracy')


def _table_4(variant: str, real: bool) -> dict[str, Task]:
  """Returns the fine-tunings of Table 4, each with its rates."""
  model = _kind(variant).lower()
  file = f'configs/sweeps/table4.py:model={model},real={real:d}'
  tasks = grid.load(file, Sweep).tasks.values()
  fitted = [_fitted(variant, task) for task in tasks]
  return dict(zip(DATA, fitted, strict=True))


def _bit() -> dict[str, Task]:
  """Returns the fine-tunings of BiT; nothing is chosen."""
  names = (
    'imagenet',
    'cifar10',
    'cifar100',
    'oxford_iiit_pet',
    'oxford_flowers102',
  )
  return {
    column: Task(
      command='finetune',
      final=Stage(
        f'configs/finetune_bit.py:data={name}',
        'val/accuracy' if name == 'imagenet' else 'test/accuracy',
        seeds=(0, 1, 2),
      ),
    )
    for column, name in zip(DATA, names, strict=True)
  }


def _fitted(variant: str, task: Task) -> Task:
  """Returns the task with the keys that a ResNet, or H/14, needs."""
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
