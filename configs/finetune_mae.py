"""Fine-tuning of masked autoencoders on ImageNet-1k, end to end.

  python -m vit_jax.finetune --config=configs/finetune_mae.py:model=L
    --config.init_from=runs/mae:model=L

Argument:
  model: B, L or H, as pre-trained by configs/mae.py; or the authors' released
    weights, a .pth file.

Source: arXiv 2111.06377, appendix A.1 and Table 9, and the authors' FINETUNE.md
where it differs (on purpose, according to issues 7 and 130 of their
repository): batch size 1024, AdamW with β1 0.9 and β2 0.999, weight decay 0.05,
5 epochs of warm-up, cosine decay to 1e-6, torchvision's random resized crop of
8 % of the area or more, flips, RandAugment (9, 0.5), random erasing 0.25, mixup
0.8 or cutmix 1, label smoothing 0.1, pixels normalized by ImageNet's mean and
standard deviation (the patch embedding of the weights is converted to these
units). The head reads the mean of the patch tokens after a new LayerNorm. The
following depend on the model (learning rate per 256 images):

| model | epochs | lr   | layer decay | drop path | top-1 (Table 3) |
| B     | 100    | 5e-4 | .65         | .1        | 83.6 (± .08)    |
| L     | 50     | 1e-3 | .75         | .2        | 85.9            |
| H     | 50     | 1e-3 | .75         | .3        | 86.9            |

Layer decay d multiplies the learning rate of layer i of n, counted from 1, by
d^(n + 1 − i), and that of class token, positions and patch embedding by
d^(n + 1). Only matrices have a weight decay. All of this is as in the authors'
code; parameters that their models lack follow timm: registers and distillation
token are treated like the class token, and the parameters of a layer, such as
LayerScale or relative positions, have its rate.

Differences: the head starts at 0, the authors' at N(0, 2e-5). The sine-cosine
positions of our own pre-training stay fixed; the authors train them from there
(those in their files are trained here, too). Mixup and cutmix draw a ratio for
each pair of examples (objectives/mixing.py).
"""

from typing import NamedTuple

from ml_collections import ConfigDict

from vit_jax.config import complete, parse_arg
from vit_jax.errors import UserError, closest


class Row(NamedTuple):
  """Settings of one model; `lr` is the learning rate per 256 images."""

  depth: int
  epochs: int
  lr: float
  layer_decay: float
  drop_path: float
  micro_batches: int


MODELS = {
  'B': Row(12, 100, 5e-4, 0.65, 0.1, 1),
  'L': Row(24, 50, 1e-3, 0.75, 0.2, 1),
  'H': Row(32, 50, 1e-3, 0.75, 0.3, 2),
}


def get_config(argument: str | None = None) -> ConfigDict:
  arg = parse_arg(argument, model='B')
  if arg.model not in MODELS:
    raise UserError(
      f'model={arg.model} is not a row of the paper; '
      f'{closest(arg.model, MODELS)}.'
    )
  row = MODELS[arg.model]
  config = ConfigDict()
  config.total = f'{row.epochs} epochs'
  config.batch_size = 1024
  config.micro_batches = row.micro_batches
  config.image_size = (224, 224)
  config.num_classes = 1_000

  config.source = dict(name='tfds', dataset='imagenet2012')
  config.train = dict(split='train', num_examples=1_281_167)
  config.augment = dict(
    crop='torchvision',
    min_area=0.08,
    interpolation='bicubic',
    flip=True,
    randaugment_layers=2,
    randaugment_magnitude=9.0,
    randaugment_policy='timm',
  )
  config.mix = dict(mixup=0.8, cutmix=1.0, erasing=0.25)
  # The smaller side is resized to 256, and the centre has 224 pixels.
  config.preprocess = dict(
    resize='torchvision', central_fraction=0.875, interpolation='bicubic'
  )

  config.model = dict(
    name='vit',
    fc_norm=True,
    pixels='imagenet',
    drop_path=row.drop_path,
    dtype='bfloat16',
    remat='dots',
    unroll=row.depth if arg.model != 'H' else 1,
  )
  config.objective = dict(
    name='supervised', cross_entropy='softmax', label_smoothing=0.1
  )
  config.optimizer = dict(
    name='adam',
    b1=0.9,
    b2=0.999,
    weight_decay=0.05,
    decay_mask='kernels',
    layer_decay=row.layer_decay,
  )
  config.schedule = dict(
    base_lr=row.lr * 1024 / 256, warmup='5 epochs', decay='cosine', end_lr=1e-6
  )
  config.mesh = (
    dict(data=1, fsdp=-1, model=1)
    if arg.model == 'H'
    else dict(data=-1, fsdp=1, model=1, zero1=True)
  )

  config.evals = dict(
    val=dict(name='classification', split='validation', every='5 epochs')
  )
  config.checkpoint = dict(every='2500 steps', keep=2, best='val/accuracy')
  config.log = dict(every='50 steps')
  return complete(config)
