"""A config that uses all plug-ins of this directory."""

from ml_collections import ConfigDict

from vit_jax.config import complete


def get_config():
  config = ConfigDict(
    dict(batch_size=8, micro_batches=2, image_size=8, num_classes=3)
  )
  config.total = '8 steps'
  config.source = dict(name='tests.plugins.lab_source')
  config.train = dict(split='train', num_examples=32)
  config.model = dict(name='tests.plugins.lab_model')
  config.objective = dict(name='tests.plugins.lab_objective')
  config.optimizer = dict(
    name='adam',
    weight_decay=0.1,
    rules=(
      ('stem/.*', dict(frozen=True)),
      ('.*/bias', dict(decay=0.0)),
      ('head/.*', dict(lr=10.0)),
    ),
  )
  config.schedule = dict(base_lr=3e-3, warmup='2 steps')
  config.evals = dict(
    lab=dict(
      name='tests.plugins.lab_evaluator',
      split='test',
      every='4 steps',
      other='tests.plugins.lab_source',
    )
  )
  config.checkpoint = dict(every='4 steps', best='lab_teacher/accuracy')
  config.log = dict(
    every='1 steps',
    **dict(tensorboard=False, curves=False, report=False),
    trackers=dict(lab=dict(name='tests.plugins.lab_tracker')),
  )
  return complete(config)
