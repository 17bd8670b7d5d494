"""DeiT-III on ImageNet-1k: --config=configs/deit3.py:model=B.

Arguments:
  model: S, B, L or H.
  tune: 1 for the second stage of B, L and H, 20 epochs at 224 px (`train
    --config.init_from=PATH`, which keeps the head).

Source: "DeiT III: Revenge of the ViT" (arXiv 2204.07118) with the authors'
commands: LAMB, learning rate 4e-3 (S) or 3e-3, batch size 2048, 800 epochs, 5
epochs of warm-up, cosine decay to 1e-5, weight decay 0.05, binary
cross-entropy without label smoothing, in which both classes of a mixed image
are full targets, mixup 0.8 or cutmix 1, 3-Augment and colour jitter 0.3,
repeated augmentation with 3 copies, LayerScale initialized at 1e-4, the same
drop path rate in all layers, pixels and initial values as in deit.py, and
evaluation of the whole centre of the image.
The second stage uses AdamW at 1e-5, which after the warm-up stays constant
(their minimum rate is 1e-5 too), and bicubic interpolation of the position
embeddings.

Expected ImageNet top-1 at 224 px (the authors' figures; B, L and H after the
second stage):

| model | training pixels | drop path | top-1 |
| S/16  | 224             | .05       | 81.4  |
| B/16  | 192             | .2        | 83.8  |
| L/16  | 192             | .45       | 84.9  |
| H/14  | 160             | .6 (.55)  | 85.2  |

Differences: those of deit.py. The loss is summed over classes where theirs is
the mean; the steps of LAMB do not depend on that factor. Their optimizer also
clips gradients at global norm 1. This is omitted here, because their loss and
hence their gradients are a thousand times smaller.
"""

from ml_collections import ConfigDict

from vit_jax.config import complete, parse_arg
from vit_jax.errors import UserError, closest

# variant, pixels, base lr, drop path, drop path of the second stage
ROWS = {
  'S': ('S/16', 224, 4e-3, 0.05, None),
  'B': ('B/16', 192, 3e-3, 0.2, 0.2),
  'L': ('L/16', 192, 3e-3, 0.45, 0.45),
  'H': ('H/14', 160, 3e-3, 0.6, 0.55),
}
# In the authors' layers, query, key and value are one matrix.
QKV = ('query|key|value',)


def get_config(argument: str | None = None) -> ConfigDict:
  arg = parse_arg(argument, model='B', tune=0)
  if arg.model not in ROWS:
    raise UserError(
      f'there is no DeiT-III {arg.model}; {closest(arg.model, ROWS)}.'
    )
  variant, pixels, base_lr, drop_path, tuned_drop_path = ROWS[arg.model]
  if arg.tune and tuned_drop_path is None:
    raise UserError(
      'DeiT-III S is trained at 224 px at once: leave out tune=1.'
    )
  config = ConfigDict()
  config.total = '20 epochs' if arg.tune else '800 epochs'
  config.batch_size = 512 if arg.tune else 2048
  side = 224 if arg.tune else pixels
  config.image_size = (side, side)
  config.num_classes = 1_000

  config.source = dict(name='tfds', dataset='imagenet2012')
  config.train = dict(
    split='train', num_examples=1_281_167, repeats=1 if arg.tune else 3
  )
  augment = dict(crop='torchvision', min_area=0.08, interpolation='bicubic')
  if arg.tune:
    config.augment = augment | dict(
      randaugment_layers=2, randaugment_magnitude=9.0
    )
  else:
    config.augment = augment | dict(three_augment=True, color_jitter=0.3)
  config.mix = dict(mixup=0.8, cutmix=1.0)
  config.preprocess = dict(
    resize='torchvision', central_fraction=1.0, interpolation='bicubic'
  )

  rate = tuned_drop_path if arg.tune else drop_path
  config.model = dict(
    name='vit',
    variant=variant,
    layer_scale=1e-4,
    drop_path=rate,
    drop_path_first=rate,
    # Patches have positions, and the class token does not.
    prefix_positions=False,
    gelu='exact',
    start_values='trunc_normal',
    pixels='imagenet',
    # 160 px hold 11x11 patches of 14 px; the last 6 pixels are dropped.
    remainder='drop' if arg.model == 'H' else 'error',
    dtype='bfloat16',
    remat='dots' if arg.model == 'H' else 'none',
    unroll=1 if arg.model == 'H' else 24,
  )
  if arg.tune:
    config.objective = dict(
      name='supervised', cross_entropy='softmax', label_smoothing=0.1
    )
    config.optimizer = dict(name='adam', weight_decay=0.1, decay_mask='kernels')
    config.schedule = dict(
      base_lr=1e-5, warmup='5 epochs', decay='cosine', end_lr=1e-5
    )
    # As in the authors' main.py, for weights of any project.
    config.position_resize = 'bicubic_no_antialias'
  else:
    config.objective = dict(
      name='supervised', cross_entropy='sigmoid', multi_hot=True
    )
    config.optimizer = dict(
      name='lamb',
      weight_decay=0.05,
      decay_mask='kernels',
      trust_joined=QKV,
    )
    config.schedule = dict(
      base_lr=base_lr, warmup='5 epochs', decay='cosine', end_lr=1e-5
    )

  config.evals = dict(
    val=dict(name='classification', split='validation', every='5 epochs')
  )
  config.checkpoint = dict(every='2500 steps', keep=3, best='val/accuracy')
  config.log = dict(every='50 steps')
  return complete(config)
