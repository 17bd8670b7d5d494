"""Linear probing of masked autoencoders on ImageNet-1k.

  python -m vit_jax.finetune --config=configs/linear_mae.py:model=B
    --config.init_from=runs/mae:model=B

Argument:
  model: B, L or H, as pre-trained by configs/mae.py; or the authors' released
    weights, a .pth file.

Source: arXiv 2111.06377, appendix A.1 and its table of the linear-probing
setting, and the authors' main_linprobe.py: a linear layer on the class token
after the last LayerNorm, with a batch normalization without scale and shift
before it; LARS with momentum 0.9, no weight decay, batch size 16384, base
learning rate 0.1 per 256 images (6.4), 10 epochs of warm-up, cosine decay to
0; torchvision's random resized crop of 8 % of the area or more, and flips. The
backbone is frozen.

Expected ImageNet top-1, the paper's, after 1600 epochs of pre-training:

| model | epochs | top-1 |
| B     | 90     | 68.0  |
| L     | 50     | 75.8  |
| H     | 50     | 76.6  |

None of them has been repeated with this code.

Differences: batch statistics are those of the whole batch, the authors' of the
512 images of each GPU, and their running statistics those of the first GPU.
Pixels are scaled to [-1, 1], not by ImageNet's mean and standard deviation; for
the authors' files, the patch embedding is rescaled accordingly.
"""

from ml_collections import ConfigDict

from vit_jax.config import complete, parse_arg
from vit_jax.errors import UserError, closest

EPOCHS = {'B': 90, 'L': 50, 'H': 50}
BATCH_SIZE = 16_384


def get_config(argument: str | None = None) -> ConfigDict:
  arg = parse_arg(argument, model='B')
  if arg.model not in EPOCHS:
    raise UserError(
      f'model={arg.model} is not a row of the paper; '
      f'{closest(arg.model, EPOCHS)}.'
    )
  config = ConfigDict()
  config.total = f'{EPOCHS[arg.model]} epochs'
  config.batch_size = BATCH_SIZE
  config.image_size = (224, 224)
  config.num_classes = 0  # the backbone has no head

  config.source = dict(name='tfds', dataset='imagenet2012')
  config.train = dict(split='train', num_examples=1_281_167)
  config.augment = dict(
    crop='torchvision', min_area=0.08, interpolation='bicubic', flip=True
  )
  config.preprocess = dict(
    resize='central', central_fraction=0.875, interpolation='bicubic'
  )

  config.model = dict(name='vit', dtype='bfloat16')
  config.objective = dict(
    name='linear_probe', num_classes=1_000, batch_norm=True
  )
  config.optimizer = dict(
    name='lars', momentum=0.9, rules=(('model/.*', dict(frozen=True)),)
  )
  config.schedule = dict(
    base_lr=0.1 * BATCH_SIZE / 256, warmup='10 epochs', decay='cosine'
  )
  config.mesh = (
    dict(data=1, fsdp=-1, model=1)
    if arg.model == 'H'
    else dict(data=-1, fsdp=1, model=1)
  )

  config.evals = dict(
    val=dict(name='classification', split='validation', every='5 epochs')
  )
  config.checkpoint = dict(every='5 epochs', keep=2, best='val/accuracy')
  config.log = dict(every='20 steps')
  return complete(config)
