"""Fetches, checks, writes and logs the metrics of each step."""

import collections
import logging
import time
from collections.abc import Mapping
from typing import Any

import jax

from vit_jax.arrays import chips
from vit_jax.data.pipeline.bad_record_limit import BadRecordLimit
from vit_jax.processes.watchdog import Watchdog
from vit_jax.run import limits
from vit_jax.run.interval import Interval
from vit_jax.run.ledger import Ledger
from vit_jax.run.metrics import Writer
from vit_jax.run.recovery import RollbackError
from vit_jax.run.stragglers import HostTimes
from vit_jax.training.experiment import Experiment

log = logging.getLogger('vit_jax')
_IN_FLIGHT = 2  # steps that are dispatched before older metrics are fetched


class Meter:
  """Measures throughput between log lines, without evaluation and saving."""

  def __init__(self, experiment: Experiment, ledger: Ledger):
    """Starts measuring.

    Args:
      experiment: experiment of the run.
      ledger: account of time; the time of all its spans except data_wait is
        subtracted.
    """
    self._experiment, self._ledger = experiment, ledger
    self.reset()

  def reset(self) -> None:
    """Starts a new window of time."""
    self._start = time.perf_counter()
    self._totals_at_start = dict(self._ledger.totals)
    self._steps = 0

  def step(self) -> None:
    """Counts one more step that has finished."""
    self._steps += 1

  def read(self) -> dict[str, float]:
    """Computes the throughput of the window, and starts a new one.

    Returns:
      img_per_sec, data_wait (fraction of the time) and, if the peak FLOPs of
      the device are known, mfu (model FLOPs utilization).
    """
    spent = {
      kind: total - self._totals_at_start.get(kind, 0.0)
      for kind, total in self._ledger.totals.items()
    }
    waited = spent.pop('data_wait', 0.0)
    elapsed = time.perf_counter() - self._start - sum(spent.values())
    elapsed = max(elapsed, 1e-9)
    experiment = self._experiment
    rate = self._steps * experiment.config.batch_size / elapsed
    values = {'img_per_sec': rate, 'data_wait': waited / elapsed}
    devices = experiment.mesh.devices
    peak_flops = chips.peak_flops(devices.flat[0].device_kind)
    if peak_flops is not None:
      flops = rate * experiment.image_flops / devices.size
      values['mfu'] = flops / peak_flops
    self.reset()
    return values


