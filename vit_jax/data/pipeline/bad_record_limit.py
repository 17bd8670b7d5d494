"""Limit on the number of bad training records, over all processes."""

import json

from vit_jax.data.pipeline import reader
from vit_jax.data.pipeline.loader import BadRecord
from vit_jax.data.pipeline.stream import Report
from vit_jax.processes import consensus


class BadRecordLimit:
  """Ends a run in which too many different training records are bad.

  A record counts once, however often it is drawn: a small member of a mixture
  is read many times in one epoch. Each process knows which bad records it has
  read itself. The step only sums how often a bad record was read on all
  processes, which is an upper bound of the number of new ones. The processes
  therefore compare their records only when this bound exceeds the limit, and
  all of them do so at the same step.
  """

  def __init__(
    self, max_share: float, num_examples: int, name: str = 'the training data'
  ):
    """Starts with no bad records.

    Args:
      max_share: fraction of the records that may be bad.
      num_examples: number of records.
      name: name of the data, for messages.
    """
    self._max_share, self._num_examples = max_share, num_examples
    self._name = name
    self._own: set[int] = set()  # also filled by the thread that reads ahead
    self._counted = self._since = 0

  def reporting(self, report: Report) -> Report:
    """Returns a function that takes note of bad records, then reports them.

    Args:
      report: see `stream.train_batches`.
    """

    def noted(source: str, record: BadRecord) -> None:
      self._own.add(record.index)
      if report:
        report(source, record)

    return noted

  def add(self, reads: int) -> None:
    """Adds the bad records of a step; all processes must call it.

    Args:
      reads: how often a bad record was read, summed over all processes.

    Raises:
      UserError: more records are bad than allowed.
    """
    self._since += reads
    if self._exceeded_by(self._counted + self._since):
      everywhere = consensus.of_each(json.dumps(list(self._own)))
      self._counted = len(set().union(*map(json.loads, everywhere)))
      self._since = 0
      reader.check_share(
        self._counted, self._num_examples, self._name, self._max_share
      )

  def _exceeded_by(self, bad: int) -> bool:
    return bad > reader.allowed_bad(self._max_share, self._num_examples)
