"""DINOv3 on a folder of photographs, continued from released weights.

  python -m vit_jax.train --config=configs/dinov3_folder.py:path=photos
    --config.init_from=hf:facebook/dinov3-vits16-pretrain-lvd1689m

Arguments:
  path: the folder, as for folder.py. Labels are used only by the evaluation,
    the nearest neighbours of held-out images.
  model: S, B or L, the size of the weights.
  gpus: 1 or 8; 64 images of S, or 32 of B or L, for each.

The losses are those of dinov3.py:recipe=im1k, with random rescaling of the
coordinates, as in the training of the released weights. Their files contain no
heads (and transformers' files no norm for local crops), so the heads are new:
for the first 1,000 steps only they are trained, and the backbone starts at half
of the peak of the learning rate. All of this is our own choice, and so are the
numbers, which are those of dinov2_folder.py except for a warm-up of 2,000
steps: 10,000 steps, a quarter of the published rate for this batch size,
momentum .998, 16,384 prototypes, drop path .1. Gram anchoring is left out: the
authors used it for the 7B model only (dinov3.py:recipe=gram has it).

docs/self_supervised.md explains what to watch. No accuracy is expected: it
depends on the data. A few thousand images are enough to try it; for fewer, the
released weights are usually better as they are. The weights have a licence of
their own (DINOv3 License).
"""

from ml_collections import ConfigDict

from vit_jax.config import complete
from vit_jax.config.loading import load
from vit_jax.errors import UserError

HEADS_ONLY = '1000 steps'


def get_config(argument: str | None = None) -> ConfigDict:
  if not argument or 'path=' not in argument:
    raise UserError(
      'say which folder: --config=configs/dinov3_folder.py:path=DIR.'
    )
  config = load(f'configs/dinov2_folder.py:{argument}')
  size = config.model.variant.partition('/')[0]
  recipe = load(f'configs/dinov3.py:recipe=im1k,model={size}')
  with config.unlocked():
    config.augment = recipe.augment.to_dict() | dict(group=config.augment.group)
    drop_path, unroll = config.model.drop_path, config.model.unroll
    config.model = recipe.model
    config.model.update(
      drop_path=drop_path,
      drop_path_first=drop_path,
      remat='none',
      unroll=unroll,
      registers=4,
      norm_eps=1e-5,
      qkv_bias='query_value',
      rope_rescale=2.0,
    )
    for key in ('centring', 'head', 'patch_head'):
      config.objective[key] = recipe.objective[key]
    config.objective.head.outputs = config.objective.patch_head.outputs = 16_384
    first, last = config.optimizer.rules
    config.optimizer.rules = (
      (first[0], first[1] | dict(after=HEADS_ONLY)),
      last,
      ('model/.*|mask', dict(after=HEADS_ONLY)),
    )
    config.schedule.warmup = '2000 steps'
  return complete(config)
