"""Tests of a whole run in an object store."""

import json
import signal
import sys

import pytest

from tests import cli, object_store
from tests.faults.counts import injected

WORKDIR = f'gs://{object_store.BUCKET}/deep/run'
CHANGES = {
  'total': '8 steps',
  'schedule.warmup': '1 steps',
  'log.tensorboard': 'true',
  'log.curves': 'true',
  'log.report': 'true',
  'evals.val.every': '1 steps',  # each evaluation uploads the metrics
  'checkpoint.every': '2 steps',
}


@pytest.fixture
def store(monkeypatch):
  with object_store.serve() as running:
    for name, value in running.environment.items():
      monkeypatch.setenv(name, value)
    yield running


def _losses(text: bytes) -> dict[int, float]:
  records = [json.loads(line) for line in text.decode().splitlines()]
  return {r['step']: r['loss'] for r in records if 'loss' in r}


def _wait_for_step(store, step, process):
  line, path = f'"step": {step},'.encode(), 'deep/run/metrics.jsonl'
  cli.wait_until(lambda: line in (store.read(path) or b''), process)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_in_a_bucket_equals_a_local_run(store, tmp_path, monkeypatch):
  """It is stopped and resumed; a command evaluates its checkpoint."""
  monkeypatch.chdir(tmp_path)
  again = cli.train_command(WORKDIR, **CHANGES)
  process = cli.start(again)
  _wait_for_step(store, 3, process)
  process.send_signal(signal.SIGTERM)
  injected('SIGTERM to a run in a bucket')
  _, err = cli.finish(process, code=42)
  assert f'workdir {WORKDIR}\n' in err
  assert 'SAVING' not in err, err.partition('SAVING')[2]
  _, err = cli.run(again)
  assert 'resuming at step' in err and 'SAVING' not in err, err[-2000:]
  cli.train(tmp_path / 'l', **CHANGES)
  there = _losses(store.read('deep/run/metrics.jsonl'))
  assert there == cli.losses(tmp_path / 'l')
  assert list(there) == list(range(1, 9))
  names = store.names('deep/run/')
  assert store.read('deep/run/curves.png')[:4] == b'\x89PNG'
  page = store.read('deep/run/report.html').decode()
  assert '8 of 8' in page and 'Most confident mistakes' in page
  assert sum('/events.out.tfevents.' in name for name in names) == 2
  steps = {n.split('/')[3] for n in names if '/checkpoints/' in n}
  assert {'6', '8'} <= steps
  assert not [name for name in names if 'lock.json' in name or '_try_' in name]
  assert not list(cli.ROOT.glob('gs:*'))
  out, _ = cli.run(cli.command('evaluate', f'--checkpoint={WORKDIR}', '--json'))
  assert json.loads(out)['count'] == 256


@pytest.mark.slow
@pytest.mark.usefixtures('store')
def test_an_absent_bucket_is_a_user_error():
  """There is one message before anything is computed."""
  command = cli.train_command('gs://absent-bucket/run', **CHANGES)
  _, err = cli.run(command, code=2)
  assert err.count('error: ') == 1 and 'Traceback' not in err
  assert 'gs://absent-bucket/run' in err and 'compiling' not in err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_outage_of_the_store_ends_with_one_message(store):
  """Launchers restart the run after its exit code.

  Saved steps stay; threads of the client do not print anything. The pauses
  between attempts are shorter than those of `train`, which saves two minutes.
  """
  steps = {'total': '100000 steps', 'schedule.warmup': '10 steps'}
  flags = cli.train_command(WORKDIR, **CHANGES | steps)[3:]
  command = [sys.executable, '-m', 'tests.faults.impatient', *flags]
  process = cli.start(command, forked=False)
  _wait_for_step(store, 3, process)
  store.stop()
  injected('an object store that goes away')
  _, err = cli.finish(process, code=1, timeout_s=800)
  assert err.count('storage failed: ') == 1, err[-5000:]
  assert err.rstrip().splitlines()[-1].startswith('storage failed: ')
  assert 'Traceback' not in err and 'Trying again in' in err
