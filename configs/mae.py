"""Masked autoencoders on ImageNet-1k: --config=configs/mae.py:model=L.

Arguments:
  model: B (B/16), L (L/16) or H (H/14).
  epochs: 800, the default of the paper's text and code, or 1600, as in its
    Table 3 and for the released weights.
  gpu: memory of a GPU in GB (24, 40 or 80), for 8 GPUs of one machine; without
    it, the settings are those for 32 TPU v3 cores.

Source: "Masked Autoencoders Are Scalable Vision Learners" (arXiv 2111.06377),
appendix A.1 with Table 8: batch size 4096, AdamW with β1 0.9 and β2 0.95,
weight decay 0.05, base learning rate 1.5e-4 per 256 images, 40 epochs of
warm-up, cosine decay to 0, random crops of 20 % of the area or more, flips, 75
% of the patches hidden, and a decoder with 8 layers of width 512.
One-dimensional parameters (biases, norms) have no weight decay; the class
token and the mask token do.

Expected ImageNet top-1 after configs/finetune_mae.py at 224 px, for 1600 epochs
(Table 3; "repeated" is a pre-training by another group with the authors' code,
issue 91 of their repository), and of a linear probe on the class token:

| model | fine-tuned | repeated | linear probe | cost                     |
| B     | 83.6       | 83.45    | 68.0         |                          |
| L     | 85.9       | 85.64    | 75.8         | 42 h on 64 V100 (800 ep) |
| H     | 86.9       | 86.88    | 76.6         |                          |

After 800 epochs, L reaches 85.4, and 84.9 with `norm_pixels=False` (Table 1d).
After 400 epochs, B reaches about 82.4 (issue 30).

Cost: vit_jax.plan predicts 43 core-days for L's 800 epochs on a v3-32 (8,800
images per second, 7.9 GiB of each core's 15.5).

Differences: crops have TensorFlow's distribution (uniform aspect ratio;
torchvision's is log-uniform, see `transforms.TrainTransform`). Decoding is
that of the authors, and resizing equals Pillow's bicubic filter bit for bit.
The pixels of the encoder's input are in [-1, 1], which its patch embedding can
compensate; the target is in the authors' units. MLP biases are initialized
from N(0, 1e-6) instead of 0; all other initial values are the authors'
(`model.start_values`).
"""

from ml_collections import ConfigDict

from vit_jax.config import complete, parse_arg
from vit_jax.errors import UserError, closest

# model: (variant, layers, micro_batches on 32 v3 cores)
MODELS = {'B': ('B/16', 12, 1), 'L': ('L/16', 24, 1), 'H': ('H/14', 32, 2)}
EPOCHS = (800, 1600)
# model: {GB of a GPU: micro_batches} for 8 GPUs (docs/gpus.md)
GPUS = {
  'B': {24: 2, 40: 1, 80: 1},
  'L': {24: 4, 40: 1, 80: 1},
  'H': {24: 8, 40: 2, 80: 1},
}


def get_config(argument: str | None = None) -> ConfigDict:
  arg = parse_arg(argument, model='L', epochs=800, gpu=0)
  if arg.model not in MODELS:
    raise UserError(
      f'model={arg.model} is not a row of the paper; '
      f'{closest(arg.model, MODELS)}.'
    )
  if arg.epochs not in EPOCHS:
    raise UserError(
      f'epochs={arg.epochs}: the paper trains for {EPOCHS[0]} or {EPOCHS[1]}; '
      'another length by --config.total.'
    )
  variant, depth, micro_batches = MODELS[arg.model]
  if arg.gpu:
    if arg.gpu not in GPUS[arg.model]:
      raise UserError(
        f'gpu={arg.gpu}: micro_batches are known for 24, 40 or 80 GB; set '
        'another number by --config.micro_batches.'
      )
    micro_batches = GPUS[arg.model][arg.gpu]
  # Recomputation is slower, and saves no memory if layers are unrolled.
  unrolled = arg.model != 'H' or bool(arg.gpu)
  remat = 'none' if unrolled else 'dots'
  config = ConfigDict()
  config.total = f'{arg.epochs} epochs'
  config.batch_size = 4096
  config.micro_batches = micro_batches
  config.image_size = (224, 224)
  config.num_classes = 0

  config.source = dict(name='tfds', dataset='imagenet2012')
  config.train = dict(split='train', num_examples=1_281_167)
  config.augment = dict(
    crop='inception', min_area=0.2, interpolation='bicubic', flip=True
  )
  config.preprocess = dict(
    resize='central', central_fraction=0.875, interpolation='bicubic'
  )

  config.model = dict(
    name='vit',
    variant=variant,
    pool='token',
    position='sincos2d_mae',
    gelu='exact',
    start_values='mae',
    dtype='bfloat16',
    remat=remat,
    unroll=depth if unrolled else 1,
  )
  config.objective = dict(
    name='mae',
    mask_ratio=0.75,
    norm_pixels=True,
    decoder=dict(
      width=512,
      depth=8,
      num_heads=16,
      mlp_dim=2048,
      remat=remat,
      unroll=8 if unrolled else 1,
    ),
  )
  config.optimizer = dict(
    name='adam',
    b1=0.9,
    b2=0.95,
    weight_decay=0.05,
    decay_mask='tensors',
  )
  config.schedule = dict(
    base_lr=1.5e-4 * 4096 / 256, warmup='40 epochs', decay='cosine'
  )
  # Parameters and moments of H/14 do not fit one v3 core.
  config.mesh = (
    dict(data=1, fsdp=-1, model=1)
    if arg.model == 'H'
    else dict(data=-1, fsdp=1, model=1, zero1=True)
  )

  config.evals = dict(
    fewshot=dict(
      name='fewshot',
      train_split='train[:65000]',
      split='validation',
      shots=(5, 10),
      every='10 %',
    )
  )
  config.checkpoint = dict(every='2500 steps', keep=3)
  config.log = dict(every='50 steps')
  return complete(config)
