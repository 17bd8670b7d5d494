"""A student of released weights, and DINOv2 from scratch, on CIFAR-10.

Arguments:
  objective: match (configs/students.py) or dinov2.
  teacher: for match, the weights of the teacher, here a DINOv2 ViT-S/14
    (benchmarks/real_weights.py), which sees the images at 84 px.

Both train the same ViT (0.6 million parameters, 8x8 patches of 4 px) for 200
steps on the same images in the same order, without labels, and are evaluated
by a linear probe and by neighbours on 2,000 test images.
"""

from typing import Any

from ml_collections import ConfigDict

from vit_jax.config import complete, parse_arg
from vit_jax.config.loading import load

TRAIN, REFERENCE, TEST = 'train[:40000]', 'train[40000:]', 'test[:2000]'


def get_config(argument: str | None = None) -> ConfigDict:
  arg = parse_arg(argument, objective='match', teacher='')
  if arg.objective == 'match':
    config = load(f'configs/students.py:teacher={arg.teacher},model=Ti')
  else:
    config = load('configs/dinov2.py:recipe=short,model=S,patch=16')
  with config.unlocked():
    _shrink(config, arg.objective == 'match')
  return complete(config)


def _shrink(config: Any, match: bool) -> None:
  config.total = '200 steps'
  config.batch_size, config.micro_batches = 64, 1
  config.image_size = (32, 32)
  config.source = dict(name='tfds', dataset='cifar10')
  config.train = dict(split=TRAIN, num_examples=40_000)
  config.preprocess = dict()
  config.model.update(
    variant=None,
    patch_size=4,
    width=128,
    depth=4,
    mlp_dim=384,
    num_heads=4,
    dtype='float32',
    remat='none',
    unroll=4,
    layer_scale=None,
    drop_path=0.0,
    drop_path_first=0.0,
  )
  config.schedule.update(base_lr=1e-3, warmup='20 steps', end_lr=0.0)
  if match:
    config.objective.teacher_scale = 84 / 32
  else:
    config.augment.update(
      patch_size=4,
      group=64,
      local_crops=4,
      local_size=(16,),
      blur=(0.5, 0.1, 0.2),
    )
    config.objective.update(
      momentum=0.99, temperature_warmup='40 steps', koleo=0.1
    )
    config.objective.head.update(
      outputs=1024, hidden=512, bottleneck=128, dtype='float32'
    )
    config.optimizer.rules = (
      ('(head|patch_head)/last/.*', dict(lr_after='20 steps')),
    )
    config.optimizer.layer_decay = 1.0
    config.recovery = dict()
  common = dict(split=TEST, train_split=REFERENCE, every='100 %')
  config.evals = dict(
    knn=dict(name='neighbours', ks=(20,), **common),
    probe=dict(name='linear_probe', **common),
  )
  config.checkpoint = dict(every='100 steps')
  config.log = dict(every='20 steps')
