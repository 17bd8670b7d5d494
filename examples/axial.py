"""Axial models of appendix D.6: --config=examples/axial.py:variant=B/16.

Arguments:
  variant: B/16, B/32 or R50.

In an Axial-ViT, each block of the ViT is replaced by two, one with attention
along rows and one along columns, each with its MLP. In AxialResNet-50, two
such attentions replace a 3x3 convolution. The models are pre-trained on
JFT-300M. They are plug-ins, `examples/axial_vit.py` and
`examples/axial_resnet.py`: run commands from the root of the repository, or add
it to PYTHONPATH.

Source: appendix D.6 gives no hyperparameters. This config uses those of ViT-B
and of ResNet50 on JFT in Table 3: Adam with β1 0.9 and β2 0.999, 7 epochs,
batch size 4096, 10,000 warm-up steps, base learning rate 8e-4 (R50: 1e-3),
linear decay, weight decay 0.1, no dropout, 224 px. configs/vit.py lists what
is not in the paper.

Expected: the paper shows curves without numbers (Figure 13). The 5-shot linear
ImageNet accuracy is above that of ViT-B with the same patches, at a higher
cost. The paper does not state the cost.
"""

from ml_collections import ConfigDict

from vit_jax.config import complete, parse_arg
from vit_jax.errors import UserError, closest

# variant: (model, base lr of that model in Table 3)
VARIANTS = {
  'B/16': ('examples.axial_vit', 8e-4),
  'B/32': ('examples.axial_vit', 8e-4),
  'R50': ('examples.axial_resnet', 1e-3),
}

# variant: (remat, micro_batches, unroll), the fastest tried for 32 v3 cores of
# 16 GiB (benchmarks/history/tpu.md)
SPEED = {
  'B/16': ('dots', 4, 12),
  'B/32': ('none', 1, 1),
  'R50': ('dots', 4, 1),
}


def get_config(argument: str | None = None) -> ConfigDict:
  arg = parse_arg(argument, variant='B/16')
  if arg.variant not in VARIANTS:
    raise UserError(
      f'appendix D.6 has no axial {arg.variant}; '
      f'{closest(arg.variant, VARIANTS)}.'
    )
  name, base_lr = VARIANTS[arg.variant]
  remat, micro_batches, unroll = SPEED[arg.variant]
  config = ConfigDict()
  config.total = '7 epochs'
  config.batch_size = 4096
  config.micro_batches = micro_batches
  config.image_size = (224, 224)
  config.num_classes = 18_291

  config.source = dict(name='tfds', dataset='jft300m')
  config.train = dict(split='train', num_examples=303_000_000)
  config.augment = dict(crop='inception', min_area=0.05, flip=True)
  config.preprocess = dict(resize='central', central_fraction=0.875)

  config.model = dict(
    name=name,
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
