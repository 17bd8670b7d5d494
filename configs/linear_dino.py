"""Linear probing of DINO on ImageNet-1k.

  python -m vit_jax.finetune --config=configs/linear_dino.py:model=S
    --config.init_from=runs/dino --config.init_weights=teacher

Argument:
  model: S or B, as pre-trained by configs/dino.py; or the authors' released
    weights, a .pth file (without --config.init_weights).

Source: arXiv 2104.14294, appendix F.2, and the authors' eval_linear.py: a
linear layer on the class tokens of the last four blocks, each after the last
LayerNorm (S), or on the class token and the mean of the patch tokens of the
last block (B); SGD with momentum 0.9, no weight decay, batch size 1024,
learning rate 0.001 per 256 images (0.004), 100 epochs, cosine decay to 0;
torchvision's random resized crop of 8 % of the area or more, and flips. The
backbone is frozen. The authors recommend to try other learning rates for each
model (--config.schedule.base_lr).

Expected ImageNet top-1, the authors', of the teachers that they released:

| model | S/16 | S/8  | B/16 | B/8  |
| top-1 | 77.0 | 79.7 | 78.2 | 80.1 |

S/16 after the shorter recipes of configs/dino.py: vanilla 74.0, boost 76.0.
None of them has been repeated with this code.

Differences: the learning rate falls with every step, the authors' with every
epoch. Pixels are scaled to [-1, 1], not by ImageNet's mean and standard
deviation; for the authors' files, the patch embedding is rescaled accordingly.
"""

from ml_collections import ConfigDict

from vit_jax.config import complete, parse_arg

FEATURES = {
  'S': dict(last_blocks=4, patch_mean=False),
  'B': dict(last_blocks=1, patch_mean=True),
}
BATCH_SIZE = 1024


def get_config(argument: str | None = None) -> ConfigDict:
  arg = parse_arg(argument, dict(model=FEATURES), model='S')
  config = ConfigDict()
  config.total = '100 epochs'
  config.batch_size = BATCH_SIZE
  config.image_size = (224, 224)
  config.num_classes = 0  # the backbone has no head

  config.source = dict(name='tfds', dataset='imagenet2012')
  config.train = dict(split='train', num_examples=1_281_167)
  config.augment = dict(
    crop='torchvision',
    min_area=0.08,
    interpolation='bilinear_antialias',
    flip=True,
  )
  config.preprocess = dict(
    resize='torchvision', central_fraction=0.875, interpolation='bicubic'
  )

  # The authors compute in full precision.
  config.model = dict(name='vit', dtype='float32')
  config.objective = dict(
    name='linear_probe', num_classes=1_000, **FEATURES[arg.model]
  )
  config.optimizer = dict(
    name='sgd', momentum=0.9, rules=(('model/.*', dict(frozen=True)),)
  )
  config.schedule = dict(base_lr=0.001 * BATCH_SIZE / 256, decay='cosine')
  config.mesh = dict(data=-1, fsdp=1, model=1)

  config.evals = dict(
    val=dict(name='classification', split='validation', every='5 epochs')
  )
  config.checkpoint = dict(every='5 epochs', keep=2, best='val/accuracy')
  config.log = dict(every='50 steps')
  return complete(config)
