"""Data of evaluators: splits, frozen features, and examples for figures."""

import dataclasses
import logging
import os
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Float, Int, Integer

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
_KEPT = ('label', 'mask')  # arrays of a batch that are results
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


@dataclasses.dataclass(eq=False)
class OnSplit(contract.Evaluator):
  """Base class of evaluators of one split, whose keys are fields.

  Attributes:
    setting: setting of the run.
    split: split to evaluate, in TFDS notation.
    source: config section of data other than those of the run; a config key of
      the evaluators that are not limited to the data of the run.

  Raises:
    UserError: the source or the split does not exist, or it is empty.
  """

  setting: contract.Setting
  _: dataclasses.KW_ONLY
  split: str
  source = None  # not annotated, so that it is not a field

  def __post_init__(self):
    self._source = open_split(self.setting, self.split, self.source)

  def open_train(self, split: str | None) -> stream.Source:
    """Opens the split to fit on, without examples that the training leaves out.

    Args:
      split: split to fit on; None for the training split of the run, or for
        'train' of other data.

    Raises:
      UserError: the split does not exist or is empty, or it has examples in
        common with the evaluated split.
    """
    if split is None:
      split = self.setting.train_split if self.source is None else 'train'
    train = open_split(self.setting, split, self.source)
    train = without_listed(train, self.setting.leave_out, strict=False)
    if common := inspection.num_common(train, self._source):
      raise UserError(
        f'{common:,} of the {len(self._source):,} examples of {self.split!r} '
        f'are also in train_split={split!r}, which is fitted: set splits '
        'without common examples, such as '
        "--config.evals.NAME.train_split='train[:90%]' and "
        "--config.evals.NAME.split='train[90%:]'."
      )
    return train


@dataclasses.dataclass(eq=False, kw_only=True)
class OnFeatures(OnSplit):
  """Base class of evaluators that are fitted on frozen features.

  They do not use the head, and take their classes from the data.

  Attributes:
    who: name of the evaluation, for messages.
    train_split: split to fit on; by default the run's own. The features of all
      of its examples are computed.
    source: section of another source; by default the run's own.
  """

  own_classes = True
  who: ClassVar[str]
  train_split: str | None = None
  source: OtherSource = None

  def __post_init__(self):
    super().__post_init__()
    self._train = self.open_train(self.train_split)
    self._num_classes = max(self._train.num_classes, self._source.num_classes)
    require(self.setting.transform.spec, 'image', 'label', who=self.who)
    self._extract = self.setting.compiled(self._batch_features)

  def _batch_features(self, weights: PyTree, batch: contract.Batch) -> PyTree:
    """Returns features, label and mask of each example."""
    features = self.setting.predict(weights, batch)['features']
    return {'features': features} | {key: batch[key] for key in _KEPT}

  def features(self, weights: PyTree) -> tuple[Any, Any]:
    """Returns the examples to fit on and those to evaluate, as `Labelled`.

    Raises:
      UserError: there is a bad record and the reader's policy is to stop,
        features are not finite, or no example could be used.
    """
    parts = []
    for source in (self._train, self._source):
      found = self.setting.examples(
        weights, source, self._extract, finite={'features': 'the features'}
      )
      parts.append(Labelled(found['features'], found['label']))
    return parts[0], parts[1]


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
    """Preprocesses all images; leaves out what cannot be decoded.

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
