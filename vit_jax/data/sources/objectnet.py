"""ObjectNet: photographs of household objects in unusual places and views.

Of the 313 classes, 113 correspond to one or several of ImageNet's 1,000
classes. As in the paper of ObjectNet (Barbu et al., NeurIPS 2019) and in BiT
(arXiv 1912.11370), only the images of these classes are used. A prediction
among the 1,000 classes is correct if it is one of the corresponding classes;
`labels='imagenet_labels'` of the evaluator `calibration` applies this rule.

The correspondence is that of ObjectNet's authors (`mappings` in the archive;
abarbu/objectnet-template-tensorflow, `mapping_files`). Each image has a red
border of 1 pixel, which is removed. ObjectNet is a test set: its licence does
not allow tuning the parameters of any model on it.
"""

import json
import os
import pathlib
from typing import Any

import numpy as np
import tensorflow_datasets as tfds_lib

from vit_jax.config import schema
from vit_jax.data import fingerprint
from vit_jax.data.images.decode import decode
from vit_jax.data.images.headers import DecodeError
from vit_jax.data.sources import tfds
from vit_jax.data.storage import class_folders, files, splits
from vit_jax.errors import UserError

_FOLDER = 'objectnet-1.0/images'
_KEY = 'imagenet_labels'
_BORDER = 1  # pixels
# Indices of the corresponding ImageNet classes (sorted by WordNet id, as in
# TFDS), by folder.
IMAGENET_CLASSES: dict[str, list[int]] = json.loads(
  pathlib.Path(__file__).with_suffix('.json').read_text()
)


@schema.operational('data_dir')
class Source(splits.Selected):
  """The images of ObjectNet that belong to classes of ImageNet.

  Attributes:
    name: name for messages, such as 'objectnet/test'.
    num_classes: number of ImageNet's classes, 1,000.
    class_names: WordNet ids of ImageNet's classes, as in TFDS.
  """

  label_keys = ('label', _KEY)

  def __init__(self, split: str, /, *, data_dir: str | None = None):
    """Lists the files; images are read when they are needed.

    Args:
      split: 'test', or a part of it, such as 'test[:10%]', which contains the
        same fraction of each class.
      data_dir: directory that contains `objectnet-1.0/images`, the unpacked
        objectnet-1.0.zip of objectnet.dev; by default as for TFDS.

    Raises:
      UserError: the directory does not exist, or lacks one of the 113 classes;
        or the split does not exist.
    """
    place = os.fspath(tfds.default_data_dir(data_dir))
    self._root = f'{files.local(place, "the source objectnet")}/{_FOLDER}'
    try:
      listing = class_folders.listing(
        self._root, endings=('.png',), allow_empty=True
      )
      folders = np.array(listing.classes)[listing.folders]
      missing = set(IMAGENET_CLASSES).difference(folders.tolist())
      if missing:
        raise UserError(f'the classes {sorted(missing)[:3]}, … have no images.')
    except UserError as error:  # of the listing, or of the missing classes
      advice = 'Unpack objectnet-1.0.zip of objectnet.dev into source.data_dir.'
      raise UserError(f'{error} {advice}') from error
    used = np.isin(folders, list(IMAGENET_CLASSES))
    self._paths, self._folders = listing.paths[used], folders[used]
    self._selection = splits.Selection(
      split, {'test': len(self._paths)}, self._cut_order
    )
    self.name = f'objectnet/{split}'
    names = tfds_lib.core.tfds_path('datasets/imagenet2012/labels.txt')
    self.class_names = names.read_text().split()
    self.num_classes = len(self.class_names)

  def __getitem__(self, index: int) -> dict[str, Any]:
    """Returns an image without its border.

    `label` is the first corresponding ImageNet class.

    Raises:
      DecodeError: the image cannot be decoded, or consists of the border.
    """
    _, position = self._selection[index]
    pixels = decode(files.read_image(self.where(index)))
    inner = pixels[_BORDER:-_BORDER, _BORDER:-_BORDER]
    if not inner.size:
      raise DecodeError(f'{pixels.shape} is only a border of 1 pixel')
    labels = IMAGENET_CLASSES[str(self._folders[position])]
    return {
      'image': np.ascontiguousarray(inner),
      'label': labels[0],
      _KEY: list(labels),
    }

  def where(self, index: int) -> str:
    """Returns the file of an example."""
    _, position = self._selection[index]
    return f'{self._root}/{os.fsdecode(self._paths[position])}'

  @property
  def fingerprint(self) -> dict[str, Any]:
    """Dataset fingerprint, compared when a run is resumed.

    See `data.fingerprint`.
    """
    paths = (self._paths[rows] for _, rows in self._selection.rows())
    return fingerprint.sampled(self, *paths)

  def _cut_order(self, split: str) -> np.ndarray:
    del split  # 'test' is the only one
    _, classes = np.unique(self._folders, return_inverse=True)
    return splits.by_class(self._paths, classes)
