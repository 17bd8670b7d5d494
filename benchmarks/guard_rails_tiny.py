"""Small models on digits for guard_rails.py; also for earlier commits.

Arguments:
  objective: supervised, mixing, distill, mae, masked_patch, dino or linear.
  model: vit, hybrid, resnet, swin, axial_vit or axial_resnet.
  steps: length of the training.
"""

from ml_collections import ConfigDict

from vit_jax.config import complete, parse_arg

VIT = dict(name='vit', patch_size=4, width=16, depth=2, mlp_dim=24, num_heads=2)
STEM = dict(name='resnet', depths=(1,), width_factor=1)
MODELS = {
  'vit': VIT,
  'hybrid': VIT | dict(patch_size=1, stem=STEM),
  'resnet': dict(name='resnet', depths=(1, 1), width_factor=1),
  'swin': dict(
    name='swin', width=12, depths=(2, 2), num_heads=3, window_size=2
  ),
  'axial_vit': VIT | dict(name='axial_vit'),
  'axial_resnet': dict(name='axial_resnet', depths=(1, 1)),
}
DECODER = dict(width=16, depth=1, num_heads=2, mlp_dim=16, dtype='float32')
HEAD = dict(outputs=32, hidden=16, bottleneck=8, dtype='float32')
OBJECTIVES = {
  'supervised': dict(name='supervised', cross_entropy='softmax'),
  'mixing': dict(name='supervised', cross_entropy='softmax'),
  'distill': dict(name='distill', cross_entropy='softmax'),
  'mae': dict(name='mae', decoder=DECODER),
  'masked_patch': dict(name='masked_patch'),
  'dino': dict(name='dino', momentum=0.99, head=HEAD),
  'linear': dict(name='linear_probe', num_classes=10, batch_norm=True),
}


def get_config(argument: str | None = None) -> ConfigDict:
  arg = parse_arg(argument, objective='supervised', model='vit', steps=3)
  labels = arg.objective in ('supervised', 'mixing', 'distill')
  large = arg.model in ('hybrid', 'resnet', 'swin', 'axial_resnet')
  config = ConfigDict()
  config.total = f'{arg.steps} steps'
  config.batch_size = 32
  config.image_size = (32, 32) if large else (16, 16)
  config.num_classes = 10 if labels else 0

  config.source = dict(name='tfds', dataset='digits')
  config.train = dict(split='train', num_examples=1_438)
  config.augment = dict(min_area=0.5, flip=False)

  config.model = MODELS[arg.model] | dict(dtype='float32')
  config.objective = OBJECTIVES[arg.objective]
  config.optimizer = dict(name='adam', weight_decay=0.03, clip_norm=1.0)
  config.schedule = dict(base_lr=3e-3, decay='cosine', warmup='2 steps')
  if arg.objective == 'supervised' and arg.model == 'vit':
    config.model.update(pre_logits=True, dropout=0.1)
    config.average_decay = 0.9
  if arg.objective == 'mixing':
    config.mix = dict(mixup=0.8, cutmix=1.0, erasing=0.25)
    config.model.update(drop_path=0.1, layer_scale=1e-2)
    config.micro_batches = 2
  if arg.objective == 'distill':
    config.model.distilled = True
  if arg.objective == 'dino':
    config.augment = dict(name='multicrop', local_crops=2, local_size=(8,))
  if arg.objective == 'linear':
    config.optimizer = dict(
      name='lars', momentum=0.9, rules=(('model/.*', dict(frozen=True)),)
    )

  half = f'{max(arg.steps // 2, 1)} steps'
  evaluator = (
    dict(name='classification')
    if labels or arg.objective == 'linear'
    else dict(name='neighbours', ks=(20,))
  )
  config.evals = dict(test=dict(split='test', every=half, **evaluator))
  config.checkpoint = dict(every=half)
  config.log = dict(every=f'{max(arg.steps // 50, 1)} steps')
  return complete(config)
