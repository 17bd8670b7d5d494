"""A training of two steps with every evaluator of features.

Sizes are odd: a process has 3 examples, 1 example or only padding in its last
batch of 8; every fifth training example of the probe is bad.
"""

from ml_collections import ConfigDict

from vit_jax.config import complete

CLASSES = 3


def data(num_examples: int, name: str = 'synthetic') -> dict:
  return dict(
    name=name, num_examples=num_examples, num_classes=CLASSES, height=9
  )


def get_config() -> ConfigDict:
  config = ConfigDict()
  config.total = '2 steps'
  config.batch_size = 8
  config.image_size = (8, 8)
  config.num_classes = CLASSES
  config.source = data(40)
  config.train = dict(split='train', num_examples=40)
  config.model = dict(
    name='vit',
    patch_size=4,
    width=16,
    depth=2,
    mlp_dim=24,
    num_heads=2,
    dtype='float32',
  )
  config.objective = dict(name='supervised', cross_entropy='softmax')
  config.optimizer = dict(name='adam')
  config.schedule = dict(base_lr=1e-3)
  config.reader = dict(on_bad_record='skip', max_bad_share=0.5)
  every = dict(split='test', every='2 steps')
  damaged = data(57, 'tests.multiprocess.damaged')
  config.evals = dict(
    fewshot=dict(name='fewshot', source=data(51), shots=(1, 5), **every),
    neighbours=dict(name='neighbours', source=data(49), ks=(1, 10), **every),
    calibration=dict(name='calibration', source=data(43), top=(1, 2), **every),
    regression=dict(name='linear_probe', source=damaged, **every),
  )
  config.evals.figures = dict(name='figures', split='test', num_images=5)
  config.checkpoint = dict(every='2 steps')
  config.log = dict(every='1 steps', tensorboard=False, curves=False)
  return complete(config)
