"""Table 3's ResNets (BiT): --config=configs/resnet.py:variant=R50x1.

Arguments:
  variant: R50x1, R50x2, R101x1, R152x1, R152x2 or R200x3.
  epochs: 7 or 14, for R152x2.
  optimizer: adam or sgd.

Source: Table 3 and section 4.1, pre-training on JFT-300M: Adam with β1 0.9 and
β2 0.999 (also for the ResNets), batch size 4096, 10,000 warm-up steps, linear
decay, weight decay 0.1, 224 px.

Expected ImageNet top-1 after fine-tuning at 384 px, and cost (Table 6):

| variant | epochs | base lr | accuracy | exaFLOPs |
| R50x1   | 7      | 1e-3    | 77.54    | 50       |
| R50x2   | 7      | 1e-3    | 82.12    | 199      |
| R101x1  | 7      | 8e-4    | 80.67    | 96       |
| R152x1  | 7      | 6e-4    | 81.88    | 141      |
| R152x2  | 7      | 6e-4    | 84.97    | 563      |
| R152x2  | 14     | 6e-4    | 85.56    | 1126     |
| R200x3  | 14     | 6e-4    | 87.22    | 3306     |

R200x3 is in Table 6, but Table 3 has no hyperparameters for it; here it uses
those of R152. Not in the paper, and the same as in vit.py: sigmoid
cross-entropy with the bias of the head at -10, the crops, and linear decay
that ends at 1e-5. JFT-300M is not public; the config is for `plan`, and for
your own data with --config.source.dataset.

Table 7 (appendix D.1) compares Adam with optimizer=sgd, ImageNet top-1 after
fine-tuning, 7 epochs:

| variant | Adam  | SGD   |
| R50x1   | 77.54 | 78.24 |
| R152x2  | 84.97 | 84.37 |

The paper uses BiT's hyperparameters for SGD (arXiv 1912.11370) without listing
them: momentum 0.9, base learning rate 0.03 per 256 images (0.48 here), 5,000
warm-up steps, and a tenth of the rate after 10, 23, 30 and 37 of 40 epochs;
here these are the same fractions of 7 epochs. BiT's weight decay of 1e-4 is
part of the gradient; with momentum 0.9, it corresponds to a decoupled one of
1e-3.

For fine-tuning, use configs/finetune.py or configs/finetune_imagenet.py with
--config.model.name=resnet, or configs/finetune_bit.py.
"""

from ml_collections import ConfigDict

from vit_jax.config import complete, parse_arg
from vit_jax.errors import UserError, closest

# variant: (epochs, base lr); Table 3, and Table 6 for the epochs
TABLE_3 = {
  'R50x1': ((7,), 1e-3),
  'R50x2': ((7,), 1e-3),
  'R101x1': ((7,), 8e-4),
  'R152x1': ((7,), 6e-4),
  'R152x2': ((14, 7), 6e-4),
  'R200x3': ((14,), 6e-4),
}
# variant: (remat, micro_batches, unroll), the fastest tried for 32 v3 cores of
# 16 GiB (benchmarks/history/tpu.md); unrolled units take minutes to compile
SPEED = {
  'R50x1': ('none', 1, 8),
  'R50x2': ('none', 2, 8),
  'R101x1': ('none', 1, 23),
  'R152x1': ('none', 1, 36),
  'R152x2': ('dots', 8, 1),
  'R200x3': ('dots', 16, 1),
}


def get_config(argument: str | None = None) -> ConfigDict:
  arg = parse_arg(argument, variant='R50x1', epochs=0, optimizer='adam')
  if arg.variant not in TABLE_3:
    raise UserError(
      f'variant={arg.variant} is no ResNet of Table 3; '
      f'{closest(arg.variant, TABLE_3)}.'
    )
  epochs, base_lr = TABLE_3[arg.variant]
  if arg.epochs and arg.epochs not in epochs:
    raise UserError(
      f'epochs={arg.epochs}: the paper trains {arg.variant} for '
      f'{" or ".join(map(str, epochs))}; another length by --config.total.'
    )
  if arg.optimizer not in ('adam', 'sgd'):
    raise UserError(f'optimizer={arg.optimizer}; allowed are adam and sgd.')
  remat, micro_batches, unroll = SPEED[arg.variant]

  config = ConfigDict()
  config.total = f'{arg.epochs or epochs[0]} epochs'
  config.batch_size = 4096
  config.micro_batches = micro_batches
  config.image_size = (224, 224)
  config.num_classes = 18_291

  config.source = dict(name='tfds', dataset='jft300m')
  config.train = dict(split='train', num_examples=303_000_000)
  config.augment = dict(crop='inception', min_area=0.05, flip=True)
  config.preprocess = dict(resize='central', central_fraction=0.875)

  config.model = dict(
    name='resnet',
    variant=arg.variant,
    head_bias=-10.0,
    dtype='bfloat16',
    remat=remat,
    unroll=unroll,
  )
  config.objective = dict(name='supervised', cross_entropy='sigmoid')
  config.optimizer = dict(
    name='adam', b1=0.9, b2=0.999, weight_decay=0.1, decay_mask='all'
  )
  config.schedule = dict(
    base_lr=base_lr, warmup='10000 steps', decay='linear', end_lr=1e-5
  )
  if arg.optimizer == 'sgd':
    config.optimizer = dict(
      name='sgd', momentum=0.9, weight_decay=1e-3, decay_mask='all'
    )
    config.schedule = dict(
      base_lr=0.03 * config.batch_size / 256,
      warmup='5000 steps',
      decay='step',
      decay_at=(10 / 40, 23 / 40, 30 / 40, 37 / 40),
    )
  config.mesh = dict(data=-1, fsdp=1, model=1, zero1=True)

  config.evals = dict(
    val=dict(
      name='classification',
      split='validation',
      every='1 epochs',
      cross_entropy='sigmoid',
    )
  )
  config.checkpoint = dict(every='2500 steps', keep=3, best='val/accuracy')
  config.log = dict(every='50 steps')
  return complete(config)
