"""Fetches, checks, writes and logs the metrics of each step."""

import collections
import dataclasses
import datetime
import logging
from collections.abc import Mapping
from typing import Any

import jax

from vit_jax.arrays.devices import peak_flops
from vit_jax.data.pipeline.stream import BadRecordLimit
from vit_jax.processes.watchdog import Watchdog
from vit_jax.run import guards
from vit_jax.run.guards import RollbackError
from vit_jax.run.ledger import Ledger
from vit_jax.run.metrics import Interval, Writer
from vit_jax.run.profiling import HostTimes
from vit_jax.training.experiment import Experiment

log = logging.getLogger('vit_jax')
_IN_FLIGHT = 2  # steps that are dispatched before older metrics are fetched


@dataclasses.dataclass
class Recorder:
  """Fetches each step's metrics a few steps late, checks and reports them.

  Fetching the metrics of a step waits for that step. Because they are fetched
  late, the loop can dispatch a few steps ahead of the devices, but not more.
  `drain` fetches, checks and writes the metrics of all steps so far, so that no
  checkpoint is saved after a bad step that was not noticed.

  Attributes:
    experiment: experiment of the run.
    writer: destination of the lines of metrics.
    ledger: account of time, flushed with every line.
    watchdog: watchdog that is notified of every step.
    bad_record_limit: limit on the fraction of bad training records.
    stored: metrics since the last line, from the checkpoint that the run
      resumes from.
  """

  experiment: Experiment
  writer: Writer
  ledger: Ledger
  watchdog: Watchdog
  bad_record_limit: BadRecordLimit
  stored: dataclasses.InitVar[Mapping[str, Any] | None] = None

  def __post_init__(self, stored: Mapping[str, Any] | None):
    self._start_throughput()
    recovery = self.experiment.recovery
    self.host_times = HostTimes(
      self.ledger, self.experiment.steps(recovery.slow_hosts_every)
    )
    self._limits = guards.Limits(
      recovery.limits, self.experiment.steps, self.ledger
    )
    self._every_steps = self.experiment.steps(self.experiment.log.every)
    self._interval = Interval(**(stored or {}))
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
    self.writer.flush()

  def interval(self) -> dict[str, Any]:
    """Returns the metrics since the last line, to be stored in a checkpoint."""
    return dataclasses.asdict(self._interval)

  def _fetch(self) -> None:
    """Fetches the metrics of the oldest pending step, and checks them."""
    step, arrays = self._pending.popleft()
    with self.host_times.waiting():
      values = {k: v.item() for k, v in jax.device_get(arrays).items()}
    self._steps += 1
    self.watchdog.step()
    self.host_times.step(step)
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
      self.bad_record_limit.add(values['bad_records'])
    self._interval.add(values)
    values['epoch'] = self.experiment.length.epoch(step)
    # `bad_record_limit` was given the bad records of this step; a line contains
    # the number of bad records since the previous line.
    if 'bad_records' in values:
      values['bad_records'] = self._interval.bad_records
    is_last = step == self.experiment.total_steps
    if step % self._every_steps == 0 or is_last:
      self._report(step, values)
    elif values['skipped']:
      # A bad step gets a line of its own, with its own metrics.
      self.writer.write(step, values)
    if not values['skipped']:
      self._limits.step(step, values)
    if values['skipped'] > self.experiment.recovery.max_skipped:
      self.writer.flush()
      raise RollbackError(step, values['skipped'])

  def _report(self, step: int, values: Mapping[str, float]) -> None:
    """Writes and logs one line of training metrics."""
    line = self._interval.summary(values) | self._throughput()
    self._interval = Interval()
    self.writer.write(step, line)
    self.ledger.flush(step)
    log.info('%s', console_line(step, line, self.experiment))

  def _start_throughput(self) -> None:
    """Starts the interval over which the throughput is measured."""
    self._steps = 0  # steps that have finished since the last line
    self._start = self.ledger.steps_s()
    self._waited_s = self.ledger.totals.get('data_wait', 0.0)

  def _throughput(self) -> dict[str, float]:
    """Computes the throughput since the last line.

    Evaluations and saves do not count.

    Returns:
      img_per_sec, data_wait (fraction of the time) and, if the peak FLOPs of
      the device are known, mfu (model FLOPs utilization).
    """
    waited = self.ledger.totals.get('data_wait', 0.0) - self._waited_s
    elapsed = max(self.ledger.steps_s() - self._start, 1e-9)
    rate = self._steps * self.experiment.length.batch_size / elapsed
    values = {'img_per_sec': rate, 'data_wait': waited / elapsed}
    devices = self.experiment.mesh.devices
    peak = peak_flops(devices.flat[0].device_kind)
    if peak is not None:
      flops = rate * self.experiment.image_flops / devices.size
      values['mfu'] = flops / peak
    self._start_throughput()
    return values

  def evaluations(self, step: int, results: Mapping[str, float]) -> None:
    """Writes one line of evaluation results; nothing if there are none.

    Args:
      step: number of updates completed.
      results: metrics by name.
    """
    if results:
      self.writer.write(step, results)
      self.writer.flush()
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
      f'{duration(self.ledger.elapsed_s())}. {metrics_text(results)}'
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
  remaining = (total - step) * experiment.length.batch_size
  parts.append(f'ETA {duration(remaining / max(rate, 1e-9))}')
  return '  '.join(parts)


def duration(seconds: float) -> str:
  """Formats seconds as '2 days, 3:04:05'."""
  return str(datetime.timedelta(seconds=round(seconds)))
