"""Any folder of photographs: --config=configs/folder.py:path=photos.

Arguments:
  path: the folder, with `cat/1.jpg`, …, or with `train/cat/1.jpg` and `val/…`.
  variant: size of the ViT, S/16 by default.
  tune: 1 for fine-tuning from --config.init_from at 384 px with Table 4's
    recipe for small datasets, instead of training from scratch at 224 px.
  objective: supervised, or mae for pre-training without labels, also of a
    folder without class folders. If there are labels, they are used only by the
    nearest neighbours of held-out images.
  channels, bits: number of channels and bits per channel (8 or 16) of images
    that are not RGB photographs: TIFF, PNG or NumPy files. Set their mean and
    std by --config.model.mean and .std, which check_data prints.
  ending: ending of the files if it is not that of an image format: .npy.

This recipe is not in the paper, and its accuracy depends on the data. A few
thousand photographs are too few for training from scratch: fine-tune if you
can. Without a val folder, a tenth of each class is held out, always the same
images; the image of a class with a single image is used for training. Classes
and sizes are counted when the config is loaded.

Images are averaged when they shrink (interpolation `area`): photographs are
large, and plain bilinear resizing, which the paper's configs use, causes
aliasing at small sizes. bilinear_antialias and bicubic are Pillow's filters,
which take many times as long as decoding for a 12-megapixel file.

With objective=mae, the recipe is that of mae.py, with the following choices of
our own for small sets: 400 epochs, batches of 128 with the published rate for
this size, a warm-up of 5 %, the sizes of `variant`, and a decoder of four
layers of width 256. Fine-tune the result with tune=1. Large weights are adapted
on one GPU with --config.lora.rank=16 (docs/own_data.md).
"""

from typing import Any

from ml_collections import ConfigDict

from vit_jax.config import complete, parse_arg
from vit_jax.data.sources import folder
from vit_jax.data.storage import files
from vit_jax.errors import UserError


def get_config(argument: str | None = None) -> ConfigDict:
  arg = parse_arg(
    argument,
    path='',
    variant='S/16',
    tune=0,
    objective='supervised',
    channels=3,
    bits=8,
    ending='',
  )
  if arg.objective not in ('supervised', 'mae') or (
    arg.objective == 'mae' and arg.tune
  ):
    raise UserError(
      f'objective={arg.objective},tune={arg.tune}: give objective=supervised '
      'with tune=0 or 1, or objective=mae.'
    )
  if not arg.path:
    raise UserError('say which folder: --config=configs/folder.py:path=DIR.')
  path = files.local(arg.path, 'the source folder').rstrip('/') or '/'
  endings = (arg.ending,) if arg.ending else files.IMAGES
  found = folder.divide(path, endings, arg.objective == 'supervised')
  kind = dict(channels=arg.channels, bits=arg.bits)

  config = ConfigDict()
  config.total = '20 epochs' if arg.tune else '100 epochs'
  config.batch_size = 128
  config.image_size = (384, 384) if arg.tune else (224, 224)
  config.num_classes = found.num_classes

  config.source = dict(name='folder', path=path, endings=endings)
  config.train = dict(split=found.train, num_examples=found.num_examples)
  config.augment = dict(
    crop='inception', min_area=0.05, flip=True, interpolation='area', **kind
  )
  config.preprocess = dict(resize='squash', interpolation='area', **kind)

  config.model = dict(
    name='vit',
    variant=None if arg.tune else arg.variant,
    channels=arg.channels,
    dtype='float32',
    unroll=12,  # faster on CPUs and GPUs; compiles longer
  )
  config.objective = dict(name='supervised', cross_entropy='softmax')
  if arg.tune:
    config.optimizer = dict(name='sgd', momentum=0.9, clip_norm=1.0)
    config.schedule = dict(base_lr=0.01, decay='cosine', warmup='5 %')
  else:
    config.optimizer = dict(name='adam', weight_decay=0.1, clip_norm=1.0)
    config.schedule = dict(base_lr=1e-3, decay='cosine', warmup='5 %')

  config.reader = dict(on_bad_record='skip', max_bad_share=0.01)
  config.evals = dict(
    val=dict(name='classification', split=found.held_out, every='10 %')
  )
  config.checkpoint = dict(every='10 %', best='val/accuracy')
  config.log = dict(every='10 steps')
  if arg.objective == 'mae':
    _pretrain(config, found.num_classes > 1)
  return complete(config)


def _pretrain(config: Any, labelled: bool) -> None:
  """Changes a config to training without labels."""
  config.total, config.num_classes = '400 epochs', 0
  config.augment.min_area = 0.2
  config.model.update(
    pool='token', position='sincos2d_mae', gelu='exact', start_values='mae'
  )
  config.objective = dict(
    name='mae',
    mask_ratio=0.75,
    norm_pixels=True,
    decoder=dict(width=256, depth=4, num_heads=8, mlp_dim=1024, unroll=4),
  )
  config.optimizer = dict(
    name='adam',
    b1=0.9,
    b2=0.95,
    weight_decay=0.05,
    decay_mask='tensors',
  )
  config.schedule.base_lr = 1.5e-4 * config.batch_size / 256
  knn = dict(
    name='neighbours', split=config.evals.val.split, ks=(10, 20), every='10 %'
  )
  config.evals = dict(knn=knn) if labelled else dict()
  config.checkpoint.best = 'knn/10nn' if labelled else None
