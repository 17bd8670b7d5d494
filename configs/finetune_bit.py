"""BiT's fine-tuning of ResNets: configs/finetune_bit.py:data=NAME.

Arguments:
  data: a row of the table below.
  dev: 1 to train on a part of the training data and evaluate on the rest.

Source: "Big Transfer" (arXiv 1912.11370, section 3.3, the "BiT-HyperRule"):
SGD with momentum 0.9, batch size 512, learning rate 0.003 for every dataset,
no weight decay, a tenth of the rate after 30, 60 and 90 % of the training. The
rest depends on the number of examples and the size of the images; the last
column is the published accuracy in %:

| data              | steps  | warm-up | mixup | images      | R152x4 from JFT |
| imagenet          | 20,000 | 500     | 0.1   | 448 -> 384  | 87.54           |
| cifar10           | 10,000 | 500     | 0.1   | 160 -> 128  | 99.37           |
| cifar100          | 10,000 | 500     | 0.1   | 160 -> 128  | 93.51           |
| oxford_iiit_pet   | 500    | 100     | none  | 448 -> 384  | 96.62           |
| oxford_flowers102 | 500    | 100     | none  | 448 -> 384  | 99.63           |

"448 -> 384" means that a training image is resized to a square of 448 pixels,
of which a random square of 384 is cut out and flipped at random; evaluation
resizes the whole image to 384. Images below 96x96 pixels get 160 and 128.

The ViT paper (section B.1.1) fine-tunes ResNets with this recipe and with its
own (configs/finetune.py and finetune_imagenet.py), and reports the better
result. The last column is Table 2's BiT-L; this project has no R152x4 of its
own, but R50x1 to R200x3 (configs/resnet.py).

From the authors' public code, since the paper does not state it: the warm-up;
for 500 steps, the rate falls at 200, 300 and 400 steps. Difference from that
code: its larger images are 512 -> 480, as the paper uses for R152x4 only.
"""

from ml_collections import ConfigDict

from vit_jax.config import complete, loading, parse_arg
from vit_jax.data.augment import presets

# data: (steps, warm-up steps, decay_at, mixup, image size)
_SMALL = (500, 100, (0.4, 0.6, 0.8), 0.0)
_MEDIUM = (10_000, 500, (0.3, 0.6, 0.9), 0.1)
_LARGE = (20_000, 500, (0.3, 0.6, 0.9), 0.1)
RULE = {
  'imagenet': (*_LARGE, 384),
  'cifar10': (*_MEDIUM, 128),
  'cifar100': (*_MEDIUM, 128),
  'oxford_iiit_pet': (*_SMALL, 384),
  'oxford_flowers102': (*_SMALL, 384),
}
ENLARGED = {384: 448, 128: 160}  # pixels


def get_config(argument: str | None = None) -> ConfigDict:
  arg = parse_arg(argument, dict(data=RULE), data='cifar10', dev=0)
  steps, warmup, decay_at, mixup, side = RULE[arg.data]
  # Datasets, splits and evaluation are those of the ViT paper's recipe.
  base = f'configs/finetune.py:data={arg.data},dev={arg.dev}'
  if arg.data == 'imagenet':
    base = f'configs/finetune_imagenet.py:dev={arg.dev}'
  config = ConfigDict(loading.load(base).to_dict())
  config.total = f'{steps} steps'
  config.image_size = (side, side)
  config.augment = dict(crop='squash', enlarge=ENLARGED[side] / side, flip=True)
  config.preprocess = presets.section('vit', config.image_size)
  config.mix = dict(mixup=mixup)
  config.model = dict(name='resnet', remat='dots')
  config.optimizer = dict(name='sgd', momentum=0.9)
  config.schedule = dict(
    base_lr=0.003, warmup=f'{warmup} steps', decay='step', decay_at=decay_at
  )
  return complete(config)
