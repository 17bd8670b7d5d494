"""LiT: a text tower for an image tower that does not change.

  python -m vit_jax.finetune
    --config=configs/lit.py:path=cc12m,tokenizer=sentencepiece.model
    --config.init_from=B_16.npz

Arguments:
  data: cc12m (tar shards with .txt) or coco (coco_captions of TFDS).
  path: shards of cc12m.
  tokenizer: file of the tokenizer (SigLIP's), sentencepiece.model by default.

The image tower may be any weights that the package reads, such as DINOv2's.

Source: arXiv 2111.07991, appendix D. Softmax loss, temperature 10 at the start;
Adam, learning rate 1e-3, weight decay 1e-4, clipping at 1; 12,000 steps of
16,384 pairs (20 epochs of CC12M), warm-up of 2,000 steps, cosine. Published on
CC12M, zero-shot top-1 of ImageNet: 61.1 (B/32), 66.9 (B/16 with text tower L),
67.6 (L/16 with L).

data=coco: 5,000 steps of 4,096 pairs, weight decay 0.01. big_vision's
coco_B16B reached 20.7 on ImageNet, and recalls at 1 of 47.2 (image to text) and
32.1. These are numbers of this softmax loss at this batch size. The config in
big_vision today, siglip_lit_coco.py, has the sigmoid loss and 512 pairs, and no
published numbers.

Nothing of this was repeated with this code. Differences: the text tower starts
from random weights, not from BERT's, with SigLIP's tokenizer and 16 tokens;
coco is without RandAugment.
"""

from typing import Any

from ml_collections import ConfigDict

from vit_jax.config import complete, parse_arg

DATA: dict[str, dict[str, Any]] = {
  'cc12m': dict(
    total='12000 steps', batch_size=16_384, examples=10_000_000, decay=1e-4
  ),
  'coco': dict(
    total='5000 steps', batch_size=4_096, examples=82_783, decay=0.01
  ),
}
LENGTH = 16


def get_config(argument: str | None = None) -> ConfigDict:
  arg = parse_arg(
    argument,
    dict(data=DATA),
    data='cc12m',
    path='cc12m',
    tokenizer='sentencepiece.model',
  )
  data, coco = DATA[arg.data], arg.data == 'coco'
  config = ConfigDict()
  config.total = data['total']
  config.batch_size = data['batch_size']
  config.image_size = (224, 224)
  config.num_classes = 0

  texts = dict(
    name='captions', tokenizer=arg.tokenizer, length=LENGTH, key='txt'
  )
  if coco:
    texts['key'] = 'captions/text'
    config.source = dict(
      name='tfds',
      dataset='coco_captions',
      label_key=None,
      others=('captions/text',),
    )
  else:
    config.source = dict(
      name='tar', path=arg.path, label_key=None, others=('txt',)
    )
  config.train = dict(split='train', num_examples=data['examples'])
  config.augment = dict(crop='inception', min_area=0.05, flip=coco, **texts)
  config.preprocess = dict(resize='squash', **texts)

  config.model = dict(name='vit')
  config.objective = dict(
    name='contrastive',
    loss='softmax',
    locked=True,
    text=dict(variant='B', length=LENGTH),
  )
  config.optimizer = dict(
    name='adam',
    weight_decay=data['decay'],
    clip_norm=1.0,
    rules=(('model/.*', dict(frozen=True)),),
  )
  warmup = '150 steps' if coco else '2000 steps'
  config.schedule = dict(base_lr=1e-3, decay='cosine', warmup=warmup)
  config.mesh = dict(data=-1, fsdp=1, model=1)

  evals: dict[str, dict[str, Any]] = dict(
    zero=dict(
      name='zero_shot',
      split='validation',
      source=dict(name='tfds', dataset='imagenet2012'),
      every='1000 steps',
    )
  )
  if coco:
    evals['retrieval'] = dict(
      name='retrieval',
      split='val',
      every='1000 steps',
      preprocess=dict(resize='squash', captions_per_image=7, **texts),
    )
  config.evals = evals
  config.checkpoint = dict(every='1000 steps', best='zero/accuracy')
  config.log = dict(every='50 steps')
  return complete(config)
