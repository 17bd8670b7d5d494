"""Data of evaluators: splits, frozen features, and examples for figures."""

import logging
import os
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Integer

from vit_jax.config.schema import SECTIONS, Nested, Section
from vit_jax.data import inspection
from vit_jax.data.contract import Preprocess, Source, Wrapped, require
from vit_jax.data.filters import without_listed
from vit_jax.data.images.headers import DecodeError
from vit_jax.data.pipeline import stream
from vit_jax.errors import UserError
from vit_jax.evaluators import contract

log = logging.getLogger('vit_jax')
PyTree = Any
_TITLE = 60  # maximum number of characters of the title of an example
# Type of an evaluator's key `source`: config section of data other than those
# of the run.
OtherSource = Annotated[Section | None, Nested(SECTIONS['source'])]


class Labelled(NamedTuple):
  """Features and labels of examples."""

  features: Float[np.ndarray, 'n ... d']
  labels: Int[np.ndarray, ' n']


def open_split(
  setting: contract.Setting, split: str, section: Section | None = None
) -> stream.Source:
  """Opens a split of the run's source, or of another one.

  Args:
    setting: setting of the run.
    split: split of the source.
    section: config section of another source; None for the run's source.

  Raises:
    UserError: the source or the split does not exist, or it is empty.
  """
  if section is None:
    source = setting.open_source(split)
  else:
    source = setting.open_other(section, split)
  if len(source) == 0:
    raise UserError(f'{source.name} is empty: it has no example.')
  return source


def open_both(
  setting: contract.Setting,
  split: str,
  train_split: str | None,
  section: Section | None,
) -> tuple[stream.Source, stream.Source]:
  """Opens the split to fit on and the split to evaluate.

  Examples that the training leaves out are not fitted on.

  Args:
    setting: setting of the run.
    split: split to evaluate.
    train_split: split to fit on; None for the training split of the run, or for
      'train' of other data.
    section: config section of other data; None for the data of the run.

  Raises:
    UserError: the data or a split does not exist or is empty, or the splits
      have examples in common, so that the evaluation would use fitted examples.
  """
  if train_split is None:
    train_split = setting.train_split if section is None else 'train'
  train = open_split(setting, train_split, section)
  train = without_listed(train, setting.leave_out, strict=False)
  test = open_split(setting, split, section)
  if common := inspection.count(train, test):
    raise UserError(
      f'{common:,} of the {len(test):,} examples of {split!r} are also in '
      f'train_split={train_split!r}, which is fitted: set splits without '
      "common examples, such as --config.evals.NAME.train_split='train[:90%]' "
      "and --config.evals.NAME.split='train[90%:]'."
    )
  return train, test


class Extractor:
  """Computes features without randomness, with one compiled program."""

  def __init__(self, setting: contract.Setting, who: str):
    """Creates the program, which is compiled at its first use.

    Args:
      setting: setting of the run.
      who: name of the evaluation that needs the labels, for messages.

    Raises:
      UserError: batches of the run do not contain images and labels.
    """
    require(setting.transform.spec, 'image', 'label', who=who)
    self._setting = setting
    self._function = setting.compiled(self._batch_features)

  def _batch_features(self, weights: PyTree, batch: contract.Batch) -> PyTree:
    features = self._setting.predict(weights, batch)['features']
    return {
      'features': features,
      'label': batch['label'],
      'mask': batch['mask'],
    }

  def run(self, weights: PyTree, source: stream.Source) -> Labelled:
    """Returns the features of all usable examples, in the order of the source.

    Raises:
      UserError: there is a bad record and the reader's policy is to stop,
        features are not finite, or no example could be used.
    """
    parts = [
      (rows.features[kept], rows.labels[kept])
      for rows, kept in self.batches(weights, source)
    ]
    examples = Labelled(*map(np.concatenate, zip(*parts, strict=True)))
    if not len(examples.labels):
      raise contract.no_example_error(source)
    return examples

  def batches(
    self, weights: PyTree, source: stream.Source
  ) -> Iterator[tuple[Labelled, Bool[np.ndarray, ' n']]]:
    """Yields features and labels of each batch, and a mask of usable examples.

    Raises:
      UserError: there is a bad record and the reader's policy is to stop, or
        features are not finite.
    """
    results = self._setting.sweep(weights, source, self._function)
    for result in results:
      rows = Labelled(result['features'], result['label'])
      if not np.isfinite(rows.features[result['mask']]).all():
        raise contract.not_finite_error('the features', source)
      yield rows, result['mask']


class OnFeatures(contract.Evaluator):
  """Base class of evaluators that are fitted on frozen features.

  They do not use the head, and take their classes from the data.
  """

  own_classes = True

  def open(
    self,
    setting: contract.Setting,
    who: str,
    split: str,
    train_split: str | None,
    section: Section | None,
  ) -> None:
    """Opens both splits, see `open_both`.

    Args:
      setting: setting of the run.
      who: name of the evaluation, for messages.
      split: split to evaluate.
      train_split: split to fit on, or None.
      section: config section of other data, or None.
    """
    self._train, self._test = open_both(setting, split, train_split, section)
    self._num_classes = max(self._train.num_classes, self._test.num_classes)
    self._extract = Extractor(setting, who).run

  def features(self, weights: PyTree) -> tuple[Any, Any]:
    """Returns the examples to fit on and those to evaluate, as `Labelled`."""
    return (
      self._extract(weights, self._train),
      self._extract(weights, self._test),
    )


def own_splits(evals: Any) -> list[str]:
  """Returns the splits of the run's source that its evaluators use, in order.

  Args:
    evals: sections of `config.evals` by name.
  """
  own = (section for section in evals.values() if not section.get('source'))
  return [section['split'] for section in own if section.get('split')]


class Spread(Wrapped):
  """A source with a few examples of another source, spread evenly over it.

  Attributes:
    indices: index of each example in that source, ascending.
  """

  def __init__(self, source: Source, count: int):
    """Chooses the examples.

    Args:
      source: source that the examples are from.
      count: maximum number of examples.
    """
    indices = np.linspace(0, len(source) - 1, min(count, len(source)))
    super().__init__(source)
    self.indices = indices.round().astype(int).tolist()

  def __len__(self) -> int:
    return len(self.indices)

  def _find(self, index: int) -> int:
    return self.indices[index]

  def title(self, index: int) -> str:
    """Returns the name of an example's file, or 'example NUMBER'.

    The number is the index in the original source. It is used if there is no
    file, or if the file contains several examples.
    """
    number = self.indices[index]
    name = os.path.basename(str(self.where(index)))
    # A location with ', ' or ' @ ' is a position in a file of many examples.
    if not name or ', ' in name or ' @ ' in name:
      return f'example {number}'
    return name[:_TITLE]

  def images(
    self, transform: Preprocess
  ) -> tuple[
    Integer[np.ndarray, 'n y x c'], Integer[np.ndarray, 'n y x'] | None
  ]:
    """Preprocesses all images; those that cannot be decoded are left out.

    Returns:
      The images, and the masks `segments` if the transform has them.

    Raises:
      UserError: no image can be decoded.
    """
    images, masks = [], []
    for index in range(len(self)):
      try:
        if 'segments' in transform.spec:
          arrays = transform(self[index], None)
          masks.append(arrays['segments'])
          images.append(arrays['image'])
        else:
          images.append(transform.pixels(self[index]['image']))
      except DecodeError as error:
        log.warning('%s is left out: %s', self.title(index), error)
    if not images:
      raise UserError(f'{self.name} has no usable image.')
    return np.stack(images), np.stack(masks) if masks else None
