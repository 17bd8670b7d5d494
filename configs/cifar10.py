"""A small ViT on CIFAR-10 from scratch: a real experiment for a laptop.

Not in the paper. 32 px, 4x4 patches, 64 tokens, mean pooling, soft-max loss.
Expected: 57 % test accuracy after 6 epochs, 18 minutes on two CPU cores;
benchmarks/RESULTS.md has the run, and a fine-tuning from it at 48 px:

  python -m vit_jax.finetune --config=configs/finetune.py:data=cifar10
    --config.init_from=runs/cifar10 --config.image_size=48
    --config.model.dtype=float32
"""

from ml_collections import ConfigDict

from vit_jax.config import complete


def get_config() -> ConfigDict:
  config = ConfigDict()
  config.total = '6 epochs'
  config.batch_size = 64
  config.image_size = (32, 32)
  config.num_classes = 10

  config.source = dict(name='tfds', dataset='cifar10')
  config.train = dict(split='train', num_examples=50_000)
  config.augment = dict(crop='inception', min_area=0.6, flip=True)

  config.model = dict(
    name='vit',
    patch_size=4,
    width=96,
    depth=5,
    mlp_dim=192,
    num_heads=4,
    pool='gap',
    dtype='float32',
  )
  config.objective = dict(name='supervised', cross_entropy='softmax')
  config.optimizer = dict(
    name='adam', weight_decay=0.05, decay_mask='kernels', clip_norm=1.0
  )
  config.schedule = dict(base_lr=1.5e-3, decay='cosine', warmup='1 epochs')

  config.evals = dict(
    test=dict(name='classification', split='test', every='1 epochs')
  )
  config.checkpoint = dict(every='1 epochs', best='test/accuracy')
  return complete(config)
