"""Swin Transformers on ImageNet-1k: --config=configs/swin_i1k.py:variant=T.

Argument:
  variant: T, S or B.

Source: "Swin Transformer" (arXiv 2103.14030, appendix A2.1) with the authors'
code: AdamW with β1 0.9 and β2 0.999, 300 epochs, batch size 1024, 20 epochs of
warm-up, base learning rate 1e-3, cosine decay to 1e-5, weight decay 0.05 on
kernels only, gradients clipped at global norm 5, drop path 0.2, 0.3 and 0.5,
torchvision's random resized crop, RandAugment with two operations of magnitude
9, random erasing 0.25, mixup 0.8 or cutmix 1, label smoothing 0.1, no average
of weights, pixels normalized by ImageNet's mean and standard deviation, initial
values from N(0, 0.02).

Expected ImageNet top-1 at 224 px, parameters and multiply-adds (Table 1):

| variant | top-1 | parameters | multiply-adds |
| T       | 81.2  | 28.3 M     | 4.5 G         |
| S       | 83.2  | 49.6 M     | 8.7 G         |
| B       | 83.5  | 87.8 M     | 15.4 G        |

The paper does not state the cost of training.

Differences: the warm-up starts at 0, the authors' at 5e-7 per 512 images.
Mixup and cutmix draw a ratio for each pair of examples (objectives/mixing.py).
The authors' colour jitter has no effect, because timm ignores it when
RandAugment is used; it is omitted here.
"""

from ml_collections import ConfigDict

from vit_jax.config import complete, parse_arg
from vit_jax.errors import UserError, closest

DROP_PATH = {'T': 0.2, 'S': 0.3, 'B': 0.5}  # appendix A2.1


def get_config(argument: str | None = None) -> ConfigDict:
  arg = parse_arg(argument, variant='T')
  if arg.variant not in DROP_PATH:
    raise UserError(
      f'the paper trains no Swin-{arg.variant} from scratch on ImageNet-1k; '
      f'{closest(arg.variant, DROP_PATH)}.'
    )
  config = ConfigDict()
  config.total = '300 epochs'
  config.batch_size = 1024
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
  )
  config.mix = dict(mixup=0.8, cutmix=1.0, erasing=0.25)
  # The smaller side is resized to 256, and the centre has 224 pixels.
  config.preprocess = dict(
    resize='torchvision', central_fraction=0.875, interpolation='bicubic'
  )

  config.model = dict(
    name='swin',
    variant=arg.variant,
    window_size=7,
    pixels='imagenet',
    drop_path=DROP_PATH[arg.variant],
    dtype='bfloat16',
    unroll=9,  # all pairs of blocks; a sixth faster on TPU v3
  )
  config.objective = dict(
    name='supervised', cross_entropy='softmax', label_smoothing=0.1
  )
  config.optimizer = dict(
    name='adam',
    b1=0.9,
    b2=0.999,
    weight_decay=0.05,
    decay_mask='kernels',  # neither biases nor norms nor bias tables
    clip_norm=5.0,
  )
  # 5e-4 and 5e-6 per 512 images.
  config.schedule = dict(
    base_lr=1e-3, warmup='20 epochs', decay='cosine', end_lr=1e-5
  )
  config.mesh = dict(data=-1, fsdp=1, model=1)

  config.evals = dict(
    val=dict(name='classification', split='validation', every='5 epochs')
  )
  config.checkpoint = dict(every='2500 steps', keep=3, best='val/accuracy')
  config.log = dict(every='50 steps')
  return complete(config)
