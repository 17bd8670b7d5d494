"""DINO on ImageNet-1k (arXiv 2104.14294): configs/dino.py:variant=S/16.

Arguments:
  recipe: vanilla, boost or released.
  variant: S/16, S/8, B/16 or B/8.

The authors published three recipes, which differ:

|                      | vanilla        | boost            | released S/16    |
| epochs, batch        | 100, 512       | 300, 1024        | 800, 1024        |
| teacher temperature  | .04            | .04 to .07, 30 ep| .04 to .07, 30 ep|
| norm of prototypes   | 1              | learned (B: 1)   | learned          |
| 2 global crops' area | .4 to 1        | .4 to 1          | .25 to 1         |
| local crops of 96 px | 8              | 8                | 10               |
| their area           | .05 to .4      | .05 to .4        | .05 to .25       |
| clipping, last rate  | 3, 1e-6        | 3, 1e-6          | none, 1e-5       |
| S/16: kNN, linear    | 69.3, 74.0     | 73.3, 76.0       | 74.5, 77.0       |

Each of the released weights has its own recipe, according to its args.txt (as
quoted by others; RELEASED below). S/8: 800 epochs with batch size 1024, 10
local crops, areas as in vanilla. B/16: 400 epochs with batch size 1024,
learning rate 7.5e-4 per 256 images, clipping at 0.3, 50 epochs of rising
temperature, prototypes with norm 1 that are frozen for 3 epochs. B/8: 300
epochs with batch size 1056, temperature from 0.03. All were trained in full
precision: model.dtype=float32 and objective.head.dtype=float32.

All recipes: AdamW with β1 0.9 and β2 0.999, learning rate 5e-4 per 256 images,
10 epochs of warm-up, cosine decay to 1e-6; weight decay rising from 0.04 to
0.4 by a cosine, none for biases and other one-dimensional parameters;
gradients of each tensor clipped at norm 3; the last layer frozen in the first
epoch; drop path 0.1 in the student; teacher momentum rising from 0.996 to 1 by
a cosine; 65,536 prototypes. For a batch size of 256 the authors recommend
objective.momentum=0.9995, and for patches of 8 px full precision.

Expected ImageNet top-1 (the authors' figures, nearest neighbours and linear
probe on the teacher's frozen features): S/16 as in the table above; released
weights of S/8 78.3 and 79.7, B/16 76.1 and 78.2, B/8 77.4 and 80.1. Cost of
S/16 (the authors'): vanilla 1.75 days on 8 GPUs, boost 2.6 days on 16.

Differences: images are in [-1, 1], not normalized by ImageNet's mean and
standard deviation. The ViT is initialized like the official JAX models, the
authors' from N(0, 0.02). The warm-up reaches its peak one step later. An epoch
is 1/epochs of all steps, whereas theirs drops the last partial batch.
"""

from typing import Any, NamedTuple

from ml_collections import ConfigDict

from vit_jax.config import complete, parse_arg

VARIANTS = ('S/16', 'S/8', 'B/16', 'B/8')
WIDE = dict(global_area=(0.4, 1.0), local_area=(0.05, 0.4))
NARROW = dict(global_area=(0.25, 1.0), local_area=(0.05, 0.25))
WARM = dict(teacher_temperature=0.07, temperature_warmup='30 epochs')
LONG = dict(teacher_temperature=0.07, temperature_warmup='50 epochs')


class Recipe(NamedTuple):
  """Settings in which the recipes differ.

  Attributes:
    epochs: length of the training.
    batch: number of images of a batch.
    crops: keys of the transform.
    temperature: keys of the objective.
    learned_norm: whether the norms of prototypes are learned; only for S (B
      collapses).
    rate: learning rate for each 256 images of a batch.
    end_lr: final learning rate, for any batch size.
    clip: largest norm of the gradient of a tensor.
    frozen_epochs: epochs at the start in which the prototypes do not change.
  """

  epochs: int
  batch: int
  crops: dict[str, Any]
  temperature: dict[str, Any]
  learned_norm: bool
  rate: float = 5e-4
  end_lr: float = 1e-6
  clip: float | None = 3.0
  frozen_epochs: int = 1


RECIPES = {
  'vanilla': Recipe(100, 512, WIDE | dict(local_crops=8), {}, False),
  'boost': Recipe(300, 1024, WIDE | dict(local_crops=8), WARM, True),
}
TEN = dict(local_crops=10)
RELEASED = {
  'S/16': Recipe(800, 1024, NARROW | TEN, WARM, True, end_lr=1e-5, clip=None),
  'S/8': Recipe(800, 1024, WIDE | TEN, WARM, True),
  'B/16': Recipe(
    400,
    1024,
    NARROW | TEN,
    LONG,
    False,
    rate=7.5e-4,
    end_lr=2e-6,
    clip=0.3,
    frozen_epochs=3,
  ),
  'B/8': Recipe(
    300,
    1056,
    NARROW | TEN,
    LONG | dict(warmup_temperature=0.03),
    False,
    end_lr=2e-6,
    frozen_epochs=3,
  ),
}


def get_config(argument: str | None = None) -> ConfigDict:
  choices = dict(variant=VARIANTS, recipe=(*RECIPES, 'released'))
  arg = parse_arg(argument, choices, variant='S/16', recipe='vanilla')
  recipe = (RECIPES | {'released': RELEASED[arg.variant]})[arg.recipe]

  config = ConfigDict()
  config.total = f'{recipe.epochs} epochs'
  config.batch_size = recipe.batch
  config.image_size = (224, 224)
  config.num_classes = 0

  config.source = dict(name='tfds', dataset='imagenet2012')
  config.train = dict(split='train', num_examples=1_281_167)
  config.augment = dict(name='multicrop', local_size=(96,), **recipe.crops)
  config.preprocess = dict(
    resize='torchvision', central_fraction=0.875, interpolation='bicubic'
  )

  config.model = dict(
    name='vit',
    variant=arg.variant,
    pool='token',
    gelu='exact',
    drop_path=0.1,
    dtype='bfloat16',
    unroll=12,
  )
  config.objective = dict(
    name='dino',
    momentum=0.996,
    head=dict(
      norm_last_layer=not (recipe.learned_norm and arg.variant.startswith('S'))
    ),
    **recipe.temperature,
  )
  config.optimizer = dict(
    name='adam',
    weight_decay=0.04,
    weight_decay_end=0.4,
    decay_mask='tensors',
    clip_norm=recipe.clip,
    clip='tensor',
    # One matrix and one bias in the authors' code.
    clip_joined=('query|key|value',),
    rules=(('head/last/.*', dict(after=f'{recipe.frozen_epochs} epochs')),),
  )
  config.schedule = dict(
    base_lr=recipe.rate * recipe.batch / 256,
    warmup='10 epochs',
    decay='cosine',
    end_lr=recipe.end_lr,
  )
  # Detects a teacher with the same output for all images (objectives/dino.py).
  config.recovery = dict(
    limits=dict(
      collapse=dict(metric='teacher_kl', at_least=0.01, during='500 steps'),
      alike=dict(metric='feature_deviation', at_least=0.05, during='500 steps'),
    )
  )
  # With ZeRO-1, each step gathers the parameters of student and teacher. For
  # small batches of a small model, this takes longer than it saves.
  small = arg.recipe == 'vanilla' and arg.variant.startswith('S')
  config.mesh = dict(data=-1, fsdp=1, model=1, zero1=not small)

  config.evals = dict(
    knn=dict(name='neighbours', split='validation', every='20 epochs')
  )
  config.checkpoint = dict(every='1 epochs', keep=3, best='knn_teacher/20nn')
  return complete(config)
