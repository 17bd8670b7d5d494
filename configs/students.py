"""A student of your own: configs/students.py:teacher=PATH,model=Ti.

  python -m vit_jax.train
    --config=configs/students.py:teacher=hf:facebook/dinov2-small,model=Ti

Arguments:
  teacher: weights in any format, the frozen teacher. Its patches must divide
    images of 224 px.
  model: Ti, S or B, the size of the student, a ViT with patches of 16 px.

The student learns to predict the teacher's features and patch tokens through
one linear layer each (objectives/match_features.py), on ImageNet-1k without
labels; for other images set config.source and config.train. The result is
evaluated, fine-tuned and converted like any other; the linear layers are not
part of the model.

This recipe is our own, and its numbers are starting points: 100 epochs with
batches of 1,024, AdamW with β2 .999, rate 1e-3 and weight decay .05, warm-up of
5 epochs, cosine decay, random crops of 25 to 100 % of the image, flips and
colour jitter of .3. No accuracy on ImageNet is expected, because it has not
been run. On CIFAR-10, after 200 steps, its linear probe is better than that of
DINOv2 from scratch, but its nearest neighbours are not
(docs/self_supervised.md). The authors of DINOv3 distil with the losses
and trained heads of the teacher, which released weights do not contain.
"""

from ml_collections import ConfigDict

from vit_jax.config import complete, parse_arg
from vit_jax.errors import UserError, closest
from vit_jax.objectives import match_features
from vit_jax.weights import pretrained

MODELS = ('Ti', 'S', 'B')


def get_config(argument: str | None = None) -> ConfigDict:
  arg = parse_arg(argument, teacher='', model='Ti')
  if not arg.teacher:
    raise UserError(
      'say which teacher: --config=configs/students.py:teacher=PATH,model=Ti.'
    )
  if arg.model not in MODELS:
    raise UserError(
      f'there is no model={arg.model} here; {closest(arg.model, MODELS)}.'
    )
  source = pretrained.find(arg.teacher)
  width = match_features.width_of(source.model(), source.image_size)

  config = ConfigDict()
  config.total = '100 epochs'
  config.batch_size = 1024
  config.image_size = (224, 224)
  config.num_classes = 0

  config.source = dict(name='tfds', dataset='imagenet2012')
  config.train = dict(split='train', num_examples=1_281_167)
  config.augment = dict(
    crop='inception',
    min_area=0.25,
    flip=True,
    interpolation='bicubic',
    color_jitter=0.3,
  )
  config.preprocess = dict(
    resize='torchvision', central_fraction=0.875, interpolation='bicubic'
  )

  config.model = dict(
    name='vit',
    variant=f'{arg.model}/16',
    pool='token',
    gelu='exact',
    start_values='trunc_normal',
    pixels='imagenet',
    dtype='bfloat16',
  )
  config.objective = dict(
    name='match_features', teacher=arg.teacher, teacher_width=width
  )
  config.optimizer = dict(
    name='adam', weight_decay=0.05, decay_mask='kernels', clip_norm=1.0
  )
  config.schedule = dict(base_lr=1e-3, decay='cosine', warmup='5 epochs')

  config.evals = dict(
    knn=dict(name='neighbours', split='validation', every='10 %')
  )
  config.checkpoint = dict(every='2 %', best='knn/20nn')
  return complete(config)
