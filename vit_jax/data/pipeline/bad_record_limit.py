"""How much of a training's data may be bad."""

from vit_jax.errors import UserError


class BadShare:
  """Limit on the fraction of bad training records, over all processes.

  Every process counts what the step summed over the global batch, so all reach
  the limit at the same step.
  """

  def __init__(self, max_share: float, num_examples: int, repeats: int = 1):
    """Nothing is read yet.

    Args:
      max_share: share of the data that may be bad.
      num_examples: number of examples per epoch.
      repeats: rows that each example has, one after the other.
    """
    self._max = max_share
    self._examples, self._repeats = num_examples, repeats
    self._bad = self._rows = 0

  def add(self, bad: int, rows: int) -> None:
    """Takes in a batch: bad records met, and rows.

    Raises:
      UserError: more than the allowed share, of the whole data set in the
        first epoch and of what was read after it; one an epoch is let pass,
        in all its copies.
    """
    self._bad, self._rows = self._bad + bad, self._rows + rows
    epochs = -(-self._rows // self._examples)
    # Each bad record met is one more that was read: it got a replacement.
    read = epochs * self._examples + self._bad
    copies = -(-epochs // self._repeats) * self._repeats
    if self._bad > max(self._max * read, copies):
      raise UserError(
        f'{self._bad} times in {self._rows} rows a record of the training data '
        'could not be used (on all processes together, since the start), more '
        f'than reader.max_bad_share={self._max} allows of '
        f'{self._examples} examples. events.jsonl lists them.'
      )
