"""Prepared TFDS data sets, by random access and without TensorFlow.

array_record files have random access; for tfrecord files the offsets of the
records are found once and cached (`data/index.py`). Examples and their order
are TFDS's own in both.
"""

import copy
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from etils import epath
from google.protobuf.json_format import ParseError
from jaxtyping import Int
from tensorflow_datasets.core.utils.version import list_all_versions

from vit_jax.config import plugins
from vit_jax.data import fingerprint
from vit_jax.data.sources import digits
from vit_jax.data.storage import files, records, splits, tfrecord
from vit_jax.errors import UserError, closest
from vit_jax.files import paths

_PLACE = 'source.data_dir'


class Records:
  """The records of one split of a prepared TFDS data set.

  Base class of the sources that parse such records.

  Attributes:
    name: for messages, 'cifar10/train'.
    features: TFDS's description of the features of an example.
  """

  def __init__(
    self, dataset: str, split: str, data_dir: str | None, on_bad_shard: str
  ):
    """Opens a split; see `Source` for the arguments and errors."""
    root = default_data_dir(data_dir and files.place(data_dir, _PLACE))
    if dataset == digits.NAME:
      # Users' own directories are not written to unless they are named.
      root = root if data_dir else digits.cache_dir(root)
      digits.prepare(root)
    info = _info(_version_dir(root, dataset))
    self.name = f'{dataset}/{split}'
    self.features = info.features
    self._full_name = info.full_name
    self._records = _open(info, dataset, split, on_bad_shard)
    self._parts = info.splits[split].file_instructions

  def __len__(self) -> int:
    return len(self._records)

  def rows(self) -> Iterator[tuple[str, Int[np.ndarray, ' n']]]:
    """Yields the examples as (file, positions in it); see `data.contract`."""
    for part in self._parts:
      yield part.filename, np.arange(part.skip, part.skip + part.take)

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


@plugins.operational('data_dir')
class Source(Records):
  """One split of a prepared TFDS data set, array_record or tfrecord.

  Attributes:
    name: for messages, 'cifar10/train'.
    num_classes: number of classes of the label.
    class_names: one for each class.
  """

  def __init__(
    self,
    split: str,
    /,
    *,
    dataset: str,
    data_dir: str | None = None,
    image_key: str = 'image',
    label_key: str = 'label',
    on_bad_shard: str = 'error',
  ):
    """Opens a split; no image is read until an example is asked for.

    Args:
      split: in the TFDS way: 'train', 'train[:99%]', 'train[1000:]'.
      dataset: TFDS name, with a config where there are several ('name/config')
        and a version where another than the newest is meant ('name:1.0.0').
      data_dir: the TFDS directory; by default $TFDS_DATA_DIR, else
        ~/tensorflow_datasets.
      image_key: name of the image feature.
      label_key: name of the label feature.
      on_bad_shard: treatment of files that were cut short: 'error', or 'skip'
        to take the complete records before the cut (tfrecord) or none of the
        file (array_record, whose index is at its end).

    Raises:
      UserError: not prepared, no such split or feature, another format, or
        files that are missing or cut short.
    """
    super().__init__(dataset, split, data_dir, on_bad_shard)
    label = _check_features(self.features, dataset, image_key, label_key)
    self.num_classes = label.num_classes
    self.class_names = list(label.names)
    self._keys = (image_key, label_key)

  def __getitem__(self, index: int) -> dict[str, Any]:
    return tfrecord.example(self.read(index), *self._keys)

  def with_labels(self, key: str) -> 'Source':
    """Returns the same source with a feature of several labels per example.

    Raises:
      UserError: the feature does not exist, or it has other classes.
    """
    fit = [k for k, v in self.features.items() if self._is_several(v)]
    if key not in fit:
      raise UserError(
        f'{self.name} has no feature {key!r} that is a sequence of labels of '
        f'the same classes as {self._keys[1]!r}; {closest(key, fit)}.'
      )
    found = copy.copy(self)
    found._keys = (*self._keys[:2], key)
    return found

  def _is_several(self, feature: Any) -> bool:
    kinds = tfds.features.Sequence, tfds.features.ClassLabel
    inner = getattr(feature, 'feature', None)
    return (
      isinstance(feature, kinds[0])
      and isinstance(inner, kinds[1])
      and list(inner.names) == self.class_names
    )


def default_data_dir(data_dir: str | None) -> epath.Path:
  """Returns the TFDS directory.

  It is the given one, or $TFDS_DATA_DIR, or ~/tensorflow_datasets.
  """
  default = os.environ.get('TFDS_DATA_DIR', '~/tensorflow_datasets')
  return paths.locate(data_dir or default)


