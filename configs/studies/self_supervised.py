"""Learning from CIFAR-10 with few labels or none: a small-scale comparison.

python -m vit_jax.study --config=configs/studies/self_supervised.py:seeds=3

| row                    | labels of its pre-training           |
| from scratch           | all: the column `pre-training` alone |
| from scratch, 10 %     | a tenth of the training images       |
| masked patch, MAE      | none                                 |
| DINO                   | none                                 |
| DeiT                   | all, and a better teacher's          |
| Noisy Student, 10 %    | a tenth, and a teacher's of the rest |

All rows use one ViT with 16 tokens (16 px, 4 layers of width 64, 139 thousand
parameters) and the same number of pre-training steps. Models trained without
labels are evaluated by 20 nearest neighbours and a linear probe
(`linear_probe`), and fine-tuned with 10 % and with 100 % of the labels. Their
column `pre-training` is the accuracy of 20 neighbours; that of
the other rows is the test accuracy. For DINO, the teacher is evaluated and the
student is fine-tuned.

Arguments:
  seeds: number of seeds, 3 by default.
  epochs: epochs of 50,000 images, 2 by default.
  teacher: path of trained weights; without it, there is no row DeiT.
  labels: directory of `vit_jax.pseudo_label`; without it, there is no row Noisy
    Student.

All seeds share one teacher and its labels. Both are made by the first commands
of configs/noisy_student.py with `--config.image_size=16`, and with the width,
depth and mlp_dim of this study.

No paper has this table; the results are in benchmarks/history/training.md.
Nothing was tuned, and MAE and DINO are known to need much longer training,
larger models and more data.
"""

from typing import Any

from vit_jax.config import parse_arg
from vit_jax.sweeps.grid import Evaluation, Row, Stage, Study, Task

IMAGES, TENTH = 50_000, 5_000
_SIZES = {'model.width': 64, 'model.depth': 4, 'model.mlp_dim': 128}
_COMMON = {
  'image_size': '(16, 16)',
  'log.every': '50 steps',
  'log.tensorboard': 'false',
  'log.curves': 'false',
  'log.report': 'false',
}
_CROPS = {'augment.local_size': '(8,)', 'augment.blur': '(0.3, 0.1, 0.1)'}
# row: (objective, metric of 20 neighbours, suffix of evaluated weights, keys)
WITHOUT_LABELS = {
  'masked patch': ('masked_patch', 'test/20nn', '', {}),
  'MAE': ('mae', 'test/20nn', '', {}),
  'DINO': ('dino', 'test_teacher/20nn', 'teacher/', _CROPS),
}


def get_study(argument: str | None = None) -> Study:
  arg = parse_arg(argument, seeds=3, epochs=2, teacher='', labels='')
  seeds, steps = tuple(range(arg.seeds)), arg.epochs * IMAGES // 64
  length = {
    'total': f'{steps} steps',
    'schedule.warmup': '10 %',
    'checkpoint.every': '25 %',
    **_COMMON,
    **_SIZES,
  }
  # The images that the config holds out are training images here.
  length |= {'train.split': 'train', 'train.num_examples': IMAGES}
  evaluated = {
    'evals.test.every': '100 %',
    'evals.dev.split': 'test',
    'evals.dev.every': '100 %',
  }
  tenth = {'train.split': 'train[:10%]', 'train.num_examples': TENTH}

  def supervised(flags: dict[str, Any]) -> Row:
    keys = length | evaluated | flags
    return Row(
      pretrain=Stage('configs/cifar10.py', 'test/accuracy', keys, seeds)
    )

  rows = {
    'from scratch': supervised({}),
    'from scratch, 10 %': supervised(tenth),
  }
  for name, (objective, metric, ending, keys) in WITHOUT_LABELS.items():
    evaluation = metric.partition('/')[0].removesuffix('_teacher')
    held_out = 'knn' if name == 'DINO' else 'dev'
    evals = {
      f'evals.{evaluation}.every': '100 %',
      f'evals.{held_out}.split': 'test',
      f'evals.{held_out}.every': '100 %',
    }
    flags = length | evals | keys
    config = f'configs/cifar10.py:objective={objective}'
    rows[name] = Row(
      pretrain=Stage(config, metric, flags, seeds), transfers=_transfers(ending)
    )
  if arg.teacher:
    rows['DeiT'] = supervised(
      {
        'objective.name': 'distill',
        'objective.teacher': arg.teacher,
        'model.pool': 'token',
        'model.distilled': 'true',
      }
    )
  if arg.labels:
    student = f'configs/noisy_student.py:data=cifar10,labels={arg.labels}'
    rows['Noisy Student, 10 %'] = Row(
      pretrain=Stage(
        student,
        'val_ema/accuracy',
        {k: v for k, v in length.items() if not k.startswith('train.')},
        seeds,
      )
    )
  return Study(
    title='Toy: CIFAR-10 with few labels or none',
    note='A toy: one small ViT, nothing tuned; see the head of the config.',
    rows=rows,
  )


def _transfers(ending: str) -> dict[str, Evaluation | Task]:
  """What becomes of weights that were trained without labels."""
  return {
    'neighbours': Evaluation('neighbours', f'{ending}20nn', 'test'),
    'linear probe': Evaluation('linear_probe', f'{ending}accuracy', 'test'),
    '10 % labels': _finetuning('train[:10%]', TENTH),
    '100 % labels': _finetuning('train', IMAGES),
  }


def _finetuning(split: str, num_examples: int) -> Task:
  """By AdamW at the pre-training's size: 50,000 images for either."""
  flags = {
    'model.dtype': 'float32',
    'train.split': split,
    'train.num_examples': num_examples,
    'augment.min_area': 0.6,
    'batch_size': 64,
    'total': f'{IMAGES // num_examples} epochs',
    'optimizer.name': 'adam',
    'schedule.base_lr': 5e-4,
    'schedule.warmup': '10 %',
    'evals.test.every': '100 %',
    'checkpoint.every': '100 %',
  }
  config = 'configs/finetune.py:data=cifar10'
  return Task(
    command='finetune', final=Stage(config, 'test/accuracy', flags | _COMMON)
  )
