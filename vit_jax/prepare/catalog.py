"""Data sets of the paper by their TFDS names, and their manual downloads.

Because of their licences, some archives must be downloaded by hand and put
unchanged into DATA_DIR/downloads/manual.
"""

import pathlib
from typing import Any

from vit_jax.errors import UserError

# Files that must be downloaded by hand. If an archive of ImageNet is missing,
# TFDS would leave out its split without an error.
_MANUAL = {
  'imagenet2012': ('ILSVRC2012_img_train.tar', 'ILSVRC2012_img_val.tar'),
  'imagenet2012_real': ('ILSVRC2012_img_val.tar',),
  'resisc45': ('NWPU-RESISC45',),
  'diabetic_retinopathy_detection': ('trainLabels.csv', 'train', 'test'),
}

# The list that `prepare` prints: names and remarks.
PRE_TRAINING = {
  'imagenet21k': 'Table 3: from the public archive, --source',
  'imagenet2012': 'Tables 2, 3, 5: archives downloaded by hand',
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
  'clevr': 'structured: count, distance (source vtab)',
  'dmlab': 'structured',
  'dsprites': 'structured: location, orientation (source vtab)',
  'kitti': 'structured: distance (source vtab)',
  'smallnorb': 'structured: label_azimuth, label_elevation',
}
_OTHERS = {
  'digits': 'part of scikit-learn; prepared when it is needed',
  'folder': 'your own CLASS/IMAGE: --source=DIR --name=my_set',
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
  lines += ['', 'and every other data set of TFDS by its name']
  return '\n'.join(lines)


def require_manual_files(builder: Any, data_dir: pathlib.Path) -> None:
  """Checks that the files of manual downloads exist.

  Args:
    builder: builder of TFDS.
    data_dir: TFDS directory.

  Raises:
    UserError: files are missing; the message lists them, with the instructions
      of TFDS.
  """
  if not builder.MANUAL_DOWNLOAD_INSTRUCTIONS:
    return
  folder = data_dir / 'downloads/manual'
  files = _MANUAL.get(builder.name, ())
  missing = [name for name in files if not (folder / name).exists()]
  if not files and not (folder.is_dir() and any(folder.iterdir())):
    missing = ['the files that TFDS requires']
  if missing:
    instructions = ' '.join(builder.MANUAL_DOWNLOAD_INSTRUCTIONS.split())
    raise UserError(
      f'{builder.name} has to be downloaded by hand; missing in {folder}: '
      f'{" and ".join(missing)}. {instructions}'
    )
