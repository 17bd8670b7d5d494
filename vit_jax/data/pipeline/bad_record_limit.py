"""Limit on the number of bad training records, over all processes."""

import json

from vit_jax.data.pipeline import reader
from vit_jax.data.pipeline.loader import BadRecord
from vit_jax.data.pipeline.stream import Report
from vit_jax.processes import consensus


class BadRecordLimit:
  """Ends a run in which too many distinct training records are bad.

  Each record is counted once even if it is read many times, as the records of a
  small member of a mixture are. Each process stores the bad records that it has
  read. The training step only sums, over all processes, how often bad records
  were read. The sum of these reads since the last exchange and of the distinct
  bad records at that exchange is an upper bound on the number of distinct bad
  records. The processes exchange their records only when the bound exceeds the
  limit, which happens at the same step on all processes.
  """

  def __init__(
    self, max_share: float, num_examples: int, name: str = 'the training data'
  ):
    """Starts without bad records.

    Args:
      max_share: fraction of the records that may be bad.
      num_examples: number of records.
      name: name of the data, for messages.
    """
    self._max_share, self._num_examples = max_share, num_examples
    self._name = name
    self._own: set[int] = set()  # the prefetching thread adds to it
    self._counted = self._since = 0

  def reporting(self, report: Report) -> Report:
    """Returns a function that stores bad records and then reports them.

    Args:
      report: see `stream.train_batches`.
    """

    def store_and_report(source: str, record: BadRecord) -> None:
      self._own.add(record.index)
      if report:
        report(source, record)

    return store_and_report

  def add(self, reads: int) -> None:
    """Adds the bad records of a step. All processes must call this method.

    Args:
      reads: number of reads of bad records, summed over all processes.

    Raises:
      UserError: more records are bad than allowed.
    """
    self._since += reads
    if self._exceeded_by(self._counted + self._since):
      records = consensus.gather_text(json.dumps(list(self._own)))
      self._counted = len(set().union(*map(json.loads, records)))
      self._since = 0
      reader.check_share(
        self._counted, self._num_examples, self._name, self._max_share
      )

  def _exceeded_by(self, bad: int) -> bool:
    return bad > reader.allowed_bad(self._max_share, self._num_examples)
