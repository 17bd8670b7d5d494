"""Prepared TFDS datasets, read with random access and without TensorFlow.

array_record files have random access; for tfrecord files, the offsets of the
records are found once and cached (`data/storage/index.py`). In both cases,
examples and their order are those of TFDS.
"""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from etils import epath
from google.protobuf.json_format import ParseError
from jaxtyping import Int
from tensorflow_datasets.core.utils.version import list_all_versions

from vit_jax.config import schema
from vit_jax.data import contract, filters, fingerprint
from vit_jax.data.sources import digits
from vit_jax.data.storage import class_folders, records, splits
from vit_jax.data.storage.class_folders import BOOLEANS, UNLABELLED
from vit_jax.errors import UserError, closest
from vit_jax.files import paths


class Records(contract.Source):
  """The records of one split of a prepared TFDS dataset.

  This is the base class of sources that parse such records.

  Attributes:
    name: name for messages, such as 'cifar10/train'.
    features: TFDS description of the features of an example.
  """

  def __init__(
    self, dataset: str, split: str, data_dir: str | None, on_bad_shard: str
  ):
    """Opens a split; see `Source` for the arguments and errors."""
    root = default_data_dir(data_dir)
    if dataset.partition(':')[0] == digits.NAME:
      # The dataset must not be written to the user's default directory.
      root = root if data_dir else digits.cache_dir(root)
      digits.prepare(root)
    info = _info(_version_dir(root, dataset))
    self.name = f'{dataset}/{split}'
    self.features = info.features
    self._full_name = info.full_name
    self._records = _open(info, dataset, split, on_bad_shard)

  def __len__(self) -> int:
    return len(self._records)

  def rows(self) -> Iterator[tuple[str, Int[np.ndarray, ' n']]]:
    """Yields the examples as (file, positions in it); see `data.contract`."""
    yield from self._records.rows()

  def read(self, index: int) -> bytes:
    """Returns the record of an example."""
    return self._records.read(index)

  @property
  def fingerprint(self) -> dict[str, Any]:
    """Dataset fingerprint, compared when a run is resumed.

    See `data.fingerprint`.
    """
    return fingerprint.sampled(self, dataset=self._full_name)

  def where(self, index: int) -> str:
    """Returns the file of an example and its position in it."""
    return self._records.where(index)


@schema.operational('data_dir', 'class_map')
class Source(Records):
  """One split of a prepared TFDS dataset, array_record or tfrecord.

  Attributes:
    name: name for messages, such as 'cifar10/train'.
    num_classes: number of classes of the label.
    class_names: names of the classes, in the order of the labels.
  """

  def __init__(
    self,
    split: str,
    /,
    *,
    dataset: str,
    data_dir: str | None = None,
    class_map: str | None = None,
    image_key: str = 'image',
    label_key: str | None = 'label',
    others: tuple[str, ...] = (),
    on_bad_shard: str = 'error',
  ):
    """Opens a split; images are read when they are needed.

    Args:
      split: split as in TFDS: 'train', 'train[:99%]', 'train[1000:]'.
      dataset: TFDS name, with a config if there are several ('name/config') and
        a version if it is not the newest ('name:1.0.0').
      data_dir: TFDS directory; by default $TFDS_DATA_DIR, or else
        ~/tensorflow_datasets.
      class_map: text file with a class of the dataset on each line, in the
        order of the labels; a display name may follow after a tab. By default,
        classes and labels are those of the dataset.
      image_key: name of the image feature.
      label_key: name of the label feature, a ClassLabel or a boolean; None for
        images without labels.
      others: names of further features of the examples, as they are stored:
        'segmentation_mask' (an encoded image), 'captions/text' (texts).
      on_bad_shard: treatment of files that were cut short: 'error', or 'skip'
        to use the complete records before the cut (tfrecord) or none of the
        file (array_record, whose index is at its end).

    Raises:
      UserError: the dataset is not prepared, or has another format; the split
        or a feature does not exist; `others` names another image or label; or
        files are missing or cut short.
    """
    super().__init__(dataset, split, data_dir, on_bad_shard)
    contract.check_others(others, image=image_key, label=label_key)
    names = _check_features(self.features, dataset, image_key, label_key)
    self.class_names, self._new_labels = names, None
    if class_map:
      listed = class_folders.load(class_map)
      where = f'the data set {dataset}'
      self._new_labels = [listed.label(name, where) for name in names]
      self.class_names = listed.names
    self.num_classes = len(self.class_names)
    self._image_key, self._label_key = image_key, label_key
    self._others: dict[str, bool] = {}  # whether each is a single value
    self.label_keys = ('label',)
    for key in others:
      leaf, self._others[key] = _leaf(self.features, key, dataset)
      if _class_names(leaf) == names:
        self.label_keys += (key,)

  def __getitem__(self, index: int) -> dict[str, Any]:
    example = records.example(
      self.read(index), self._image_key, self._label_key, self._others
    )
    if self._new_labels is None:
      return example
    return filters.relabelled(example, self.label_keys, self._new_labels)

  @property
  def fingerprint(self) -> dict[str, Any]:
    """Dataset fingerprint, also of the labels that `class_map` assigns."""
    return super().fingerprint | {'new_labels': self._new_labels}


def default_data_dir(data_dir: str | None) -> epath.Path:
  """Returns the given directory, $TFDS_DATA_DIR or ~/tensorflow_datasets.

  Args:
    data_dir: TFDS directory, or None.
  """
  default = os.environ.get('TFDS_DATA_DIR', '~/tensorflow_datasets')
  return paths.locate(data_dir or default)


