"""Fine-tuning on the small sets of Table 4: configs/finetune.py:data=NAME.

SGD momentum .9, batch 512, cosine, no weight decay, clip 1, 384 px (section
B.1.1). The architecture is that of the weights in --config.init_from.

| data              | steps  | learning rates tried | dev   | L/16 from i21k |
| cifar10           | 10,000 | .001 .003 .01 .03    | 2 %   | 99.16          |
| cifar100          | 10,000 | .001 .003 .01 .03    | 2 %   | 93.44          |
| oxford_iiit_pet   | 500    | .001 .003 .01 .03    | 10 %  | 94.73          |
| oxford_flowers102 | 500    | .001 .003 .01 .03    | 10 %  | 99.61          |
| vtab              | 2,500  | .01                  | 200   | 72.72 (mean)   |

Expected top-1 (%, Table 5, from ImageNet-21k; in this order B/16, B/32, L/16,
L/32, H/14): CIFAR-10 98.95 98.79 99.16 99.13 99.27; CIFAR-100 91.67 91.97 93.44
93.04 93.82; Pets 94.43 93.02 94.73 93.09 94.82; Flowers 99.38 99.11 99.61 99.19
99.51. VTAB means in Table 2: 77.63 (H/14), 76.28 (L/16 JFT), 72.72 (L/16 i21k).

The rate is chosen on the dev split (`:data=cifar10,dev=1`), then the final run
trains on everything; the sweep is a shell loop over --config.schedule.base_lr
as in finetune_imagenet.py. For VTAB-1k (19 tasks, 800 + 200 training examples)
name the task: `:data=vtab --config.source.dataset=dtd --config.num_classes=47`,
and, where it has no validation split, --config.train.split.

L/16 fits 32 TPU v3 cores, and 8 with --config.micro_batches=4 (by `plan`).

Warm-up is not in the paper: 500 steps in the authors' code, 100 for Pets and
Flowers. Evaluation squashes the whole image to a square, as that code does.
"""

from ml_collections import ConfigDict

from vit_jax.config import complete, parse_arg
from vit_jax.errors import UserError, closest

# data: (steps, warm-up steps, classes)
TABLE_4 = {
  'cifar10': (10_000, 500, 10),
  'cifar100': (10_000, 500, 100),
  'oxford_iiit_pet': (500, 100, 37),
  'oxford_flowers102': (500, 100, 102),
  'vtab': (2_500, 500, 47),
}
# data: final training split and size; training split and size, dev split
SPLITS = {
  'cifar10': (('train', 50_000), ('train[:98%]', 49_000, 'train[98%:]')),
  'cifar100': (('train', 50_000), ('train[:98%]', 49_000, 'train[98%:]')),
  'oxford_iiit_pet': (
    ('train', 3_680),
    ('train[:90%]', 3_312, 'train[90%:]'),
  ),
  'oxford_flowers102': (
    ('train+validation', 2_040),
    (
      'train[:90%]+validation[:90%]',
      1_836,
      'train[90%:]+validation[90%:]',
    ),
  ),
  'vtab': (
    ('train[:800]+validation[:200]', 1_000),
    ('train[:800]', 800, 'validation[:200]'),
  ),
}


def get_config(argument: str | None = None) -> ConfigDict:
  arg = parse_arg(argument, data='cifar10', dev=0)
  if arg.data not in TABLE_4:
    raise UserError(f'data={arg.data!r}; {closest(arg.data, TABLE_4)}.')
  steps, warmup, num_classes = TABLE_4[arg.data]
  (split, num_examples), dev = SPLITS[arg.data]
  test = 'test'
  if arg.dev:
    split, num_examples, test = dev

  config = ConfigDict()
  config.total = f'{steps} steps'
  config.batch_size = 512
  config.image_size = (384, 384)
  config.num_classes = num_classes

  dataset = 'dtd' if arg.data == 'vtab' else arg.data
  config.source = dict(name='tfds', dataset=dataset)
  config.train = dict(split=split, num_examples=num_examples)
  config.augment = dict(crop='inception', min_area=0.05, flip=True)
  config.preprocess = dict(resize='squash')

  config.model = dict(name='vit', remat='dots')
  config.objective = dict(name='supervised', cross_entropy='softmax')
  config.optimizer = dict(name='sgd', momentum=0.9, clip_norm=1.0)
  config.schedule = dict(base_lr=0.01, decay='cosine', warmup=f'{warmup} steps')
  config.evals = dict(
    test=dict(name='classification', split=test, every='10 %')
  )
  config.checkpoint = dict(every='25 %', keep=2)
  return complete(config)
