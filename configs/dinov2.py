"""DINOv2 (arXiv 2304.07193): configs/dinov2.py:recipe=short,model=L.

  python -m vit_jax.train --config=configs/dinov2.py:recipe=short,model=L
  python -m vit_jax.train
    --config=configs/dinov2.py:recipe=short,model=L,stage=highres
    --config.init_from=runs/dinov2
  python -m vit_jax.train
    --config=configs/dinov2.py:recipe=short,model=S,patch=14
    --config.init_from=hf:facebook/dinov2-small

Arguments:
  recipe: short (ImageNet-1k) or long (ImageNet-21k).
  model: S, B or L. The authors trained L with both recipes; S and B use the
    settings of L. (The released S, B and L were distilled from a larger model
    and cannot be reproduced by this training.)
  patch: side of a patch, pixels; 16 in the short recipe, 14 in the long one.
  stage: pretrain, or highres for 10,000 steps with large images (518 px for
    patches of 14 px, 512 px for 16) that start from the teacher of a finished
    run.
  mlp: gelu or swiglu, by default that of the recipe; gelu to continue from the
    released S, B or L.
  gpu: 80 for 8 GPUs with 80 GB: micro-batches of one group per GPU.

|                      | short            | long                   |
| data, model          | ImageNet-1k, L/16| ImageNet-22k, L/14     |
| steps, batch         | 125,000, 2048    | 625,000, 3072          |
| images of a GPU      | 64               | 32                     |
| targets              | centring         | Sinkhorn-Knopp         |
| heads                | one, K 65,536    | two, K 131,072         |
| bottleneck           | 256              | 384 (patches 256)      |
| MLP, drop path       | GELU, .3         | SwiGLU, .4             |
| teacher momentum     | .992 to 1        | .994 to 1              |
| weight decay         | .04 to .4        | .04 to .2              |
| rate for batch 1024  | 4e-3, 12,500 warm| 2e-4, 100,000 warm     |
| layer decay          | .9               | none                   |
| local crops          | 8 of 96 px       | 8 of 98 px             |
| kNN, linear (L)      | 81.6, 82.9       | 82.0, 84.5             |
| cost (L, theirs)     | 32 A100, 1 day   | 96 A100, 3.3 days      |

Both: AdamW with β1 0.9 and β2 0.999, rate proportional to the square root of
the batch size, cosine decay to 1e-6, weight decay rising along a cosine, none
for biases, norms and LayerScale; rate of the patch embedding times 0.2; rate of
the last layer of each head 0 in the first 1,250 steps; gradients of backbone
(with mask token) and of each head clipped at norm 3; teacher temperature .04 to
.07 in the first 37,500 steps; KoLeo with weight 0.1; LayerScale 1e-5; drop path
with the same rate in all layers. The authors count epochs of 1,250 steps. The
layer decay is that of their code since October 2023: before, it had no rule for
registers, which it trained with the rate of the heads.

Cost of recipe=short,model=L, predicted by `plan`: 147 core-days on v3:4x4 (9.7
GiB per core, 50 % MFU); 63 on v5e:8x8 with --config.model.remat=dots (15.0
GiB, 37 % MFU); 16 GPU-days on 8 H100 with gpu=80 (26.9 GiB, 29 % MFU). On
v3:4x4, B takes 48 core-days (4.8 GiB) and S 19 (5.9 GiB).

Expected ImageNet top-1, the authors', of the teacher: see the table. None of
them has been repeated with this code. Except for the differences below, ten
steps of a small model equal those of the authors' code to 1e-5
(benchmarks/RESULTS.md).

Differences: the batch of one GPU in the authors' code, for masks and for the
neighbours of KoLeo, is a group of adjacent examples here (augment.group), for
any number of devices. The centre of patches is the mean over all masked patches
of the batch, the authors' a mean of the means of all GPUs. Drop path is drawn
for each example; the authors drop a fixed number of examples of a batch. The
class token is drawn from N(0, .02), the authors' from N(0, 1e-6). The warm-up
reaches its peak one step later. bfloat16 instead of float16. ImageNet-21k as in
TFDS instead of ImageNet-22k. For highres, the paper compresses all schedules
into the 10,000 steps, as here, and reduces the learning rate, without a number:
a tenth is our choice.
"""

from typing import Any, NamedTuple

from ml_collections import ConfigDict

from vit_jax.config import complete, parse_arg
from vit_jax.models.vit import SIZES

MODELS = ('S', 'B', 'L')
HIGHRES_STEPS = 10_000
# According to `plan`, the short recipe fits 32 v3 cores and 8 GPUs of 80 GB,
# and L also 64 v5e chips with 'dots'. S was not planned for GPUs.
REMAT = {'S': 'dots', 'B': 'full', 'L': 'full'}
REMAT_GPU = {'S': 'none', 'B': 'none', 'L': 'dots'}


class Recipe(NamedTuple):
  """Settings of a recipe; durations in steps.

  Attributes:
    patch: side of a patch, pixels.
    steps: length of the training.
    batch: images of a batch.
    group: images of one GPU in the authors' training.
    rate: learning rate for a batch of 1024 images.
    warmup: duration of the warm-up of the learning rate.
    decay_end: weight decay at the end.
    layer_decay: factor of the learning rate from layer to layer.
    drop_path: rate in all layers.
    gated: whether MLPs are SwiGLU.
    objective: keys of the objective.
  """

  patch: int
  steps: int
  batch: int
  group: int
  rate: float
  warmup: int
  decay_end: float
  layer_decay: float
  drop_path: float
  gated: bool
  objective: dict[str, Any]