def _info(folder: epath.Path) -> Any:
  """Reads the TFDS description of a version of a dataset.

  Raises:
    UserError: the files of the description cannot be read.
  """
  try:
    return tfds.builder_from_directory(folder).info
  except (OSError, ValueError, KeyError, ParseError) as error:
    raise UserError(
      f'dataset_info.json or features.json of {folder} cannot be read '
      f'({paths.reason(error)}): prepare or copy the data set again.'
    ) from error


def _check_features(
  features: Any, dataset: str, image_key: str, label_key: str | None
) -> list[str]:
  """Checks the image and the label feature, and returns the class names.

  Raises:
    UserError: a feature does not exist, or has another type.
  """
  images = [
    k for k, f in features.items() if isinstance(f, tfds.features.Image)
  ]
  labels = sorted(k for k, f in features.items() if _class_names(f))
  if image_key in images and label_key in (*labels, None):
    return (
      [UNLABELLED] if label_key is None else _class_names(features[label_key])
    )
  kinds = ', '.join(f'{k}: {type(f).__name__}' for k, f in features.items())
  raise UserError(
    f'source.image_key is {image_key!r} and source.label_key is {label_key!r}, '
    f'but {dataset} has the features {kinds}; images: {", ".join(images)}; '
    'labels (a ClassLabel or a boolean): '
    f'{", ".join([*labels, "None"])} (None for images without labels).'
  )


def _leaf(features: Any, path: str, dataset: str) -> tuple[Any, bool]:
  """Returns the feature at a path, and whether it is a single value.

  Args:
    features: TFDS description of the features of an example.
    path: names of nested features: 'label', 'captions/text'.
    dataset: name of the dataset, for the message.

  Raises:
    UserError: there is no such feature, or it consists of several ones.
  """
  leaf: Any = features
  is_single = True
  for name in path.split('/'):
    is_group = isinstance(leaf, tfds.features.FeaturesDict)
    leaf = leaf[name] if is_group and name in leaf else None
    while isinstance(leaf, tfds.features.Sequence):
      leaf, is_single = leaf.feature, False
  if leaf is None or isinstance(leaf, tfds.features.FeaturesDict):
    parts = features if leaf is None else [f'{path}/{name}' for name in leaf]
    raise UserError(
      f'source.others names {path!r}, but the features of {dataset} are '
      f'{", ".join(parts)}: name one of them, or none (source.others=()).'
    )
  if isinstance(leaf, tfds.features.Tensor) and leaf.shape:
    is_single = False
  return leaf, is_single


def _class_names(feature: Any) -> list[str]:
  """Returns the names of a feature's classes; [] if it is not a label."""
  if isinstance(feature, tfds.features.ClassLabel):
    return list(feature.names) if feature.num_classes else []
  is_boolean = (
    isinstance(feature, tfds.features.Tensor)
    and feature.shape == ()
    and feature.np_dtype == np.bool_
  )
  return BOOLEANS if is_boolean else []  # TFDS stores them as 0 and 1


def _open(
  info: Any, dataset: str, split: str, on_bad_shard: str
) -> records.ArrayRecords | records.TFRecords:
  """Opens the records of a split.

  Returns:
    `records.ArrayRecords` or `records.TFRecords`.

  Raises:
    UserError: the split does not exist, or the format cannot be read.
  """
  formats = {each.value for each in info.available_file_formats()}
  chosen = next((f for f in ('array_record', 'tfrecord') if f in formats), None)
  if chosen is None:
    raise UserError(
      f'{dataset} is prepared as {", ".join(sorted(formats))}; array_record '
      f'(python -m vit_jax.prepare {dataset}) and tfrecord can be read.'
    )
  if info.file_format.value != chosen:
    info.set_file_format(chosen, override=True, override_if_initialized=True)
  lengths = {name: part.num_examples for name, part in info.splits.items()}
  splits.named(split, lengths)  # raises if a split does not exist
  try:
    instructions = info.splits[split].file_instructions
    if not instructions or any(part.take < 1 for part in instructions):
      raise ValueError('a part has no examples')
  except (ValueError, KeyError, NotImplementedError) as error:
    raise splits.bad_spec(split, lengths) from error
  if chosen == 'array_record':
    return records.ArrayRecords(instructions, on_bad_shard)
  shards = [
    [os.fspath(path) for path in part.filepaths]
    for part in info.splits.values()
  ]
  return records.TFRecords(instructions, shards, on_bad_shard)


def _version_dir(root: epath.Path, dataset: str) -> epath.Path:
  """Returns the directory of the given version, or of the newest one.

  Args:
    root: TFDS directory.
    dataset: name of the dataset, optionally with a version: 'name:1.0.0'.

  Raises:
    UserError: the dataset or the version is not prepared.
  """
  name, _, version = dataset.partition(':')
  there = versions(root / name)
  if not version and there:
    version = there[-1]
  if version in there:
    return root / name / version
  # Suggest other versions and configs of the dataset, or else other datasets.
  configs = [p.name for p in paths.entries(root / name) if versions(p)]
  prepared = [f'{name}:{v}' for v in there] + [f'{name}/{c}' for c in configs]
  if not prepared:
    names = {p.name for p in paths.entries(root)}
    prepared = sorted(names - {'downloads'})
  raise UserError(
    f'the data set {dataset!r} is not in {root} ({closest(dataset, prepared)})'
    ': set --config.source.data_dir (or TFDS_DATA_DIR), or prepare it: '
    f'python -m vit_jax.prepare {dataset} --data_dir={root}'
  )


def versions(folder: epath.Path) -> list[str]:
  """Returns the prepared versions in a folder, the newest last."""
  names = map(str, list_all_versions(folder))
  return [name for name in names if (folder / name / 'features.json').exists()]
