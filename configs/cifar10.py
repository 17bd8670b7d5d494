"""A small model on CIFAR-10 from scratch: a real experiment for a laptop.

Arguments: model (vit, hybrid, resnet, swin, axial_vit, axial_resnet), each with
some 64 places or tokens of 32 px images, and objective (supervised, mae,
masked_patch; without labels the neighbours of test images are judged). Not in
the paper. Soft-max loss; the ViT has 4x4 patches and mean pooling.
Expected: 57 % test accuracy after 6 epochs of the ViT, 18 minutes on two CPU
cores; the others were trained for an epoch or two only.
An epoch of objective=mae: 36.8 % by 20 neighbours.
benchmarks/RESULTS.md has the run, and a fine-tuning from it at 48 px:

  python -m vit_jax.finetune --config=configs/finetune.py:data=cifar10
    --config.init_from=runs/cifar10 --config.image_size=48
    --config.model.dtype=float32
"""

from ml_collections import ConfigDict

from vit_jax.config import complete, parse_arg
from vit_jax.errors import UserError, closest

VIT = dict(
  name='vit',
  patch_size=4,
  width=96,
  depth=5,
  mlp_dim=192,
  num_heads=4,
  pool='gap',
)
STEM = dict(name='resnet', depths=(1,), width_factor=1)  # a map of 8x8 places
SWIN = dict(width=48, depths=(2, 2), num_heads=3, window_size=4)
AXIAL = dict(patch_size=4, width=96, depth=3, mlp_dim=192, num_heads=4)
MODELS = {
  'vit': VIT,
  'hybrid': VIT | dict(patch_size=1, stem=STEM),
  'resnet': dict(name='resnet', depths=(1, 1), width_factor=1),
  'swin': dict(name='swin', **SWIN),
  'axial_vit': dict(name='axial_vit', **AXIAL),
  'axial_resnet': dict(name='axial_resnet', depths=(1, 1)),
}
# Without labels: the keys and sections that differ.
NEIGHBOURS = dict(name='neighbours', split='test', ks=(20,), every='1 epochs')
UNLABELLED = dict(
  num_classes=0,
  evals=dict(test=NEIGHBOURS),
  checkpoint=dict(every='1 epochs', best='test/20nn'),
)
SMALL_DECODER = dict(
  width=64, depth=2, num_heads=4, mlp_dim=128, dtype='float32'
)
OBJECTIVES = {
  'supervised': {},
  'mae': UNLABELLED | dict(objective=dict(name='mae', decoder=SMALL_DECODER)),
  'masked_patch': UNLABELLED | dict(objective=dict(name='masked_patch')),
}


def get_config(argument: str | None = None) -> ConfigDict:
  arg = parse_arg(argument, model='vit', objective='supervised')
  if arg.model not in MODELS:
    raise UserError(
      f'there is no model={arg.model} here; {closest(arg.model, MODELS)}.'
    )
  if arg.objective not in OBJECTIVES:
    raise UserError(
      f'there is no objective={arg.objective} here; '
      f'{closest(arg.objective, OBJECTIVES)}.'
    )
  config = ConfigDict()
  config.total = '6 epochs'
  config.batch_size = 64
  config.image_size = (32, 32)
  config.num_classes = 10

  config.source = dict(name='tfds', dataset='cifar10')
  config.train = dict(split='train', num_examples=50_000)
  config.augment = dict(crop='inception', min_area=0.6, flip=True)

  config.model = MODELS[arg.model] | dict(dtype='float32')
  config.objective = dict(name='supervised', cross_entropy='softmax')
  config.optimizer = dict(
    name='adam', weight_decay=0.05, decay_mask='kernels', clip_norm=1.0
  )
  config.schedule = dict(base_lr=1.5e-3, decay='cosine', warmup='1 epochs')

  config.evals = dict(
    test=dict(name='classification', split='test', every='1 epochs')
  )
  config.checkpoint = dict(every='1 epochs', best='test/accuracy')
  for key, value in OBJECTIVES[arg.objective].items():
    config[key] = value
  return complete(config)