LEARNED = dict(norm_last_layer=False)
RECIPES = {
  'short': Recipe(
    patch=16,
    steps=125_000,
    batch=2048,
    group=64,
    rate=4e-3,
    warmup=12_500,
    decay_end=0.4,
    layer_decay=0.9,
    drop_path=0.3,
    gated=False,
    objective=dict(momentum=0.992, centring='centre', head=LEARNED),
  ),
  'long': Recipe(
    patch=14,
    steps=625_000,
    batch=3072,
    group=32,
    rate=2e-4,
    warmup=100_000,
    decay_end=0.2,
    layer_decay=1.0,
    drop_path=0.4,
    gated=True,
    objective=dict(
      momentum=0.994,
      centring='sinkhorn_knopp',
      head=LEARNED | dict(outputs=131_072, bottleneck=384),
      patch_head=LEARNED | dict(outputs=131_072),
    ),
  ),
}
DATA = {
  'short': (
    'imagenet2012',
    dict(split='train', num_examples=1_281_167),
    {},
  ),
  'long': (
    'imagenet21k',
    dict(split='train[51200:]', num_examples=14_145_922),
    dict(source=dict(name='tfds', dataset='imagenet2012'), train_split='train'),
  ),
}


def get_config(argument: str | None = None) -> ConfigDict:
  choices = dict(
    recipe=RECIPES,
    model=MODELS,
    patch=(0, 14, 16),
    stage=('pretrain', 'highres'),
    mlp=('', 'gelu', 'swiglu'),
    gpu=(0, 80),
  )
  arg = parse_arg(
    argument,
    choices,
    recipe='short',
    model='L',
    patch=0,
    stage='pretrain',
    mlp='',
    gpu=0,
  )
  recipe = RECIPES[arg.recipe]
  patch = arg.patch or recipe.patch
  gated = arg.mlp == 'swiglu' if arg.mlp else recipe.gated
  highres = arg.stage == 'highres'
  factor = HIGHRES_STEPS / recipe.steps if highres else 1.0

  def steps(count: int) -> str:
    return f'{round(count * factor)} steps'

  side = (518 if patch == 14 else 512) if highres else 224
  size = SIZES[arg.model]
  local = 98 if patch == 14 else 96
  dataset, train, neighbours = DATA[arg.recipe]
  remat = (REMAT_GPU if arg.gpu and not highres else REMAT)[arg.model]

  config = ConfigDict()
  config.total = steps(recipe.steps)
  config.batch_size = recipe.batch
  config.micro_batches = recipe.batch // (8 * recipe.group) if arg.gpu else 1
  config.image_size = (side, side)
  config.num_classes = 0
  config.init_weights = 'teacher' if highres else 'params'
  config.position_resize = 'dino'

  config.source = dict(name='tfds', dataset=dataset)
  config.train = train
  config.augment = dict(
    name='block_masks',
    patch_size=patch,
    group=recipe.group,
    global_area=(0.32, 1.0),
    local_area=(0.05, 0.32),
    local_crops=8,
    local_size=(local,),
  )
  config.preprocess = dict(
    resize='torchvision', central_fraction=0.875, interpolation='bicubic'
  )

  config.model = dict(
    name='vit',
    variant=f'{arg.model}/{patch}',
    # Two thirds of the usual hidden units, rounded up to a multiple of 8.
    mlp_dim=(size['mlp_dim'] * 2 // 3 + 7) // 8 * 8 if gated else None,
    gated=gated,
    pool='token',
    gelu='exact',
    layer_scale=1e-5,
    drop_path=recipe.drop_path,
    drop_path_first=recipe.drop_path,
    start_values='trunc_normal',
    pixels='imagenet',
    dtype='bfloat16',
    remat=remat,
    unroll=12 if remat == 'none' else 1,
  )
  config.objective = dict(
    name='dinov2', temperature_warmup=steps(37_500), **recipe.objective
  )
  config.optimizer = dict(
    name='adam',
    weight_decay=0.04,
    weight_decay_end=recipe.decay_end,
    decay_mask='tensors',
    clip_norm=3.0,
    clip='module',
    clip_joined=('model|mask',),
    layer_decay=recipe.layer_decay,
    rules=(
      ('model/(embedding|patch_norm)/.*', dict(lr=0.2)),
      ('(head|patch_head)/last/.*', dict(lr_after=steps(1250))),
    ),
  )
  config.schedule = dict(
    base_lr=recipe.rate
    * (recipe.batch / 1024) ** 0.5
    * (0.1 if highres else 1),
    warmup=steps(recipe.warmup),
    decay='cosine',
    end_lr=1e-6,
  )
  # Detect a teacher with the same output for all images (objectives/dino.py).
  config.recovery = dict(
    limits=dict(
      collapse=dict(metric='teacher_kl', at_least=0.01, during='500 steps'),
      alike=dict(metric='feature_deviation', at_least=0.05, during='500 steps'),
    )
  )
  config.mesh = dict(data=-1, fsdp=1, model=1, zero1=True)

  config.evals = dict(
    knn=dict(name='neighbours', split='validation', every='20 %', **neighbours)
  )
  config.checkpoint = dict(every=steps(1250), keep=3, best='knn_teacher/20nn')
  return complete(config)
