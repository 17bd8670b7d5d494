"""A run's open resources: lock, ledger, watchdog, checkpoints, step."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from vit_jax.arrays import chips
from vit_jax.config.completion import Config, flatten
from vit_jax.config.sections import build_section
from vit_jax.errors import StorageError
from vit_jax.files import paths
from vit_jax.processes import peers, runtime
from vit_jax.processes.consensus import from_main
from vit_jax.processes.preemption import Preemption
from vit_jax.processes.watchdog import Watchdog
from vit_jax.run import limits, lock, metrics, recovery
from vit_jax.run import workdir as workdir_lib
from vit_jax.run.ledger import Ledger
from vit_jax.run.recorder import Meter, Recorder
from vit_jax.run.stragglers import HostTimes
from vit_jax.run.tracking import Run as TrackedRun
from vit_jax.training import compiling, data, frozen, history, kernel_check
from vit_jax.training.experiment import Experiment
from vit_jax.training.replay import Replay

log = logging.getLogger('vit_jax')
PyTree = Any
InitialParams = Callable[[Experiment], PyTree] | None


class Session:
  """One process's part in a run, from its start to its end."""

  judging = ''  # which weights evaluators look at, in words

  def __init__(
    self,
    config: Config,
    workdir: epath.Path,
    stack: contextlib.ExitStack,
    allow_changes: bool,
  ):
    """Opens everything; `stack` closes it.

    Raises:
      UserError: config or data are invalid.
    """
    self.config, self.workdir = config, workdir
    self.experiment = Experiment.build(config, jax.devices())
    stack.enter_context(jax.set_mesh(self.experiment.mesh))
    if runtime.is_main():
      paths.try_out(workdir)
      stack.enter_context(lock.hold(workdir))
    self.ledger = Ledger(runtime.process_file(workdir / 'events.jsonl'))
    self.recovery = build_section(config, 'recovery')
    self.watchdog = Watchdog(
      runtime.process_file(workdir / 'stacks.txt'),
      factor=self.recovery.watchdog_factor,
      min_s=self.recovery.watchdog_min_s,
      pause_s=self.recovery.watchdog_pause_s,
    )
    stack.callback(self.watchdog.close)
    self.hosts = self._host_times()
    self.preemption = Preemption()
    stack.callback(self.preemption.close)
    with self.doing('init'):
      self.experiment = kernel_check.checked(self.experiment, self.ledger)
      self._open_data()
      frozen.check_classes(self.experiment.frozen, self.source)
      models = frozen.load(self.experiment.frozen, self.experiment.mesh)
      about = self.experiment.about(self.source, models)
      self.checkpoints = build_section(
        config, 'checkpoint', workdir / 'checkpoints', about
      )
      stack.callback(self.checkpoints.close)
      newest = from_main(self.checkpoints.latest_step)
      history.check_end(workdir, newest, self.experiment)
      notes = history.compare(
        workdir, newest, about, config, allow_changes=allow_changes
      )
      self.key = self.experiment.key()
      self.fixed = self.key, models  # what every step takes
      self.abstract_state = self.experiment.abstract_state()
      compiling.describe(self.experiment, self.abstract_state)
    with self.doing('compile'):
      self.train_step = compiling.compile_to_run(self.experiment)
    self.replay = self._replay()
    self._log = build_section(config, 'log')
    told = TrackedRun.of(workdir, flatten(config))
    self.writer = metrics.opened(self._log, told, runtime.is_main())
    stack.callback(self.writer.close)
    self._saved_at, self._results = time.monotonic(), {}  # of the last save
    self.rollbacks: list[recovery.Rollback] = []
    if runtime.is_main():
      self._record(about, notes)

  def _host_times(self) -> HostTimes:
    every = self.experiment.steps(self.recovery.slow_hosts_every)
    return HostTimes(self.ledger, every)

  def _replay(self) -> Replay:
    every = self.experiment.steps(self.recovery.sdc_every)
    return Replay(self.train_step, self.fixed, self.ledger, every)

  def _open_data(self) -> None:
    self.source = data.open_train(self.config)
    self.setting = data.setting(
      self.experiment,
      self.source.class_names,
      self.ledger,
      self._check_in_evaluation,
      self.workdir,
      lambda: self.judging,
    )
    self.evaluators = {
      name: data.evaluator(self.experiment, name, self.setting)
      for name in self.config.evals
    }

  def _record(self, about: dict[str, Any], notes: list[history.Note]) -> None:
    """Records what runs, and what has changed since the last start."""
    run = runtime.describe_run() | about['record']
    run['train_flops_per_image'] = self.experiment.image_flops
    workdir_lib.record(self.workdir, self.config, run)
    for note in notes:
      log.warning('%s', note.text)
      self.ledger.event(note.kind, **note.fields)

  @contextlib.contextmanager
  def doing(self, kind: str) -> Iterator[None]:
    """Around work that is not a step: it is timed, and the watchdog waits."""
    seconds = self.recovery.watchdog_eval_s if kind == 'eval' else None
    with self.ledger.span(kind), self.watchdog.pause(seconds):
      yield

  def _check_in_evaluation(self) -> None:
    """Called with every batch of an evaluation."""
    self.watchdog.alive()
    self.preemption.check()

  def start(self, initial_params: InitialParams) -> tuple[PyTree, int]:
    """The newest intact state, or a new one, and its number of updates.

    Lines of metrics.jsonl beyond that step are set aside.
    """
    with self.doing('restore'):
      restored = self.checkpoints.restore_latest(self.abstract_state)
      if restored is None:
        restored = self._new_state(initial_params), 0
      else:
        log.info('resuming at step %d', restored[1])
      step = restored[1]
      before = history.about(self.workdir, step)
      self.rollbacks = history.rollbacks(self.workdir, step, before)
      if runtime.is_main():
        self.writer.rewind(step, before.get('training_lines', 0))
    return restored

  def _new_state(self, initial_params: InitialParams) -> PyTree:
    shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)
    experiment = self.experiment
    if initial_params is None:
      return jax.jit(experiment.init_state, out_shardings=shardings)(self.key)

    def from_params(params: PyTree, key: jax.Array) -> PyTree:
      objective, batch = experiment.objective, experiment.abstract_batch()
      extra = objective.start_extra(params, objective.init(key, batch)[1])
      return experiment.trainer.state_of(params, extra)

    init = jax.jit(from_params, donate_argnums=0, out_shardings=shardings)
    return init(initial_params(experiment), self.key)

  def weights(self, state: PyTree) -> dict[str, PyTree]:
    """What evaluators judge; see `Trainer.weights`."""
    return self.experiment.trainer.weights(state)

  def recorder(self) -> Recorder:
    """Takes the metrics of the steps to come."""
    config, devices = self.config, self.experiment.mesh.devices
    meter = Meter(
      self.ledger,
      config.batch_size,
      devices.size,
      self.experiment.image_flops,
      chips.peak_flops(devices.flat[0].device_kind),
    )
    return Recorder(
      self.writer,
      meter,
      self.ledger,
      self.watchdog,
      self.hosts,
      data.bad_share(config),
      limits.Limits(
        limits.build(self.recovery.limits), self.experiment.steps, self.ledger
      ),
      max_skipped=self.recovery.max_skipped,
      every_steps=self.experiment.steps(self._log.every),
      total_steps=self.experiment.total_steps,
      steps_per_epoch=config.train.num_examples / config.batch_size,
    )

  def train_batches(self, step: int) -> Any:
    """The batches after `step` updates, without those on the skip list."""
    return data.train_batches(
      self.experiment,
      self.source,
      step,
      self.ledger,
      recovery.skip_list(self.rollbacks),
    )

  def save_is_due(self, step: int) -> bool:
    """Whether `checkpoint.every_minutes` are over, by the main process."""
    minutes = self.config.checkpoint.every_minutes
    if minutes is None or step % self.experiment.steps(self._log.every):
      return False
    due = time.monotonic() - self._saved_at >= 60 * minutes
    if jax.process_count() > 1:
      due = bool(multihost_utils.broadcast_one_to_all(np.array(due)))
    return due

  def save(
    self, step: int, state: PyTree, results: dict[str, float] | None = None
  ) -> None:
    """Begins to save, or adds results; what fails does not end the run."""
    self._results = results = results or {}
    with self.doing('save'):
      if not self.checkpoints.save(step, state, results, self._history()):
        self.ledger.event('save_failed', step=step)
    self._saved_at = time.monotonic()

  def _history(self) -> dict[str, Any]:
    """What a checkpoint holds beside the state, to be compared later."""
    return {
      'rollbacks': self.rollbacks,
      'training_lines': self.writer.training_lines,
    }

  def finish_saving(self, step: int, state: PyTree) -> None:
    """Waits for the last save; tries once more if it is not on disk.

    Raises:
      StorageError: it failed again.
    """
    with self.doing('save'):
      self.checkpoints.settle()
      if self.checkpoints.is_committed(step):
        return
      self.checkpoints.save(step, state, self._results, self._history())
      self.checkpoints.settle()
      if not self.checkpoints.is_committed(step):
        raise StorageError(
          f'step {step} could not be saved; {self.checkpoints.safe()}. Make '
          'room, or mend what the log above names, and run the same command '
          'again.'
        )

  def roll_back(self, error: recovery.RollbackError) -> None:
    """Writes the rollback down; the next `start` carries it out.

    Raises:
      DivergedError: no more rollbacks are allowed.
    """
    log.warning('%s: rolling back to the last checkpoint', error)
    with self.doing('save'):
      self.checkpoints.settle()
    fields = recovery.rollback(
      error, self.rollbacks, self.checkpoints.latest_step() or 0, self.recovery
    )
    if runtime.is_main():
      self.ledger.event('rollback', **fields)
    if jax.process_count() > 1:
      multihost_utils.sync_global_devices('rollback is written')


@contextlib.contextmanager
def open_session(
  config: Config, workdir: epath.Path, allow_changes: bool = False
) -> Iterator[Session]:
  """Opens a run in its workdir, and closes everything in the end.

  Args:
    config: completed.
    workdir: of the run.
    allow_changes: go on although its checkpoint is of another run.
  """
  with contextlib.ExitStack() as stack:
    try:
      yield Session(config, workdir, stack, allow_changes)
    except Exception as error:
      peers.announce(error)
      raise
