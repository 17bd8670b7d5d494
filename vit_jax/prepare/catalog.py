"""Data sets of the paper by their TFDS names, and what a person has to do.

Where a licence asks for it, archives are fetched by hand and put, as they are,
into DATA_DIR/downloads/manual.
"""

import pathlib
from typing import Any, NamedTuple

from vit_jax.errors import UserError

MANUAL = 'downloads/manual'


class Manual(NamedTuple):
  """Files that a person has to fetch.

  Attributes:
    files: names in the manual directory.
    steps: source of the numbers of steps.
  """

  files: tuple[str, ...]
  steps: str


_IMAGE_NET = (
  'Register at https://image-net.org/download-images, accept its terms and '
  'fetch'
)
BY_HAND = {
  'imagenet2012': Manual(
    ('ILSVRC2012_img_train.tar', 'ILSVRC2012_img_val.tar'),
    f'{_IMAGE_NET} the ILSVRC 2012 training images (task 1 & 2, 138 GB) and '
    'validation images (6.3 GB).',
  ),
  'imagenet2012_real': Manual(
    ('ILSVRC2012_img_val.tar',),
    f'{_IMAGE_NET} the ILSVRC 2012 validation images (6.3 GB); the ReaL '
    'labels are downloaded.',
  ),
  'resisc45': Manual(
    ('NWPU-RESISC45',),
    'Fetch NWPU-RESISC45.rar from https://1drv.ms/u/s!AmgKYzARBl5ca3HNaHIlzp_'
    'IXjs and unpack it there.',
  ),
  'diabetic_retinopathy_detection': Manual(
    ('trainLabels.csv', 'train', 'test'),
    'Accept the rules of '
    'https://www.kaggle.com/c/diabetic-retinopathy-detection/data, fetch its '
    'files and unpack there: the images of train.zip.* to train/, of '
    'test.zip.* to test/, and trainLabels.csv.zip.',
  ),
}

# What `prepare` lists: name, and what to know of it.
PRE_TRAINING = {
  'imagenet21k': 'Table 3: from the public archive, --source',
  'imagenet2012': 'Tables 2, 3, 5: archives fetched by hand',
  'imagenet2012_real': 'ReaL labels: validation archive by hand',
}
TRANSFER = {
  'cifar10': 'Table 5: downloaded',
  'cifar100': 'Table 5: downloaded',
  'oxford_iiit_pet': 'Table 5: downloaded',
  'oxford_flowers102': 'Table 5: downloaded',
}
VTAB = {
  'caltech101': 'natural',
  'cifar100': 'natural',
  'dtd': 'natural',
  'oxford_flowers102': 'natural',
  'oxford_iiit_pet': 'natural',
  'sun397/tfds': 'natural',
  'svhn_cropped': 'natural',
  'patch_camelyon': 'specialized',
  'eurosat/rgb': 'specialized',
  'resisc45': 'specialized, by hand',
  'diabetic_retinopathy_detection/btgraham-300': 'specialized, by hand',
  'clevr': 'structured: count, distance (derived labels)',
  'dmlab': 'structured',
  'dsprites': 'structured: label_x_position, label_orientation',
  'kitti': 'structured: distance (derived label)',
  'smallnorb': 'structured: label_azimuth, label_elevation',
}
_OTHERS = {
  'digits': 'comes with scikit-learn; made when it is needed',
  'folder': 'your CLASS/IMAGE: --source=DIR --name=my_set',
}


def listing() -> str:
  """Lists the data sets that can be prepared, one per line."""
  groups = {
    'Pre-training': PRE_TRAINING,
    'Transfer': TRANSFER,
    'VTAB': VTAB,
    'Others': _OTHERS,
  }
  lines = ['python -m vit_jax.prepare NAME [--source=PATH] --data_dir=DIR']
  for title, entries in groups.items():
    lines += ['', f'{title}:']
    lines += [f'  {name:<28} {note}' for name, note in entries.items()]
  lines += ['', 'and every other data set of TFDS by its name.']
  return '\n'.join(lines)


def require_manual_files(builder: Any, data_dir: pathlib.Path) -> None:
  """Checks that what a person has to fetch is there.

  Args:
    builder: builder of TFDS.
    data_dir: the TFDS directory.

  Raises:
    UserError: it is not; says which files are wanted from where.
  """
  instructions = builder.MANUAL_DOWNLOAD_INSTRUCTIONS
  if not instructions:
    return
  folder = data_dir / MANUAL
  manual = BY_HAND.get(builder.name, Manual((), ' '.join(instructions.split())))
  if manual.files:
    missing = [f for f in manual.files if not (folder / f).exists()]
  else:
    empty = not (folder.is_dir() and any(folder.iterdir()))
    missing = ['what TFDS asks for'] if empty else []
  if missing:
    raise UserError(
      f'{builder.name} cannot be downloaded by a program: {folder} lacks '
      f'{" and ".join(missing)}. {manual.steps} Then run the same command '
      'again.'
    )
