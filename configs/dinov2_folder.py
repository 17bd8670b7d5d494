"""DINOv2 on a folder of photographs, continued from released weights.

  python -m vit_jax.train --config=configs/dinov2_folder.py:path=photos
    --config.init_from=hf:facebook/dinov2-small

Arguments:
  path: the folder, as for folder.py. Labels are used only by the evaluation,
    the nearest neighbours of held-out images.
  model: S, B or L, the size of the weights.
  gpus: 1 or 8; 64 images of S, or 32 of B or L, for each.

The recipe is that of dinov2.py:recipe=short, with the following choices of our
own, which are starting points: 10,000 steps, of which 1,000 are warm-up and
3,000 have a rising teacher temperature; a learning rate that is a quarter of
the published one for this batch size, because the backbone is trained already;
momentum .998 and not .992, because batches are small; 16,384 prototypes; drop
path .1. The last layers of the heads have the rate 0 in the first 250 steps.
docs/self_supervised.md explains what to watch. No accuracy is expected: it
depends on the data. A few thousand images are enough to try it; for fewer, the
released weights are usually better as they are.
"""

from ml_collections import ConfigDict

from vit_jax.config import complete, parse_arg
from vit_jax.config.loading import load
from vit_jax.data.sources import folder
from vit_jax.data.storage import files
from vit_jax.errors import UserError

BATCHES = {'S': 64, 'B': 32, 'L': 32}  # images of each GPU
GPUS = (1, 8)


def get_config(argument: str | None = None) -> ConfigDict:
  arg = parse_arg(argument, path='', model='S', gpus=1)
  if not arg.path:
    raise UserError(
      'say which folder: --config=configs/dinov2_folder.py:path=DIR.'
    )
  if arg.model not in BATCHES or arg.gpus not in GPUS:
    raise UserError(
      f'there is no model={arg.model},gpus={arg.gpus} here; allowed: model '
      f'{", ".join(BATCHES)} and gpus {", ".join(map(str, GPUS))}.'
    )
  path = files.local(arg.path, 'the source folder').rstrip('/') or '/'
  found = folder.divide(path)

  recipe = f'recipe=short,model={arg.model},patch=14,gpu=80'
  config = load(f'configs/dinov2.py:{recipe}')
  with config.unlocked():
    config.micro_batches = 1
    config.total = '10000 steps'
    config.batch_size = BATCHES[arg.model] * arg.gpus
    config.source = dict(name='folder', path=path)
    config.train = dict(split=found.train, num_examples=found.num_examples)
    config.augment.group = BATCHES[arg.model]
    config.model.update(remat='none', unroll=12)
    config.model.drop_path = config.model.drop_path_first = 0.1
    config.objective.momentum = 0.998
    config.objective.temperature_warmup = '3000 steps'
    config.objective.head.outputs = 16_384
    *rules, (pattern, _) = config.optimizer.rules
    config.optimizer.rules = (*rules, (pattern, dict(lr_after='250 steps')))
    config.schedule.base_lr = 1e-3 * (config.batch_size / 1024) ** 0.5
    config.schedule.warmup = '1000 steps'
    config.reader = dict(on_bad_record='skip', max_bad_share=0.01)
    config.evals.knn.split = found.held_out
    config.evals.knn.ks = (10, 20)  # a folder may have fewer than 200 images
    config.evals.knn.every = '5 %'
    config.checkpoint.every = '5 %'
    config.log.every = '10 steps'
  return complete(config)
