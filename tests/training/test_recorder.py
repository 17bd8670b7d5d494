"""Tests of the metrics from the device to a line in metrics.jsonl."""

import types
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from tests import cli
from vit_jax.config.durations import Length
from vit_jax.data.pipeline.stream import BadRecordLimit
from vit_jax.processes.watchdog import Watchdog
from vit_jax.run.guards import Recovery, RollbackError
from vit_jax.run.ledger import Ledger
from vit_jax.run.metrics import Log, Writer
from vit_jax.training import recorder as recorder_lib
from vit_jax.training.experiment import Experiment


@pytest.fixture
def made(tmp_path):
  """Returns a recorder with a line every 5 of 18 steps, and a line reader.

  An epoch has 4 batches of 8 images, and there are two v4 chips.
  """
  folder = epath.Path(tmp_path)
  writer = Writer(folder, active=True)
  chips = np.full(2, types.SimpleNamespace(device_kind='TPU v4'))
  experiment = mock.Mock(
    spec=Experiment,
    length=Length('18 steps', batch_size=8, num_examples=32),
    mesh=types.SimpleNamespace(devices=chips, size=2),
    image_flops=1e6,
    recovery=Recovery(max_skipped=2),
    log=Log(every='5 steps'),
    total_steps=18,
    steps=lambda duration: int(duration.split()[0]),
  )
  recorder = recorder_lib.Recorder(
    experiment,
    writer,
    Ledger(folder / 'events.jsonl'),
    mock.Mock(spec=Watchdog),
    BadRecordLimit(1.0, 64),
  )
  yield recorder, lambda: cli.records(tmp_path)
  writer.close()


def metrics(step, skipped=0, loss=None, **more):
  values = dict(loss=step / 10 if loss is None else loss, grad_norm=1.0, lr=0.1)
  arrays = {k: jnp.float32(v) for k, v in values.items()}
  return arrays | {
    k: jnp.int32(v) for k, v in dict(skipped=skipped, **more).items()
  }


def test_lines_are_written_when_due_and_at_the_end(made):
  """Each has means since the last line; epochs count passes over the data."""
  recorder, lines = made
  for step in range(1, 19):
    recorder.append(step, metrics(step))
  recorder.drain()
  assert [line['step'] for line in lines()] == [5, 10, 15, 18]
  means = [0.3, 0.8, 1.3, 1.7]
  for line, mean in zip(lines(), means, strict=True):
    assert line['loss'] == pytest.approx(mean)
    assert line['epoch'] == line['step'] / 4
    assert line['img_per_sec'] > 0 and 0 <= line['data_wait']
    # 1e6 FLOPs per image on two chips of 275e12 FLOP/s
    mfu = line['img_per_sec'] * 1e6 / 2 / 275e12
    assert line['mfu'] == pytest.approx(mfu)


def test_the_loop_stays_two_steps_ahead(made):
  """A step is fetched when the second one after it was dispatched."""
  recorder, lines = made
  for step in range(1, 7):
    recorder.append(step, metrics(step))
  assert lines() == []
  recorder.append(7, metrics(7))
  assert [line['step'] for line in lines()] == [5]


def test_bad_steps_are_written_and_too_many_raise(made):
  """Of three in a row where two are allowed, the last is written first."""
  recorder, lines = made
  recorder.append(1, metrics(1))
  for step, skipped in ((2, 1), (3, 2), (4, 0), (5, 1), (6, 2)):
    recorder.append(step, metrics(step, skipped, np.nan if skipped else None))
  recorder.drain()
  recorder.append(7, metrics(7, 3, np.inf))
  with pytest.raises(RollbackError) as error:
    recorder.drain()
  assert (error.value.step, error.value.streak) == (7, 3)
  assert [line['step'] for line in lines()] == [2, 3, 5, 6, 7]
  losses = {line['step']: line['loss'] for line in lines()}
  # The line that was due has the mean of the good steps, 1 and 4.
  assert losses == {2: None, 3: None, 5: pytest.approx(0.25), 6: None, 7: None}
  assert [line['skipped'] for line in lines()] == [1, 2, 1, 2, 3]


def test_bad_records_are_summed_between_lines(made):
  """Counts of steps without a line are added to the next line."""
  recorder, lines = made
  for step in range(1, 11):
    recorder.append(step, metrics(step, bad_records=step))
  recorder.drain()
  assert [line['bad_records'] for line in lines()] == [15, 40]


def test_evaluations_have_their_own_line(made):
  """Without results, no line is written."""
  recorder, lines = made
  recorder.evaluations(5, {})
  recorder.evaluations(6, {'val/accuracy': 0.5})
  assert lines() == [{'step': 6, 'val/accuracy': 0.5}]
