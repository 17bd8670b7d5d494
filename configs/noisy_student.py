"""Noisy Student: configs/noisy_student.py:data=i1k,labels=F.npz.

Arguments: data (i1k, cifar10), labels, a file of `vit_jax.pseudo_label`, and
ratio, of images with a teacher's labels to those with people's in a batch.
Without labels it is the first teacher's training. "Self-training with Noisy
Student improves ImageNet classification" (arXiv 1911.04252): a teacher labels
images; a student that is as large or larger learns them and the labelled ones,
under noise; it becomes the teacher, and so on. On CIFAR-10 a tenth of the
training images has labels, and the others lend their images:

  python -m vit_jax.train --config=configs/noisy_student.py:data=cifar10
    --workdir=runs/teacher
  python -m vit_jax.pseudo_label --checkpoint=runs/teacher --weights=ema
    --dataset=cifar10 --split=train[10%:] --per_class=4500 --out=labels.npz
  python -m vit_jax.train --workdir=runs/student
    --config=configs/noisy_student.py:data=cifar10,labels=labels.npz

For a second student the second command takes runs/student.

The paper's recipe, of EfficientNets (in its code too, which is cited where they
differ): probability of a label .3 or more, 130K images a class by copies, soft
labels at temperature 1; RandAugment of 2 operations at magnitude 27, dropout
.5 before the last layer, stochastic depth with .8 for the last layer to stay;
batch 2048 with labels (code: 4096) and up to 3 times as many without, more for
the largest; smoothing .1 of labels by people alone, average of weights .9999.
ImageNet top-1 88.4 by EfficientNet-L2 from JFT-300M.

Here: a ViT (i1k: S/16), so dropout .1 after every layer's parts and stochastic
depth .2, AdamW with DeiT's rate and decay, 1024 images with labels a batch for
ratio 3. No figure of the paper holds for it, and it was not trained at length
here: in a toy of 1,562 steps the student stayed below its teacher
(docs/self_supervised.md).
"""

from typing import Any

from ml_collections import ConfigDict

from vit_jax.config import complete, parse_arg
from vit_jax.data.sources import pseudo_labels
from vit_jax.errors import UserError, closest

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
    totals=('300 epochs', '300 epochs'),  # of teacher and student
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
    totals=('3000 steps', '6000 steps'),
    average_decay=0.999,
    base_lr=1e-3,
    model=SMALL | dict(pool='gap', dtype='float32'),
    noise=dict(dropout=0.1, drop_path=0.1),
  ),
}


def _mixed(config: Any, data: dict[str, Any], path: str, ratio: float) -> None:
  """Both kinds of images in every batch."""
  count = pseudo_labels.about_of(path)['count']
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
  arg = parse_arg(argument, data='i1k', labels='', ratio=3.0)
  if arg.data not in DATA:
    raise UserError(f'there is no data={arg.data}; {closest(arg.data, DATA)}.')
  data = DATA[arg.data]
  config = ConfigDict()
  config.total = data['totals'][bool(arg.labels)]
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
