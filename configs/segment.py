"""Linear segmentation: classes of pixels from frozen patch tokens.

  python -m vit_jax.finetune --config=configs/segment.py:path=DIR
    --config.init_from=hf:facebook/dinov3-vitb16-pretrain-lvd1689m

Arguments:
  path: the folder with `images/training/…` and `images/validation/…`, and masks
    as PNG files at the same paths below `annotations/` (ADE20k). For data=tfds,
    the TFDS directory, with oxford_iiit_pet.
  data: ade20k (150 classes, of which 0 is none), folder (the same folders for
    data of your own, with `classes`), or pets (TFDS: 2 classes).
  protocol: dinov3, or dinov2.
  classes: number of classes of data=folder.
  size: side of crops and windows, pixels; by default 512, for patches of 16.
    Give 518 for patches of 14 (DINOv2), or 448 for the same number of tokens.

Source: the authors' code (dinov3/eval/segmentation and its config for ADE20k;
mmsegmentation's configs next to DINOv2's released heads): batch norm and a
linear layer on the patch tokens of the last block after its LayerNorm; the
cross-entropy of logits enlarged to the crop, summed over the pixels with a
class and divided by the number of all; AdamW with rate 1e-3 for 40,000 steps of
16 images, a warm-up of 1,500 steps. The image's shorter side is resized to .5
to 2 times that of the crop; a crop is drawn again, up to ten times, while one
class covers more than 75 % of it; flips, and changed colours. Evaluation: the
shorter side is that of a window, windows at 2/3 of their side, their logits are
averaged and interpolated to the size of the original mask.

| protocol | dropout of features | weight decay | decay of the rate |
| dinov3   | 0.1                 | 1e-3         | cosine            |
| dinov2   | 0                   | 1e-4         | linear            |

The paper of DINOv3 (section D.1) chooses the rate from 1e-4, 3e-4 and 1e-3, and
the weight decay from 1e-4 and 1e-3, by the result on the validation set; the
values above are those of its code.

Expected mIoU on ADE20k, the authors': DINOv3 S 47.0, B 51.8, L 54.9 (dinov3);
DINOv2 S 44.3, B 47.3, L 47.7 (dinov2), and 45.5, 48.4, 48.8 with protocol=
dinov3. None has been repeated with this code. Cost: the backbone's forward pass
on 640,000 crops.

Differences: DINOv2's crops are 512 pixels, padded to 518, and its images are
padded to whole patches; here crops and windows have `size`. During the warm-up,
the authors multiply a rate that already decays; here, the decay begins
afterwards. Pixels are scaled to [-1, 1], and the patch embedding of released
weights is rescaled accordingly.
"""

from ml_collections import ConfigDict

from vit_jax.config import complete, parse_arg
from vit_jax.data.sources import folder
from vit_jax.data.storage import files
from vit_jax.errors import UserError

PROTOCOLS = {
  'dinov3': dict(dropout=0.1, weight_decay=1e-3, decay='cosine'),
  'dinov2': dict(dropout=0.0, weight_decay=1e-4, decay='linear'),
}
DATA = ('ade20k', 'folder', 'pets')


def get_config(argument: str | None = None) -> ConfigDict:
  arg = parse_arg(
    argument, path='', data='ade20k', protocol='dinov3', classes=0, size=512
  )
  if arg.protocol not in PROTOCOLS or arg.data not in DATA or not arg.path:
    raise UserError(
      f'path={arg.path},data={arg.data},protocol={arg.protocol}: give path, '
      f'one of data={", ".join(DATA)}, and protocol={", ".join(PROTOCOLS)}.'
    )
  if arg.data == 'folder' and arg.classes < 2:
    raise UserError('data=folder: give the number of classes, classes=21.')
  protocol = PROTOCOLS[arg.protocol]
  path = files.local(arg.path, 'the data').rstrip('/')
  source = dict(
    name='folder', path=f'{path}/images', masks=f'{path}/annotations'
  )
  if arg.data == 'ade20k':
    masks = dict(classes=150, reduce_zero_label=True)
    train, val, num_examples = 'training', 'validation', 20_210
  elif arg.data == 'pets':
    name = 'segmentation_mask'
    source = dict(
      name='tfds', dataset='oxford_iiit_pet', data_dir=path, others=(name,)
    )
    # 1 is the animal, 2 the background, 3 their border.
    masks = dict(classes=2, key=name, table=(255, 1, 0, 255))
    train, val, num_examples = 'train', 'test', 3_680
  else:
    masks = dict(classes=arg.classes)
    found = folder.divide(f'{path}/images', labelled=False, flat=True)
    train, val, num_examples = found[:3]

  config = ConfigDict()
  config.total = '40000 steps'
  config.batch_size = 16
  config.image_size = (arg.size, arg.size)
  config.num_classes = 0  # the backbone has no head

  config.source = source
  config.train = dict(split=train, num_examples=num_examples)
  config.augment = dict(name='segments', **masks)
  config.preprocess = dict(name='segments', resize='squash', **masks)

  # The authors compute in full precision.
  config.model = dict(name='vit', dtype='float32')
  config.objective = dict(
    name='segment',
    classes=masks['classes'],
    dropout=protocol['dropout'],
    count_ignored=True,
  )
  config.optimizer = dict(
    name='adam',
    weight_decay=protocol['weight_decay'],
    rules=(('model/.*', dict(frozen=True)),),
  )
  config.schedule = dict(
    base_lr=1e-3, decay=protocol['decay'], warmup='1500 steps'
  )
  config.mesh = dict(data=-1, fsdp=1, model=1)

  windows = dict(name='windows', label_size=2048, **masks)
  config.evals = dict(
    val=dict(
      name='miou',
      split=val,
      every='4000 steps',
      batch_size=8,
      preprocess=windows,
    )
  )
  config.checkpoint = dict(every='4000 steps', keep=2, best='val/miou')
  config.log = dict(every='50 steps')
  return complete(config)
