"""Writes bad records to events.jsonl, each one only once over all restarts."""

from vit_jax.data.pipeline import stream
from vit_jax.run.ledger import Ledger, read


def report_to(ledger: Ledger | None) -> stream.Report:
  """Returns a function that writes an event for each new bad record.

  Args:
    ledger: destination of the events; None to write no events.

  Returns:
    The function; None if there is no ledger.
  """
  if ledger is None:
    return None
  listed = {
    (event['source'], event['index'])
    for event in read(ledger.path)
    if event['event'] == 'bad_record'
  }

  def report(source: str, record: stream.BadRecord) -> None:
    if (source, record.index) not in listed:
      listed.add((source, record.index))
      ledger.event('bad_record', source=source, **record._asdict())

  return report
