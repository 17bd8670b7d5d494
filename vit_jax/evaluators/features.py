"""Frozen features of all examples of a source, on the host."""

from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from vit_jax.config.plugins import Nested, Section
from vit_jax.config.sections import SECTIONS
from vit_jax.data import overlap
from vit_jax.data.contract import require
from vit_jax.data.exclusion import without_listed
from vit_jax.data.pipeline import stream
from vit_jax.errors import UserError
from vit_jax.evaluators import contract

PyTree = Any
# Type of an evaluator's key `source`: config section of data other than those
# of the run.
OtherSource = Annotated[Section | None, Nested(SECTIONS['source'])]


class Labelled(NamedTuple):
  """Features and labels of examples."""

  features: Float[np.ndarray, 'n ... d']
  labels: Int[np.ndarray, ' n']


def open_pair(
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

  Returns:
    Source to fit on, and source to evaluate.

  Raises:
    UserError: the data or a split does not exist or is empty, or the splits
      have examples in common, so that the evaluation would use fitted examples.
  """
  fit_split = train_split
  if fit_split is None:
    fit_split = setting.train_split if section is None else 'train'
  train = open_split(setting, fit_split, section)
  train = without_listed(train, setting.leave_out, strict=False)
  test = open_split(setting, split, section)
  common = overlap.count(train, test)
  if common:
    raise UserError(
      f'{common:,} of the {len(test):,} examples of the split {split!r} are '
      f'also in train_split={fit_split!r}, so that the evaluation would use '
      'examples that were fitted: set a train_split without them, such as '
      "--config.evals.NAME.train_split='train[:90%]'."
    )
  return train, test


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


class Extractor:
  """Computes features without randomness, with one compiled program."""

  def __init__(
    self, setting: contract.Setting, batch_size: int | None, who: str
  ):
    """Creates the program, which is compiled at its first use.

    Args:
      setting: setting of the run.
      batch_size: global batch size; by default that of training.
      who: name of the evaluation that needs the labels, for messages.

    Raises:
      UserError: batches of the run do not contain images and labels.
    """
    require(setting.transform.spec, 'image', 'label', who=who)
    self._setting, self._batch_size = setting, batch_size
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
    features, labels = [], []
    for rows, kept in self.batches(weights, source):
      features.append(rows.features[kept])
      labels.append(rows.labels[kept])
    examples = Labelled(np.concatenate(features), np.concatenate(labels))
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
    results = self._setting.sweep(
      weights, source, self._function, self._batch_size
    )
    for result in results:
      rows = Labelled(result['features'], result['label'])
      if not np.isfinite(rows.features[result['mask']]).all():
        raise UserError(
          f'the features of {source.name} are not finite: the weights have '
          'diverged, or their values are too large for model.dtype. Use an '
          'earlier checkpoint, or --config.model.dtype=float32.'
        )
      yield rows, result['mask']
