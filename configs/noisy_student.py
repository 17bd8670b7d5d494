"""Noisy Student: configs/noisy_student.py:data=i1k,labels=DIR.

Arguments:
  data: i1k or cifar10.
  labels: a directory written by `vit_jax.pseudo_label`; without it, the
    config trains the first teacher.
  ratio: images with a teacher's labels per image with human labels in a batch.

Source: "Self-training with Noisy Student improves ImageNet classification"
(arXiv 1911.04252). A teacher labels images; a student that is as large or
larger learns these and the labelled images, under noise; it becomes the next
teacher. On CIFAR-10, a tenth of the training images is used with its labels,
and the others without:

  python -m vit_jax.train --config=configs/noisy_student.py:data=cifar10
    --workdir=runs/teacher
  python -m vit_jax.pseudo_label --checkpoint=runs/teacher --weights=ema
    --dataset=cifar10 --split=train[10%:] --per_class=4500 --out=labels
  python -m vit_jax.train --workdir=runs/student
    --config=configs/noisy_student.py:data=cifar10,labels=labels

For a second student, run the second command with runs/student.

The paper's recipe, for EfficientNets (and its code where they differ):
confidence of a pseudo-label 0.3 or more, 130K images per class by copies, soft
labels at temperature 1; RandAugment with two operations of magnitude 27,
dropout 0.5 before the last layer, stochastic depth with survival probability
0.8 in the last layer; batch size 2048 with labels (code: 4096) and up to 3
times as many without, more for the largest models; label smoothing 0.1 of
human labels only, average of weights 0.9999; 109,474 steps of 4,096 labelled
images, 350 epochs of them (code). ImageNet top-1 88.4 by EfficientNet-L2 with
JFT-300M.

Here: a ViT (i1k: S/16), so dropout 0.1 in every layer and stochastic depth
0.2; AdamW with DeiT's rate and decay and gradients clipped at global norm 1;
1024 labelled images per batch for ratio 3. Lengths are counted in epochs of
the labelled images: 350 for teacher and student. The paper's figures do not
apply to it, and it was not trained at length here. In a small run of 1,562
steps, the student stayed below its teacher (benchmarks/history/training.md).
"""

from typing import Any

from ml_collections import ConfigDict

from vit_jax.config import complete, parse_arg
from vit_jax.data.sources import pseudo_labels

SMALL = dict(patch_size=4, width=96, depth=5, mlp_dim=192, num_heads=4)
DATA = {
  'i1k': dict(
    dataset='imagenet2012',
    split='train',
    num_examples=1_281_167,
    val='validation',
    num_classes=1_000,
    image_size=(224, 224),
    min_area=0.08,
    magnitude=27.0,
    batch_size=4096,
    epochs=(350, 350),  # of labelled images, teacher and student
    average_decay=0.9999,
    base_lr=4e-3,
    model=dict(variant='S/16', dtype='bfloat16', unroll=12),
    noise=dict(dropout=0.1, drop_path=0.2),
  ),
  'cifar10': dict(
    dataset='cifar10',
    split='train[:10%]',
    num_examples=5_000,
    val='test',
    num_classes=10,
    image_size=(32, 32),
    min_area=0.6,
    magnitude=9.0,
    batch_size=64,
    epochs=(38, 307),
    average_decay=0.999,
    base_lr=1e-3,
    model=SMALL | dict(pool='gap', dtype='float32'),
    noise=dict(dropout=0.1, drop_path=0.1),
  ),
}


def _mixed(config: Any, data: dict[str, Any], path: str, ratio: float) -> None:
  """Changes a config so that every batch has images of both kinds."""
  count = int(pseudo_labels.copies(path).sum())
  config.source = dict(
    name='mixture',
    members=dict(
      labelled=dict(name='tfds', dataset=data['dataset'], weight=1.0),
      unlabelled=dict(name='pseudo_labels', path=path, weight=ratio),
    ),
  )
  config.train = dict(
    split=f'labelled/{data["split"]},unlabelled/train',
    num_examples=data['num_examples'] + count,
  )
  config.evals.val.split = f'labelled/{data["val"]}'


def get_config(argument: str | None = None) -> ConfigDict:
  arg = parse_arg(argument, dict(data=DATA), data='i1k', labels='', ratio=3.0)
  data = DATA[arg.data]
  config = ConfigDict()
  teacher_epochs, student_epochs = data['epochs']
  epochs = student_epochs if arg.labels else teacher_epochs
  unlabelled_ratio = arg.ratio if arg.labels else 0
  labelled = data['batch_size'] / (1 + unlabelled_ratio)  # images of a batch
  steps = int(epochs * data['num_examples'] / labelled)
  config.total = f'{steps} steps'
  config.batch_size = data['batch_size']
  config.image_size = data['image_size']
  config.num_classes = data['num_classes']
  config.average_decay = data['average_decay']

  config.source = dict(name='tfds', dataset=data['dataset'])
  config.train = dict(split=data['split'], num_examples=data['num_examples'])
  config.augment = dict(
    name='soft_labels',
    num_classes=data['num_classes'],
    label_smoothing=0.1,
    crop='inception',
    min_area=data['min_area'],
    flip=True,
    randaugment_layers=2,
    randaugment_magnitude=data['magnitude'],
    randaugment_policy='authors',
  )
  config.preprocess = dict(resize='central', central_fraction=0.875)
  if arg.data == 'cifar10':
    config.preprocess = dict(resize='squash')

  config.model = dict(name='vit') | data['model'] | data['noise']
  config.objective = dict(name='supervised', cross_entropy='softmax')
  config.optimizer = dict(
    name='adam', weight_decay=0.05, decay_mask='kernels', clip_norm=1.0
  )
  config.schedule = dict(
    base_lr=data['base_lr'], warmup='5 %', decay='cosine', end_lr=1e-5
  )

  config.evals = dict(
    val=dict(name='classification', split=data['val'], every='10 %')
  )
  config.checkpoint = dict(every='10 %', keep=2)
  if arg.labels:
    _mixed(config, data, arg.labels, arg.ratio)
  return complete(config)
