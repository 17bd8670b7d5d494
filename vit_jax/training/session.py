"""Opens and closes the resources of a run: lock, data, checkpoints, step."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax
from etils import epath
from jax.experimental import multihost_utils

from vit_jax.analysis import report
from vit_jax.arrays import sharding
from vit_jax.checkpoint import Checkpointer
from vit_jax.config.completion import flatten
from vit_jax.config.schema import Config, build_section
from vit_jax.data import progress as progress_lib
from vit_jax.data.pipeline import stream
from vit_jax.data.pipeline.stream import BadRecordLimit
from vit_jax.errors import StorageError
from vit_jax.files import paths
from vit_jax.processes import consensus, peers, runtime
from vit_jax.processes.preemption import Preemption
from vit_jax.processes.watchdog import Watchdog
from vit_jax.run import guards, lock, metrics, resume, tracking
from vit_jax.run import ledger as ledger_lib
from vit_jax.run.ledger import Ledger
from vit_jax.training import compiling, data, frozen, kernel_check, reporting
from vit_jax.training.evaluations import Evaluations, Results, is_due
from vit_jax.training.experiment import Experiment
from vit_jax.training.finished import Progress
from vit_jax.training.recorder import Recorder

log = logging.getLogger('vit_jax')
PyTree = Any
# Longest time without progress while the data are opened. Listing and indexing
# report progress for each folder or file, so a large dataset may take longer.
_OPENING_S = 900.0
InitialParams = Callable[[Experiment, stream.Source], PyTree] | None


class Session:
  """The resources that one process of a run uses, from start to end.

  Attributes:
    workdir: directory of the run.
    experiment: experiment of the run.
    ledger: events of the run and the account of its time.
    preemption: agreement of the processes on a signal that ends the run.
    evaluations: evaluators and figures, with their schedules.
    checkpoints: checkpoints of the run.
    save_is_due: function that returns whether a checkpoint is due after a
      number of updates.
    fixed: arguments of the compiled step after state and batch: the random key
      of the run, and the parameters of frozen models.
    recorder: destination of each step's metrics; each `start` replaces it.
  """

  recorder: Recorder

  def __init__(
    self,
    config: Config,
    workdir: epath.Path,
    progress: Progress,
    stack: contextlib.ExitStack,
    allow_changes: bool,
  ):
    """Opens all resources.

    Args:
      config: completed config.
      workdir: directory of the run.
      progress: what earlier starts have done; if no step is left to train, the
        step is not compiled.
      stack: stack that closes the resources; each is registered once opened.
      allow_changes: whether to resume although the checkpoint belongs to
        another run.

    Raises:
      UserError: the config or the data are invalid, or the workdir belongs to
        another run.
      StorageError: the workdir cannot be read or written.
    """
    self.workdir = workdir
    experiment = Experiment.build(config, jax.devices())
    stack.enter_context(jax.set_mesh(experiment.mesh))
    # Only the main process holds the lock, and takes it before the run writes
    # any file, so that two runs on one workdir never mix their files.
    if runtime.is_main():
      paths.check_writable(workdir)
      stack.enter_context(lock.hold(workdir))
    lock.check_shared(workdir)
    self._key = sharding.random_key(config.seed, experiment.mesh)
    self.ledger = Ledger(runtime.process_file(workdir / 'events.jsonl'))
    self._recovery = experiment.recovery
    self._watchdog = Watchdog(
      runtime.process_file(workdir / 'stacks.txt'),
      factor=self._recovery.watchdog_factor,
      min_s=self._recovery.watchdog_min_s,
      pause_s=self._recovery.watchdog_pause_s,
    )
    stack.callback(self._watchdog.close)
    self.preemption = Preemption()
    stack.callback(self.preemption.close)
    with self.ledger.span('init'), self.preemption.nothing_to_save():
      self.experiment = kernel_check.checked(experiment, self._key, self.ledger)
      compiling.describe(self.experiment)
      self._open_data()
      self._open_checkpoints(progress.step, stack, allow_changes)
    # The step is compiled before the state is restored, because compiling may
    # need much memory. A finished run does not need the compiled step.
    if not progress.is_over:
      _ = self.compiled_step  # a cached property
    trackers = []
    if runtime.is_main():
      trackers = tracking.open_trackers(
        self.experiment.log, tracking.Run(workdir, flatten(config))
      )
    self._writer = metrics.Writer(workdir, runtime.is_main(), trackers)
    stack.callback(self._writer.close)

  def _open_data(self) -> None:
    """Opens the training data and the evaluators."""
    # System calls hang if a file system does not respond, and the native reader
    # of array_record hangs if it cannot start threads.
    limit_s = min(_OPENING_S, self._recovery.watchdog_pause_s)
    activity = (
      'opening the data (the storage does not respond, or a limit on memory or '
      'threads, see ulimit -v and -u, is too low)'
    )
    with (
      progress_lib.reported_to(self._watchdog.alive),
      self._watchdog.pause(limit_s, activity),
    ):
      self._source = data.open_train(self.experiment)
      self._bad_record_limit = BadRecordLimit(
        self.experiment.reader.max_bad_share,
        len(self._source),
        self._source.name,
      )
      self._setting = data.evaluation_setting(
        self.experiment,
        self._source.class_names,
        self.ledger,
        self._check_in_evaluation,
        self.workdir,
      )
      self.evaluations = Evaluations(self.experiment, self._setting, self.timed)

  def _open_checkpoints(
    self,
    newest_step: int | None,
    stack: contextlib.ExitStack,
    allow_changes: bool,
  ) -> None:
    """Loads frozen models, opens the checkpoints, and compares this start.

    Checkpoints describe the weights by checksums of the frozen models, so these
    are loaded first. The start is compared with the newest checkpoint.

    Args:
      newest_step: step of the newest checkpoint; None if there is none.
      stack: stack that closes the checkpoints.
      allow_changes: whether to resume although it belongs to another run.
    """
    config = self.experiment.config
    frozen.check_classes(self.experiment.frozen, self._source)
    models = frozen.load(self.experiment.frozen, self.experiment.mesh)
    about = self.experiment.description(self._source, models).to_json()
    self.checkpoints: Checkpointer = build_section(
      config, 'checkpoint', self.workdir / 'checkpoints', about
    )
    stack.callback(self.checkpoints.close)
    self.save_is_due = functools.partial(
      is_due, self.checkpoints.every, self.experiment
    )
    self._saved_results: Results = {}  # evaluation results in the last save
    self._comparison = resume.Comparison(
      self.workdir,
      about,
      config,
      self.checkpoints.read_about,
      allow_changes,
    )
    self._comparison.check_newest(newest_step)
    self._rollbacks: list[guards.Rollback] = []
    self.fixed = self._key, models
    # A mistake in an objective's `weights` is reported before any training.
    jax.eval_shape(
      self.experiment.trainer.weights, self.experiment.abstract_state, models
    )

  @functools.cached_property
  def compiled_step(self) -> Callable[..., Any]:
    """The compiled training step; compiled when it is first used.

    With several variants of the experiment, each is compiled, and the shapes of
    a batch select the step.
    """
    with self.timed('compile'):
      steps = {
        _shapes(each.abstract_batch()): compiling.compile_to_run(each)
        for _, each in self.experiment.variants
      }

    def step(state: PyTree, batch: PyTree, *fixed: PyTree) -> Any:
      return steps[_shapes(batch)](state, batch, *fixed)

    return step

  @contextlib.contextmanager
  def timed(self, kind: str) -> Iterator[None]:
    """Times work other than steps, and raises the watchdog's limit meanwhile.

    Args:
      kind: kind of the span in the ledger: 'eval', 'save', …
    """
    # Every batch of an evaluation restarts the watchdog, so its limit can be
    # shorter than that of other work.
    is_eval = kind == 'eval'
    limit_s = self._recovery.watchdog_eval_s if is_eval else None
    with self.ledger.span(kind), self._watchdog.pause(limit_s):
      yield

  def _check_in_evaluation(self) -> None:
    """Restarts the watchdog and checks for signals.

    It is called with every batch of an evaluation, on every process.
    """
    self._watchdog.alive()
    self.preemption.check()

  def start(self, initial_params: InitialParams) -> tuple[PyTree, int]:
    """Restores the newest intact state, or initializes a new one.

    Lines of metrics.jsonl after the restored step are moved to
    metrics_set_aside.jsonl.

    Args:
      initial_params: function of the experiment and its training data that
        returns the parameters of a new run; None to initialize them randomly.

    Returns:
      The state, and the number of updates completed.

    Raises:
      UserError: the checkpoint belongs to another run, or none is intact.
      StorageError: the checkpoint cannot be read.
    """
    with self.timed('restore'):
      restored = self.checkpoints.restore_latest(self.experiment.abstract_state)
      if restored is None:
        restored = self._new_state(initial_params), 0
      else:
        log.info('resuming at step %d', restored[1])
      state, step = restored
      # Only the newest step has been compared yet. If it was damaged, an older
      # one was restored.
      saved = self._comparison.record_start(
        step, self.ledger, self.experiment.image_flops
      )
      events = consensus.from_main(
        lambda: ledger_lib.read(self.workdir / 'events.jsonl')
      )
      self._rollbacks = guards.rollbacks(saved.get('rollbacks', []), events)
      if runtime.is_main():
        self._writer.rewind(step)
    # The recorder is created outside the span, because it measures the first
    # throughput from its creation.
    self.recorder = Recorder(
      self.experiment,
      self._writer,
      self.ledger,
      self._watchdog,
      self._bad_record_limit,
      saved.get('interval'),
    )
    return state, step

  def _new_state(self, initial_params: InitialParams) -> PyTree:
    """Computes the state before the first step; see `start`."""
    experiment, key = self.experiment, self._key
    shardings = jax.tree.map(
      lambda leaf: leaf.sharding, experiment.abstract_state
    )
    if initial_params is None:
      return jax.jit(experiment.init_state, out_shardings=shardings)(key)

    def from_params(params: PyTree, key: jax.Array) -> PyTree:
      objective, batch = experiment.objective, experiment.abstract_batch()
      _, random_extra = objective.init(key, batch)
      extra = objective.start_extra(params, random_extra)
      return experiment.trainer.state_of(params, extra)

    init = jax.jit(from_params, donate_argnums=0, out_shardings=shardings)
    return init(initial_params(experiment, self._source), key)

  def weights(self, state: PyTree) -> dict[str, PyTree]:
    """Returns all sets of weights to evaluate; see `Trainer.weights`."""
    return self.experiment.trainer.weights(state, self.fixed[1])

  def train_batches(self, step: int) -> stream.Stream:
    """Opens the stream of batches after `step` updates.

    Batches on the skip list are left out.
    """
    return data.train_batches(
      self.experiment,
      self._source,
      step,
      self.ledger,
      guards.skip_list(self._rollbacks),
      self._bad_record_limit,
    )

  def save(
    self, step: int, state: PyTree, results: Results | None = None
  ) -> None:
    """Starts saving a step, or adds results to a step that is already saved.

    A failure is logged and does not end the run: the next save may succeed.

    Args:
      step: number of updates completed.
      state: state after these updates.
      results: metrics of the evaluation after these updates.
    """
    self._saved_results = results = results or {}
    history = {
      'rollbacks': self._rollbacks,
      'interval': self.recorder.interval(),
    }
    with self.timed('save'):
      if not self.checkpoints.save(step, state, results, history):
        self.ledger.event('save_failed', step=step)

  def finish_saving(self, step: int, state: PyTree) -> None:
    """Waits for the last save, and repeats it if the step is not on disk.

    Args:
      step: number of updates completed.
      state: state after these updates.

    Raises:
      StorageError: the step could not be saved.
    """
    if self._is_on_disk(step):
      return
    self.save(step, state, self._saved_results)
    if self._is_on_disk(step):
      return
    root = self.checkpoints.root
    try:
      newest = self.checkpoints.latest_step()
      saved = f'the newest saved step of {root} is {newest}'
    except StorageError as error:
      saved = str(error)
    raise StorageError(
      f'step {step} could not be saved ({self.checkpoints.last_failure}); '
      f'{saved}. Fix the cause, and run the same command again.'
    )

  def _is_on_disk(self, step: int) -> bool:
    """Waits for the current save; returns whether the step is saved."""
    with self.timed('save'):
      self.checkpoints.wait()
    return self.checkpoints.is_committed(step)

  def ends_early(self, results: Results | None, step: int) -> bool:
    """Returns whether the run ends because its best metric is old.

    All processes must call it with the same results.

    Args:
      results: metrics of the evaluators that ran after this step.
      step: number of updates completed.
    """
    patience = self.experiment.config.early_stop_patience
    best, total = self.checkpoints.best, self.experiment.total_steps
    evaluated = results or {}
    if patience is None or step == total or best not in evaluated:
      return False
    plateau = consensus.from_main(
      lambda: guards.plateau(
        self.workdir, best, self.checkpoints.sign, patience
      )
    )
    if plateau is None:
      return False
    log.info(
      'ending early at step %d of %d: %s has not improved since step %d, in %d '
      'evaluations. To continue, set a larger early_stop_patience, or None.',
      step,
      total,
      best,
      plateau['best_step'],
      plateau['evaluations'],
    )
    self.ledger.event('early_stop', **plateau)
    return True

  def write_report(self) -> None:
    """Writes the HTML report, unless `log.report` is off."""
    if self.experiment.log.report and runtime.is_main():
      with self.timed('report'):
        report.write(self.workdir)

  def write_pictures(self, state: PyTree, step: int) -> None:
    """Writes images and predictions of the final state for the HTML report.

    Args:
      state: state after the last step.
      step: number of updates completed.
    """
    if self.experiment.log.report:
      weights = self.weights(state)['params']
      with self.timed('report'):
        reporting.write(
          self.workdir,
          self.experiment,
          self._setting,
          weights,
          self._source,
          step=step,
        )

  def roll_back(self, error: guards.RollbackError) -> None:
    """Records a rollback; the next `start` carries it out.

    Args:
      error: description of the bad steps.

    Raises:
      DivergedError: no more rollbacks are allowed.
    """
    log.warning('%s: rolling back to the last checkpoint', error)
    with self.timed('save'):
      self.checkpoints.wait()
    fields = guards.rollback(
      error,
      self._rollbacks,
      self.checkpoints.latest_step() or 0,
      self.experiment.recovery,
    )
    if runtime.is_main():
      self.ledger.event('rollback', **fields)
    # Other processes read the event in `start`, so it must be on disk by then.
    if jax.process_count() > 1:
      multihost_utils.sync_global_devices('rollback is written')


def _shapes(batch: PyTree) -> tuple[Any, ...]:
  """Returns the shapes of the arrays of a batch, as a key of a dict."""
  return tuple(leaf.shape for leaf in jax.tree.leaves(batch))


@contextlib.contextmanager
def open_session(
  config: Config,
  workdir: epath.Path,
  progress: Progress,
  allow_changes: bool = False,
) -> Iterator[Session]:
  """Opens a run in its workdir, and closes all its resources at the end.

  Args:
    config: completed config.
    workdir: directory of the run.
    progress: what earlier starts have done.
    allow_changes: whether to resume although the checkpoint belongs to another
      run.
  """
  with contextlib.ExitStack() as stack:
    try:
      yield Session(config, workdir, progress, stack, allow_changes)
    except Exception as error:
      # Before anything is closed, because closing may wait for other processes.
      peers.announce(error)
      raise
