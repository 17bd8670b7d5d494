"""Shows where the time of a run went: python -m vit_jax.goodput WORKDIR."""

import json

from absl import flags

from vit_jax.cli import process
from vit_jax.errors import UserError
from vit_jax.files import paths
from vit_jax.run import ledger


def define_flags() -> None:
  """Defines the flags of this command."""
  flags.DEFINE_bool('json', False, 'Print one JSON object.')


def main(arguments: list[str]) -> None:
  """Prints a summary of events.jsonl."""
  if len(arguments) != 1:
    raise process.usage('goodput WORKDIR')
  path = paths.locate(arguments[0]) / 'events.jsonl'
  if not path.exists():
    raise UserError(f'{path} does not exist: give the workdir of a run.')
  summary = ledger.summarise(ledger.read(path))
  if flags.FLAGS.json:
    result = {
      'goodput': summary.goodput,
      'starts': summary.starts,
      'seconds': {k: round(v, 3) for k, v in summary.seconds.items()},
    }
    print(json.dumps(result))
  else:
    print(summary.line())


if __name__ == '__main__':
  process.run(main, define_flags)
