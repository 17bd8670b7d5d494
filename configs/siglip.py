"""SigLIP B/16 from scratch on pairs of images and texts in tar shards.

  python -m vit_jax.train
    --config=configs/siglip.py:path=cc12m,tokenizer=sentencepiece.model

Arguments:
  path: shards that img2dataset writes (key.jpg, key.txt), see docs/text.md.
  examples: number of pairs in them.
  tokenizer: file of the tokenizer; by default sentencepiece.model for siglip,
    and tokenizer.json for siglip2.
  tokens: siglip (SentencePiece, 32,000 pieces) or siglip2 (Gemma, 256,000).

Source: arXiv 2303.15343 and 2502.14786 (SigLIP 2). B/16 at 224 pixels, pooling
'map', no projection of images; text tower B with 64 tokens, pooling 'last';
sigmoid loss with t' = log 10 and b = -10; Adam with b2 = 0.95, learning rate
1e-3, decoupled weight decay 1e-4, clipping at 1, warm-up of 20,000 steps,
cosine; batch size 32,768. Learning rate and weight decay are those of SigLIP 2,
section 2.1.

Published (WebLI, which is not public): zero-shot top-1 of ImageNet 71.0 after
three days on 16 TPUv4 (table 1), 76.2 to 76.7 after 40 billion examples.
big_vision has no config of this training. It has not been repeated with this
code. Public data is much smaller: about 18 % was published for B/32 on CC12M.

Predicted by `plan`: v3:8x8 267 core-days (39 % MFU, 13.5 GiB per device),
v5e:16x16 143 (23 %, 8.7 GiB). 8 H100 of 80 GB need --config.micro_batches=8: 34
GPU-days (19 %, 54 GiB).

Differences: Adam, not Adafactor; without SigLIP 2's decoder and
self-distillation.
"""

from ml_collections import ConfigDict

from vit_jax.config import complete, parse_arg
from vit_jax.errors import UserError, closest

VOCABULARY = {'siglip': 32_000, 'siglip2': 256_000}
TOKENIZERS = {'siglip': 'sentencepiece.model', 'siglip2': 'tokenizer.json'}


def get_config(argument: str | None = None) -> ConfigDict:
  arg = parse_arg(
    argument, path='cc12m', examples=10_000_000, tokens='siglip', tokenizer=''
  )
  if arg.tokens not in VOCABULARY:
    raise UserError(
      f'there is no tokens={arg.tokens} here; '
      f'{closest(arg.tokens, VOCABULARY)}.'
    )
  config = ConfigDict()
  config.total = '122000 steps'  # 4 billion examples
  config.batch_size = 32_768
  config.micro_batches = 4
  config.image_size = (224, 224)
  config.num_classes = 0

  config.source = dict(
    name='tar', path=arg.path, label_key=None, others=('txt',)
  )
  config.train = dict(split='train', num_examples=arg.examples)
  texts = dict(
    name='captions',
    preset=arg.tokens,
    tokenizer=arg.tokenizer or TOKENIZERS[arg.tokens],
    key='txt',
  )
  config.augment = dict(crop='none', flip=False, **texts)
  config.preprocess = dict(resize='squash', **texts)

  config.model = dict(name='vit', variant='B/16', pool='map')
  config.objective = dict(
    name='contrastive',
    loss='sigmoid',
    temperature=10.0,
    bias=-10.0,
    text=dict(variant='B', vocabulary=VOCABULARY[arg.tokens], length=64),
  )
  config.optimizer = dict(
    name='adam', b2=0.95, weight_decay=1e-4, clip_norm=1.0
  )
  config.schedule = dict(base_lr=1e-3, decay='cosine', warmup='20000 steps')
  config.mesh = dict(data=-1, fsdp=1, model=1)

  config.evals = dict(
    zero=dict(
      name='zero_shot',
      split='validation',
      source=dict(name='tfds', dataset='imagenet2012'),
      every='10000 steps',
    )
  )
  config.checkpoint = dict(every='5000 steps', best='zero/accuracy')
  config.log = dict(every='50 steps')
  return complete(config)
