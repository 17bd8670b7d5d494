"""Creates workdirs that look like those of finished runs, and runs commands."""

import json
import pathlib
import types
from unittest import mock


def finish(job, value, steps=3, metric=None, checkpoint=True):
  """Writes the workdir of a finished run, or the result of an evaluation."""
  workdir = pathlib.Path(job.workdir)
  if job.command == 'evaluate':
    workdir.mkdir(parents=True, exist_ok=True)
    found = {'count': 8, metric or job.metric: value}
    (workdir / 'result.json').write_text(json.dumps(found))
    return
  (workdir / f'checkpoints/{steps}/params').mkdir(parents=True)
  (workdir / f'checkpoints/{steps}/about').mkdir()
  if not checkpoint:
    (workdir / f'checkpoints/{steps}/about').rmdir()
  evaluator, _, name = (metric or job.metric).rpartition('/')
  kind = 'neighbours' if name.endswith('nn') else 'classification'
  config = dict(
    total=f'{steps} steps',
    batch_size=2,
    train=dict(num_examples=8),
    evals={evaluator: dict(name=kind, split=evaluator)},
  )
  (workdir / 'config.json').write_text(json.dumps(config))
  lines = [{'step': steps, 'loss': 1}, {'step': steps - 1, 'dev/accuracy': 0.9}]
  lines += [{'step': steps, metric or job.metric: value}]
  text = '\n'.join(map(json.dumps, lines))
  (workdir / 'metrics.jsonl').write_text(text + '\n')
  event = dict(event='finished', step=steps, metrics=[metric or job.metric])
  event['time'] = '2026-01-01T00:00:00+00:00'
  (workdir / 'events.jsonl').write_text(json.dumps(event) + '\n')


def run(command, content, workdir, **values):
  """Runs `sweep` or `study` with the content of a config, and flags."""
  defaults = dict(overrides=[], pretrain=[], weights=[], plan=None)
  given = types.SimpleNamespace(**{**defaults, 'print_jobs': False, **values})
  loaded = content, str(workdir)
  with (
    mock.patch.object(command.flags, 'FLAGS', given),
    mock.patch.object(command.execution, 'load', lambda *_: loaded),
  ):
    command.main([])