def _info(folder: epath.Path) -> Any:
  """Reads TFDS's description of a version of a dataset."""
  try:
    return tfds.builder_from_directory(folder).info
  except (OSError, ValueError, KeyError, ParseError) as error:
    raise UserError(
      f'dataset_info.json or features.json of {folder} cannot be read '
      f'({str(error).strip().splitlines()[0][:200]}): prepare or copy the data '
      'set again.'
    ) from error


def _check_features(
  features: Any, dataset: str, image_key: str, label_key: str
) -> tfds.features.ClassLabel:
  """Checks the image's and the label's feature, and returns the latter."""
  wanted = {image_key: tfds.features.Image, label_key: tfds.features.ClassLabel}
  for key, kind in wanted.items():
    if key not in features:
      raise UserError(
        f'{dataset} has no feature {key!r} (source.image_key, label_key); '
        f'{closest(key, features)}.'
      )
    if not isinstance(features[key], kind):
      fit = [k for k, feature in features.items() if isinstance(feature, kind)]
      raise UserError(
        f'the feature {key!r} of {dataset} is a '
        f'{type(features[key]).__name__}, not a {kind.__name__} '
        f'(source.image_key, label_key); {closest(key, fit)}.'
      )
  return features[label_key]


def _open(info: Any, dataset: str, split: str, on_bad_shard: str) -> Any:
  """Opens the records of a split.

  Returns:
    An object with `len`, `read(index)` and `where(index)`.
  """
  formats = {found.value for found in info.available_file_formats()}
  chosen = next((f for f in ('array_record', 'tfrecord') if f in formats), None)
  if chosen is None:
    raise UserError(
      f'{dataset} is prepared as {", ".join(sorted(formats))}; array_record '
      f'and tfrecord can be read. python -m vit_jax.prepare {dataset} writes '
      'array_record.'
    )
  if info.file_format.value != chosen:
    info.set_file_format(chosen, override=True, override_if_initialized=True)
  lengths = {name: part.num_examples for name, part in info.splits.items()}
  splits.named(split, lengths)
  try:
    wanted = info.splits[split].file_instructions
  except (ValueError, KeyError, NotImplementedError) as error:
    raise splits.bad_spec(split, lengths) from error
  if not wanted or any(part.take < 1 for part in wanted):
    raise splits.bad_spec(split, lengths, 'has a part without examples')
  if chosen == 'array_record':
    return records.ArrayRecords(wanted, on_bad_shard)
  shards = [
    [os.fspath(path) for path in part.filepaths]
    for part in info.splits.values()
  ]
  counts = [part.shard_lengths for part in info.splits.values()]
  return records.TFRecords(wanted, shards, counts, on_bad_shard)


def _version_dir(root: epath.Path, dataset: str) -> epath.Path:
  """Returns the directory of the newest (or the named) version under root."""
  name, _, version = dataset.partition(':')
  folder = root / name
  found = _versions(folder)
  if version in found:
    return folder / version
  if found and not version:
    return folder / found[-1]
  if found:
    raise UserError(
      f'{folder} holds no version {version!r}; {closest(version, found)}.'
    )
  raise UserError(_absent(name, root))


def _versions(folder: epath.Path) -> list[str]:
  """Returns the names of the versions in a folder, the newest last."""
  names = map(str, list_all_versions(folder))
  return [name for name in names if (folder / name / 'features.json').exists()]


def _absent(name: str, root: epath.Path) -> str:
  """Returns the message for a dataset that does not exist."""
  folder = root / name
  came = f'the data set {name!r} is not prepared: {folder} holds no version.'
  prepare = f'python -m vit_jax.prepare {name} --data_dir={root}'
  if name.startswith('jft'):
    return (
      f'{came} JFT-300M is not public: use configs/l16_i21k.py, or set '
      '--config.source.dataset to your own data set.'
    )
  if name == 'imagenet21k':
    return (
      f'{came} Get fall11_whole.tar (or winter21_whole.tar.gz) from '
      'image-net.org (an account and its licence are needed), then run '
      f'{prepare} --source=fall11_whole.tar'
    )
  configs = sorted(p.name for p in paths.entries(folder) if _versions(p))
  if configs:
    return f'{came} Name one of its configs: {name}/{configs[0]}.'
  return (
    f'{came} If it is elsewhere, give --config.source.data_dir (or set '
    f'TFDS_DATA_DIR); to make it, run {prepare}'
  )
