"""Figures 3 and 4 at small scale: CIFAR-10, three small models, three subsets.

python -m vit_jax.study --config=configs/studies/cifar10.py

This is not the paper's experiment. A ViT, a hybrid and a ResNet with a few
hundred thousand parameters are pre-trained on 2,500, 10,000 and 50,000 images
of 16 px, and transferred: by 5-shot and 10-shot regression from their features,
and by fine-tuning at 24 px on 2,500 labelled images. The paper asks whether
ViTs overtake ResNets when the pre-training data grow from 9 M to 300 M images.

Pre-training and transfer have the same ten classes here, but different images:
pre-training uses CIFAR-10's training split only; transfer uses the first half
of the test split for training and the second half, 5,000 images, for
evaluation (so the sample alone causes a standard deviation of .7 % at 50 %).
Larger subsets are used for more steps: 16, 6 and 3 epochs. Each point has one
seed; `:seeds=3` runs three.

`python -m examples.study_results CONFIG WORKDIR` draws the figure.

The paper has no values at this scale. Results (benchmarks/RESULTS.md), 5-shot
and fine-tuned, from 50,000 images, means of three seeds: ViT 38.6, 50.0, hybrid
45.1, 54.0, ResNet 49.1, 54.9 %; no crossover. 41 minutes of processor time per
seed.
"""

from typing import Any

from vit_jax.config import parse_arg
from vit_jax.sweeps.grid import Evaluation, Row, Stage, Study, Task

EPOCHS = {2_500: 16, 10_000: 6, 50_000: 3}
_BODY = {
  'model.width': 96,
  'model.depth': 4,
  'model.mlp_dim': 192,
  'model.num_heads': 4,
}
# Each has a map of 4x4 positions or tokens at 16 px.
MODELS = {
  'ViT': ('vit', _BODY | {'model.patch_size': 4}),
  'hybrid': ('hybrid', _BODY | {'model.patch_size': 1}),
  'ResNet': ('resnet', {}),
}
_QUIET = {
  'log.every': '50 steps',
  'log.tensorboard': 'false',
  'log.curves': 'false',
  'log.report': 'false',
}
_LABELLED, _JUDGED = 'test[:50%]', 'test[50%:]'


def get_study(argument: str | None = None) -> Study:
  arg = parse_arg(argument, seeds=1)
  rows = {
    f'{name}-{size}': _row(name, size, range(arg.seeds))
    for name in MODELS
    for size in EPOCHS
  }
  return Study(
    title='Toy: small models on CIFAR-10 at 16 px, by pre-training images',
    note='A toy: same classes before and after the transfer, other images.',
    rows=rows,
  )


def get_extras(argument: str | None = None) -> dict[str, Any]:
  """Returns the figure, see examples/study_results.py."""
  del argument
  sizes = {f'{name}-{size}': (name, size) for name in MODELS for size in EPOCHS}
  return dict(
    figure=dict(
      x='images',
      columns=('5-shot', '10-shot', 'fine-tuned'),
      lines={row: (name,) for row, (name, _) in sizes.items()},
      places={row: size for row, (_, size) in sizes.items()},
    )
  )


def _row(name: str, size: int, seeds: range) -> Row:
  model, sizes = MODELS[name]
  total = f'{EPOCHS[size]} epochs'
  flags = {
    'image_size': '(16, 16)',
    'train.split': f'train[:{size}]',
    'train.num_examples': size,
    'total': total,
    'schedule.warmup': '10 %',
    'evals.test.split': _JUDGED,
    'evals.test.every': total,
    # The images that the config holds out are training images here.
    'evals.dev.split': _JUDGED,
    'evals.dev.every': total,
    'checkpoint.every': '50 %',
  }
  pretrain = Stage(
    f'configs/cifar10.py:model={model}',
    'test/accuracy',
    flags | sizes | _QUIET,
    tuple(seeds),
  )
  few = {
    'evals.fewshot.train_split': _LABELLED,
    'evals.fewshot.shots': '(5,10)',
  }
  return Row(
    pretrain=pretrain,
    transfers={
      '5-shot': Evaluation('fewshot', '5shot', _JUDGED, flags=few),
      '10-shot': Evaluation('fewshot', '10shot', _JUDGED, flags=few),
      'fine-tuned': Task(command='finetune', final=_finetuning(name)),
    },
  )


def _finetuning(name: str) -> Stage:
  """Section B.1.1's method (SGD, cosine, a larger image), made small."""
  flags = {
    'model.name': 'resnet' if name == 'ResNet' else 'vit',
    'model.dtype': 'float32',
    'image_size': '(24, 24)',
    'train.split': 'test[:2500]',
    'train.num_examples': 2_500,
    'augment.min_area': 0.6,
    'batch_size': 64,
    'total': '4 epochs',
    'schedule.base_lr': 0.01,
    'schedule.warmup': '10 %',
    'evals.test.split': _JUDGED,
    'evals.test.every': '4 epochs',
    'checkpoint.every': '4 epochs',
  }
  return Stage(
    'configs/finetune.py:data=cifar10', 'test/accuracy', flags | _QUIET
  )
