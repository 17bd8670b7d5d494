"""Any list of images: --config=configs/manifest.py:path=pets.csv.

Arguments:
  path: the list, .csv or .jsonl, see docs/own_data.md. Without a split val, a
    tenth is held out.
  separator: character between the labels of an image, such as `|`, if images
    have several labels.
  numbers: columns with numbers to predict, joined by +, such as age+weight.
  variant: size of the ViT, S/16 by default.
  tune: 1 for fine-tuning from --config.init_from at 384 px, instead of training
    from scratch at 224 px.

With one label per image, the recipe is that of folder.py. Several labels have a
sigmoid loss, and numbers a squared loss of the numbers normalized by their mean
and std in the training data, which are computed when the config is loaded. This
recipe is not in a paper, and its accuracy depends on the data. A few thousand
photographs are too few for training from scratch: fine-tune if you can.
"""

from typing import Any

import numpy as np
from ml_collections import ConfigDict

from vit_jax.config import complete, parse_arg
from vit_jax.data.sources import manifest
from vit_jax.data.storage import files, splits
from vit_jax.errors import UserError


def get_config(argument: str | None = None) -> ConfigDict:
  arg = parse_arg(
    argument, path='', separator='', numbers='', variant='S/16', tune=0
  )
  if not arg.path or (arg.separator and arg.numbers):
    raise UserError(
      f'path={arg.path},separator={arg.separator},numbers={arg.numbers}: give '
      'a list, and at most one of separator and numbers: '
      '--config=configs/manifest.py:path=FILE.csv,numbers=age.'
    )
  numbers = tuple(arg.numbers.split('+')) if arg.numbers else ()
  path = files.local(arg.path, 'the list')
  source: Any = dict(path=path, separator=arg.separator, numbers=numbers)
  rows = manifest.read(path, dict.fromkeys(numbers, manifest.NUMBER))
  train, held_out = 'train', 'val'
  if 'validation' not in {splits.kind(row.split) for row in rows}:
    train, held_out = 'train[:90%]', 'train[90%:]'
  data = manifest.Source(train, **source)
  outputs = data.num_classes

  config = ConfigDict()
  config.total = '20 epochs' if arg.tune else '100 epochs'
  config.batch_size = 128
  config.image_size = (384, 384) if arg.tune else (224, 224)
  config.num_classes = outputs
  config.source = dict(name='manifest', **source)
  config.train = dict(split=train, num_examples=len(data))

  targets, evaluator, best = {}, 'scores', 'val/mean_average_precision'
  objective: Any = dict(name='supervised', cross_entropy='sigmoid')
  if arg.separator:
    targets = dict(name='targets', classes=outputs)
  elif numbers:
    targets = dict(name='targets', numbers=numbers)
    best = 'val/mean_absolute_error'
    rows = [row for row in rows if splits.kind(row.split) == 'train']
    values = np.array([row.others for row in rows], float)
    objective = dict(
      name='regression',
      mean=tuple(values.mean(0).tolist()),
      std=tuple(values.std(0).tolist()),
    )
  else:
    evaluator, best = 'classification', 'val/accuracy'
    objective['cross_entropy'] = 'softmax'
  config.objective = objective
  config.augment = dict(
    crop='inception', min_area=0.05, flip=True, interpolation='area', **targets
  )
  config.preprocess = dict(resize='squash', interpolation='area', **targets)

  config.model = dict(
    name='vit',
    variant=None if arg.tune else arg.variant,
    dtype='float32',
    unroll=12,  # faster on CPUs and GPUs; compiles longer
  )
  if arg.tune:
    config.optimizer = dict(name='sgd', momentum=0.9, clip_norm=1.0)
    config.schedule = dict(base_lr=0.01, decay='cosine', warmup='5 %')
  else:
    config.optimizer = dict(name='adam', weight_decay=0.1, clip_norm=1.0)
    config.schedule = dict(base_lr=1e-3, decay='cosine', warmup='5 %')
  config.reader = dict(on_bad_record='skip', max_bad_share=0.01)
  config.evals = dict(val=dict(name=evaluator, split=held_out, every='10 %'))
  config.checkpoint = dict(every='10 %', best=best)
  config.log = dict(every='10 steps')
  return complete(config)
