"""DINO and DINOv2 on scikit-learn's digits, with the same model and crops.

  python -m vit_jax.train --workdir=runs/toy
    --config=benchmarks/self_supervised/digits.py:objective=dinov2

Arguments:
  objective: dino or dinov2.

A comparison at toy size, not a recipe: see docs/self_supervised.md.
"""

from ml_collections import ConfigDict

from vit_jax.config import complete, parse_arg
from vit_jax.errors import check_choice


def get_config(argument: str | None = None) -> ConfigDict:
  arg = parse_arg(argument, objective='dinov2')
  check_choice('objective', arg.objective, ('dino', 'dinov2'))
  config = ConfigDict()
  config.total = '600 steps'
  config.batch_size = 64
  config.image_size = (16,)
  config.num_classes = 0
  config.position_resize = 'dino'
  config.source = dict(name='tfds', dataset='digits')
  config.train = dict(split='train', num_examples=1438)
  config.augment = dict(
    name='multicrop',
    global_area=(0.4, 1.0),
    local_area=(0.1, 0.4),
    local_crops=4,
    local_size=(8,),
    blur=(0.3, 0.1, 0.1),
    solarize=0.2,
  )
  config.preprocess = dict(
    resize='torchvision', central_fraction=0.875, interpolation='bicubic'
  )
  config.model = dict(
    name='vit',
    width=48,
    depth=3,
    num_heads=4,
    mlp_dim=96,
    patch_size=4,
    pool='token',
    gelu='exact',
    layer_scale=0.1,
    drop_path=0.1,
    drop_path_first=0.1,
    start_values='trunc_normal',
    pixels='imagenet',
    dtype='float32',
  )
  config.objective = dict(
    name=arg.objective,
    momentum=0.99,
    temperature_warmup='100 steps',
    teacher_temperature=0.07,
    head=dict(
      outputs=256,
      hidden=128,
      bottleneck=32,
      norm_last_layer=False,
      dtype='float32',
    ),
  )
  config.optimizer = dict(
    name='adam',
    weight_decay=0.04,
    weight_decay_end=0.4,
    decay_mask='tensors',
    clip_norm=3.0,
    clip='module',
    rules=(('head/last/.*', dict(lr_after='50 steps')),),
  )
  if arg.objective == 'dinov2':
    config.augment.update(name='block_masks', patch_size=4, group=32)
    config.optimizer.clip_joined = ('model|mask',)
  config.schedule = dict(
    base_lr=2e-3, warmup='60 steps', decay='cosine', end_lr=1e-6
  )
  config.mesh = dict(data=-1, fsdp=1, model=1, zero1=True)
  config.log = dict(every='50 steps', tensorboard=False, report=False)
  config.evals = dict(
    knn=dict(name='neighbours', split='test', every='100 steps', ks=(20,))
  )
  config.checkpoint = dict(every='300 steps', best='knn_teacher/20nn')
  return complete(config)
