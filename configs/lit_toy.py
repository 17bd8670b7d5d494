"""Images and texts on a laptop: captions made from the names of classes.

  python -m vit_jax.train --config=configs/lit_toy.py

Arguments:
  data: digits (built in) or cifar10.
  tower: new, which trains both towers, or locked, which trains the text tower
    on an image tower that does not change (LiT). The latter needs weights of
    any format that the package reads:

  python -m vit_jax.finetune
    --config=configs/lit_toy.py:data=cifar10,tower=locked
    --config.init_from=PATH --config.image_size=224

This recipe is not in a paper. The tokenizer, configs/lit_toy_tokenizer.json, is
a list of 45 words in the format of the package tokenizers (pip install
'vit_jax[text]'). Captions are made from three templates, and zero-shot
classification uses others.
"""

import pathlib
from typing import Any

from ml_collections import ConfigDict

from vit_jax.config import complete, parse_arg

TOKENIZER = str(pathlib.Path(__file__).parent / 'lit_toy_tokenizer.json')
TEMPLATES = ('a photo of the {}', 'a picture of a {}', 'this is a {}')
PROMPTS = ('an image of a {}', 'a drawing of the {}')
DIGITS = 'zero one two three four five six seven eight nine'
CIFAR10 = 'airplane automobile bird cat deer dog frog horse ship truck'
SMALL = dict(width=96, depth=2, mlp_dim=192, num_heads=4, dtype='float32')
DATA: dict[str, dict[str, Any]] = {
  'digits': dict(names=DIGITS, examples=1_438, size=16, flip=False, total='30'),
  'cifar10': dict(
    names=CIFAR10, examples=50_000, size=32, flip=True, total='3'
  ),
}


def get_config(argument: str | None = None) -> ConfigDict:
  choices = dict(data=DATA, tower=('new', 'locked'))
  arg = parse_arg(argument, choices, data='digits', tower='new')
  data, locked = DATA[arg.data], arg.tower == 'locked'
  names = tuple(data['names'].split())
  config = ConfigDict()
  config.total = f'{data["total"]} epochs'
  config.batch_size = 128
  config.image_size = (data['size'], data['size'])
  config.num_classes = 0

  config.source = dict(name='tfds', dataset=arg.data)
  config.train = dict(split='train', num_examples=data['examples'])
  texts = dict(name='captions', tokenizer=TOKENIZER, preset='siglip', length=8)
  texts |= dict(vocabulary=45)
  config.augment = dict(
    min_area=0.5,
    flip=data['flip'],
    templates=TEMPLATES,
    classes=names,
    **texts,
  )
  config.preprocess = texts

  sizes = {} if locked else SMALL | dict(patch_size=4, depth=4, pool='gap')
  config.model = dict(name='vit', dtype='float32') | sizes
  config.objective = dict(
    name='contrastive',
    locked=locked,
    text=SMALL | dict(vocabulary=45, length=8, variant=None),
  )
  frozen = (('model/.*', dict(frozen=True)),) if locked else ()
  config.optimizer = dict(
    name='adam', weight_decay=0.01, clip_norm=1.0, rules=frozen
  )
  config.schedule = dict(base_lr=1e-3, decay='cosine', warmup='5 %')

  config.evals = dict(
    zero=dict(
      name='zero_shot',
      split='test',
      prompts=PROMPTS,
      names=names,
      every='10 epochs' if arg.data == 'digits' else '1 epochs',
    )
  )
  config.checkpoint = dict(every='10 epochs', best='zero/accuracy')
  config.log = dict(every='50 steps')
  return complete(config)
