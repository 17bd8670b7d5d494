"""A small model on CIFAR-10 from scratch: a real experiment for a laptop.

Arguments:
  model: vit, hybrid, resnet, swin, axial_vit or axial_resnet, each with about
    64 positions or tokens for images of 32 px.
  objective: supervised, dino, mae or masked_patch. The last three do not use
    labels; they are evaluated by the nearest neighbours of held-out images.

This recipe is not in the paper. The loss is softmax cross-entropy; the ViT has
4x4 patches and mean pooling. The last 2 % of the training split, 1,000 images,
are held out to choose the best checkpoint. The test split is evaluated, too.

Expected: 57 % test accuracy after 6 epochs of the ViT, in 18 minutes on two
CPU cores (measured with all 50,000 images as training data, and before the
layers were unrolled). The other models were only trained for an epoch or two.
benchmarks/history/training.md describes the run, and this fine-tuning from it
at 48 px:

  python -m vit_jax.finetune --config=configs/finetune.py:data=cifar10
    --config.init_from=runs/cifar10 --config.image_size=48
    --config.model.dtype=float32
"""

from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

from vit_jax.config import complete, parse_arg

TRAIN, HELD_OUT = 'train[:98%]', 'train[98%:]'
VIT = dict(
  name='vit',
  patch_size=4,
  width=96,
  depth=5,
  unroll=5,  # a fifth faster on a CPU
  mlp_dim=192,
  num_heads=4,
  pool='gap',
)
STEM = dict(name='resnet', depths=(1,), width_factor=1)  # a map of 8x8
SWIN = dict(width=48, depths=(2, 2), num_heads=3, window_size=4)
AXIAL = dict(patch_size=4, width=96, depth=3, mlp_dim=192, num_heads=4)
MODELS = {
  'vit': VIT,
  'hybrid': VIT | dict(patch_size=1, stem=STEM),
  'resnet': dict(name='resnet', depths=(1, 1), width_factor=1),
  'swin': dict(name='swin', **SWIN),
  'axial_vit': dict(name='examples.axial_vit', **AXIAL),
  'axial_resnet': dict(name='examples.axial_resnet', depths=(1, 1)),
}
SMALL_DECODER = dict(
  width=64, depth=2, num_heads=4, mlp_dim=128, dtype='float32'
)


def _dino(config: Any) -> None:
  """Changes the config to DINO, without labels.

  There are four local crops of 16 px and 1024 prototypes.
  """
  config.num_classes = 0
  if config.model.name == 'vit':
    config.model.drop_path = 0.1
  config.augment = dict(
    name='multicrop',
    local_crops=4,
    local_size=(16,),
    blur=(0.5, 0.1, 0.2),  # two pixels are a large part of 32
  )
  config.objective = dict(
    name='dino',
    momentum=0.99,
    head=dict(outputs=1024, hidden=512, bottleneck=128, dtype='float32'),
  )
  config.optimizer = dict(
    name='adam',
    weight_decay=0.04,
    weight_decay_end=0.4,
    decay_mask='tensors',
    clip_norm=3.0,
    clip='tensor',
    clip_joined=('query|key|value',),
    rules=(('head/last/.*', dict(after='1 epochs')),),
  )
  config.schedule.base_lr, config.schedule.end_lr = 5e-4, 1e-6
  config.recovery = dict(
    limits=dict(
      collapse=dict(metric='teacher_kl', at_least=0.01, during='200 steps')
    )
  )
  config.evals = dict(
    knn=dict(name='neighbours', split=HELD_OUT, every='1 epochs'),
    test=dict(name='neighbours', split='test', every='1 epochs'),
  )
  config.checkpoint.best = 'knn_teacher/20nn'


def _masked(name: str, **keys: Any) -> Callable[[Any], None]:
  """Returns a function that changes the config to training without labels."""

  def change(config: Any) -> None:
    config.num_classes = 0
    config.objective = dict(name=name, **keys)
    config.evals = {
      key: dict(name='neighbours', split=split, ks=(20,), every='1 epochs')
      for key, split in (('dev', HELD_OUT), ('test', 'test'))
    }
    config.checkpoint.best = 'dev/20nn'

  return change


OBJECTIVES = {
  'supervised': lambda config: None,
  'dino': _dino,
  'mae': _masked('mae', decoder=SMALL_DECODER),
  'masked_patch': _masked('masked_patch'),
}


def get_config(argument: str | None = None) -> ConfigDict:
  choices = dict(model=MODELS, objective=OBJECTIVES)
  arg = parse_arg(argument, choices, model='vit', objective='supervised')
  config = ConfigDict()
  config.total = '6 epochs'
  config.batch_size = 64
  config.image_size = (32, 32)
  config.num_classes = 10

  config.source = dict(name='tfds', dataset='cifar10')
  config.train = dict(split=TRAIN, num_examples=49_000)
  config.augment = dict(crop='inception', min_area=0.6, flip=True)

  config.model = MODELS[arg.model] | dict(dtype='float32')
  config.objective = dict(name='supervised', cross_entropy='softmax')
  config.optimizer = dict(
    name='adam', weight_decay=0.05, decay_mask='kernels', clip_norm=1.0
  )
  config.schedule = dict(base_lr=1.5e-3, decay='cosine', warmup='1 epochs')

  config.evals = dict(
    dev=dict(name='classification', split=HELD_OUT, every='1 epochs'),
    test=dict(name='classification', split='test', every='1 epochs'),
  )
  config.checkpoint = dict(every='1 epochs', best='dev/accuracy')
  OBJECTIVES[arg.objective](config)
  return complete(config)