class Recorder:
  """Fetches each step's metrics a few steps late, checks and reports them.

  Fetching the metrics of a step waits for that step. Because they are fetched
  late, the loop can dispatch a few steps ahead of the devices, but not more.
  `drain` fetches, checks and writes the metrics of all steps so far, so that no
  checkpoint is saved after a bad step that was not noticed.
  """

  def __init__(
    self,
    experiment: Experiment,
    writer: Writer,
    ledger: Ledger,
    watchdog: Watchdog,
    host_times: HostTimes,
    bad_record_limit: BadRecordLimit,
    interval: Mapping[str, Any] | None = None,
  ):
    """Starts an interval of steps, or continues that of a checkpoint.

    Args:
      experiment: experiment of the run.
      writer: destination of the lines of metrics.
      ledger: account of time, flushed with every line.
      watchdog: watchdog that is notified of every step.
      host_times: work and waiting times of this host.
      bad_record_limit: limit on the fraction of bad training records.
      interval: metrics since the last line, from the checkpoint that the run
        resumes from.
    """
    self._experiment = experiment
    self._writer = writer
    self._ledger = ledger
    self._watchdog = watchdog
    self._host_times = host_times
    self._bad_record_limit = bad_record_limit
    self._meter = Meter(experiment, ledger)
    self._limits = limits.Limits(
      limits.build(experiment.recovery.limits), experiment.steps, ledger
    )
    self._every_steps = experiment.steps(experiment.log.every)
    self._interval = Interval(interval)
    self._pending: collections.deque[tuple[int, Any]] = collections.deque()

  def append(self, step: int, values: Mapping[str, jax.Array]) -> None:
    """Adds the metrics of a step, and processes those of an earlier step.

    Args:
      step: number of updates completed.
      values: scalars on the devices, not necessarily computed yet.

    Raises:
      RollbackError: there were too many bad steps in a row.
    """
    self._pending.append((step, values))
    while len(self._pending) > _IN_FLIGHT:
      self._fetch()

  def drain(self) -> None:
    """Waits for all steps so far, and makes sure their metrics are on disk.

    Raises:
      RollbackError: there were too many bad steps in a row.
    """
    while self._pending:
      self._fetch()
    self._writer.flush()

  def interval(self) -> dict[str, Any]:
    """Returns the metrics since the last line, to be stored in a checkpoint."""
    return self._interval.to_json()

  def _fetch(self) -> None:
    """Fetches the metrics of the oldest pending step, and checks them."""
    step, arrays = self._pending.popleft()
    with self._host_times.waiting():
      values = {k: v.item() for k, v in jax.device_get(arrays).items()}
    self._meter.step()
    self._watchdog.step()
    self._host_times.step(step)
    if values['skipped']:
      log.warning(
        'bad step %d: loss %s, gradient norm %s; nothing was updated (%d in a '
        'row)',
        step,
        values['loss'],
        values['grad_norm'],
        values['skipped'],
      )
    if 'bad_records' in values:
      self._bad_record_limit.add(values['bad_records'])
    self._interval.add(values)
    config = self._experiment.config
    values['epoch'] = step / (config.train.num_examples / config.batch_size)
    if 'bad_records' in values:  # a line has the sum since the last line
      values['bad_records'] = self._interval.bad_records
    is_last = step == self._experiment.total_steps
    if step % self._every_steps == 0 or is_last:
      self._report(step, values)
    elif values['skipped']:
      # A bad step gets a line of its own, with its own metrics.
      self._writer.write(step, values)
    if not values['skipped']:
      self._limits.step(step, values)
    if values['skipped'] > self._experiment.recovery.max_skipped:
      self._writer.flush()
      raise RollbackError(step, values['skipped'])

  def _report(self, step: int, values: Mapping[str, float]) -> None:
    """Writes and logs one line of training metrics."""
    line = self._interval.summary(values) | self._meter.read()
    self._interval = Interval()
    self._writer.write(step, line)
    self._ledger.flush(step)
    log.info('%s', console_line(step, line, self._experiment))

  def evaluations(self, step: int, results: Mapping[str, float]) -> None:
    """Writes one line of evaluation results; nothing if there are none.

    Args:
      step: number of updates completed.
      results: metrics by name.
    """
    if results:
      self._writer.write(step, results)
      self._writer.flush()
      log.info('step %d  %s', step, metrics_text(results))

  def summary(self, step: int, steps: int, results: Mapping[str, float]) -> str:
    """Returns the log line at the end of a run.

    Args:
      step: number of updates completed.
      steps: number of updates since this start of the run.
      results: last metrics of each evaluator, by name.
    """
    return (
      f'finished at step {step}: {steps} steps in '
      f'{duration(self._ledger.elapsed_s())}. {metrics_text(results)}'
    )


def metrics_text(results: Mapping[str, float]) -> str:
  """Formats metrics by name for the console."""
  return '  '.join(f'{key} {value:.6g}' for key, value in results.items())


def console_line(
  step: int, values: Mapping[str, float], experiment: Experiment
) -> str:
  """Returns the progress line for the console.

  Args:
    step: number of updates completed.
    values: metrics of the line.
    experiment: experiment of the run.
  """
  rate, total = values['img_per_sec'], experiment.total_steps
  parts = [
    f'step {step}/{total} ({100 * step / total:.1f}%)',
    f'loss {values["loss"]:.4f}',
    f'lr {values["lr"]:.2e}',
    f'{rate:,.0f} img/s',
  ]
  if experiment.mesh.size > 1:
    parts.append(f'{rate / experiment.mesh.size:,.1f} img/s/chip')
  if 'mfu' in values:
    parts.append(f'MFU {100 * values["mfu"]:.1f}%')
  parts.append(f'data wait {100 * values["data_wait"]:.1f}%')
  remaining = (total - step) * experiment.config.batch_size
  parts.append(f'ETA {duration(remaining / max(rate, 1e-9))}')
  return '  '.join(parts)


def duration(seconds: float) -> str:
  """Formats seconds by their two largest units: '2d03h', '4m10s' or '9s'."""
  seconds = round(seconds)
  for big, small, name in (
    (86400, 3600, 'dh'),
    (3600, 60, 'hm'),
    (60, 1, 'ms'),
  ):
    if seconds >= big:
      first, rest = divmod(seconds, big)
      return f'{first}{name[0]}{rest // small:02d}{name[1]}'
  return f'{seconds}s'
