"""Fetches each step's metrics, checks them, and writes and logs lines."""

import collections
import logging
import time
from collections.abc import Mapping
from typing import Any

import jax

from vit_jax.data.pipeline.bad_record_limit import BadShare
from vit_jax.processes.watchdog import Watchdog
from vit_jax.run.ledger import Ledger
from vit_jax.run.limits import Limits
from vit_jax.run.metrics import Writer
from vit_jax.run.recovery import RollbackError
from vit_jax.run.stragglers import HostTimes

log = logging.getLogger('vit_jax')
_IN_FLIGHT = 2  # steps dispatched beyond the one whose metrics are fetched


class Meter:
  """Throughput between two log lines, leaving out evaluation and saving."""

  def __init__(
    self,
    ledger: Ledger,
    batch_size: int,
    num_devices: int,
    train_flops_per_image: float,
    peak_flops: float | None,
  ):
    self._ledger = ledger
    self.batch_size = batch_size
    self.num_devices = num_devices
    self._flops = train_flops_per_image
    self._peak = peak_flops
    self.reset()

  def reset(self) -> None:
    """Starts a new window, now."""
    self._start = time.perf_counter()
    self._before = dict(self._ledger.totals)
    self._steps = 0

  def step(self) -> None:
    """One more step has finished."""
    self._steps += 1

  def read(self) -> dict[str, float]:
    """img_per_sec, data_wait and, where the peak is known, mfu; then resets."""
    spent = {
      kind: total - self._before.get(kind, 0.0)
      for kind, total in self._ledger.totals.items()
    }
    waited = spent.pop('data_wait', 0.0)
    elapsed = time.perf_counter() - self._start - sum(spent.values())
    elapsed = max(elapsed, 1e-9)
    rate = self._steps * self.batch_size / elapsed
    values = {'img_per_sec': rate, 'data_wait': waited / elapsed}
    if self._peak:
      achieved = rate * self._flops / self.num_devices
      values['mfu'] = achieved / self._peak
    self.reset()
    return values


class Recorder:
  """Takes each step's metrics late, judges them, and reports them.

  Fetching a step's metrics waits for that step; so the loop stays a few steps
  ahead of the device, and no further. Order: fetch, judge, write; `drain`
  finishes all three before a checkpoint is saved.
  """

  def __init__(
    self,
    writer: Writer,
    meter: Meter,
    ledger: Ledger,
    watchdog: Watchdog,
    hosts: HostTimes,
    bad_share: BadShare,
    limits: Limits,
    *,
    max_skipped: int,
    every_steps: int,
    total_steps: int,
    steps_per_epoch: float,
  ):
    self._writer = writer
    self._meter = meter
    self._ledger = ledger
    self._watchdog = watchdog
    self._hosts = hosts
    self._bad_share = bad_share
    self._limits = limits
    self._max_skipped = max_skipped
    self._every_steps = every_steps
    self._total_steps = total_steps
    self._steps_per_epoch = steps_per_epoch
    self._pending: collections.deque[tuple[int, Any]] = collections.deque()
    self._bad_records = 0

  def append(self, step: int, values: Mapping[str, jax.Array]) -> None:
    """Takes the metrics of the step that completed `step` updates."""
    self._pending.append((step, values))
    while len(self._pending) > _IN_FLIGHT:
      self._take()

  def drain(self) -> None:
    """Waits for every step so far; its metrics are on disk after that."""
    while self._pending:
      self._take()
    self._writer.flush()

  def _take(self) -> None:
    step, values = self._pending.popleft()
    with self._hosts.waiting():
      values = {k: v.item() for k, v in jax.device_get(values).items()}
    self._meter.step()
    self._watchdog.step()
    self._hosts.step(step)
    if values['skipped']:
      log.warning(
        'bad step %d: loss %s, gradient norm %s; nothing was updated (%d in a '
        'row)',
        step,
        values['loss'],
        values['grad_norm'],
        values['skipped'],
      )
    if 'bad_records' in values:  # replaced since the last line
      self._bad_share.add(values['bad_records'], self._meter.batch_size)
      self._bad_records += values['bad_records']
      values['bad_records'] = self._bad_records
    due = step % self._every_steps == 0 or step == self._total_steps
    values['epoch'] = step / self._steps_per_epoch
    if due:
      self._report(step, values)
    elif values['skipped']:
      self._writer.write(step, values)
    if not values['skipped']:
      self._limits.step(step, values)
    if values['skipped'] > self._max_skipped:
      self._writer.flush()
      raise RollbackError(step, values['skipped'])

  def _report(self, step: int, values: dict[str, float]) -> None:
    """Writes and shows one line of training metrics."""
    self._bad_records = 0
    values |= self._meter.read()
    self._writer.write(step, values)
    self._ledger.flush(step)
    log.info('%s', console_line(step, self._total_steps, values, self._meter))

  def evaluations(self, step: int, results: Mapping[str, float]) -> None:
    """Writes one line of evaluation results."""
    if results:
      self._writer.write(step, results)
      self._writer.flush()
      shown = [f'{key} {value:.6g}' for key, value in results.items()]
      log.info('step %d  %s', step, '  '.join(shown))

  def summary(self, steps: int, results: Mapping[str, float]) -> str:
    """The line at the end of a run that made `steps` updates."""
    shown = [f'{key} {value:.6g}' for key, value in results.items()]
    return (
      f'finished at step {self._total_steps}: {steps} steps in '
      f'{duration(self._ledger.elapsed_s())}. {"  ".join(shown)}'
    )


def console_line(
  step: int, total: int, values: Mapping[str, float], meter: Meter
) -> str:
  """The progress line of one log step."""
  rate = values['img_per_sec']
  parts = [
    f'step {step}/{total} ({100 * step / total:.1f}%)',
    f'loss {values["loss"]:.4f}',
    f'lr {values["lr"]:.2e}',
    f'{rate:,.0f} img/s',
  ]
  if meter.num_devices > 1:
    parts.append(f'{rate / meter.num_devices:,.1f} img/s/chip')
  if 'mfu' in values:
    parts.append(f'MFU {100 * values["mfu"]:.1f}%')
  parts.append(f'data wait {100 * values["data_wait"]:.1f}%')
  remaining_s = (total - step) * meter.batch_size / max(rate, 1e-9)
  parts.append(f'ETA {duration(remaining_s)}')
  return '  '.join(parts)


def duration(seconds: float) -> str:
  """'2d03h', '3h05m', '4m10s' or '9s'."""
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
