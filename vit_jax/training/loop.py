"""The training loop: restore or start; then step, log, save and evaluate."""

import contextlib
import logging
from typing import Any

import jax
from etils import epath

from vit_jax.analysis import curves, report
from vit_jax.config.schema import Config
from vit_jax.errors import PreemptedError
from vit_jax.processes import runtime
from vit_jax.run import ledger
from vit_jax.run.guards import RollbackError
from vit_jax.run.profiling import Profile
from vit_jax.training import finished
from vit_jax.training.evaluations import Results
from vit_jax.training.session import InitialParams, Session, open_session

log = logging.getLogger('vit_jax')
PyTree = Any


def run(
  config: Config,
  workdir: epath.Path,
  *,
  initial_params: InitialParams = None,
  profile: tuple[int, int] | None = None,
  allow_changes: bool = False,
) -> Results:
  """Trains to the end, from the newest intact checkpoint if there is one.

  If the run has finished, nothing is computed.

  Args:
    config: completed config; paths of data should be absolute, see
      `identity.absolute`.
    workdir: directory of the run.
    initial_params: function of the experiment and its training data that
      returns the parameters from which a new run starts; by default they are
      initialized randomly.
    profile: (start, stop) of the steps to trace, in updates; None for no trace.
    allow_changes: whether to resume although the checkpoint belongs to another
      run.

  Returns:
    The last metrics of each evaluator, by name.

  Raises:
    UserError: the config, the data or the workdir is invalid.
    PreemptedError: a signal arrived; the state is saved.
    StorageError: the last step could not be saved, or the newest checkpoint
      could not be read.
    DivergedError: there were bad steps after the last allowed rollback.
  """
  # Before the session, which builds the model and opens the data.
  progress = finished.find(config, workdir)
  if progress.results is not None:
    return progress.results
  with (
    open_session(config, workdir, progress, allow_changes) as session,
    contextlib.closing(Profile(profile, workdir)) as trace,
  ):
    results = None
    while results is None:
      state, step = session.start(initial_params)
      elapsed_s = round(session.ledger.elapsed_s(), 3)
      session.ledger.event('start', step=step, elapsed_s=elapsed_s)
      try:
        results = _train(session, state, step, trace)
      except RollbackError as error:
        # The state that is restored next needs the memory of this one.
        del state
        session.roll_back(error)
  if runtime.is_main():
    if session.experiment.log.report:
      report.write(workdir)
    if session.experiment.log.curves:
      curves.draw(workdir)
    # The newest checkpoint is that of the last step, also after an early end.
    last = session.checkpoints.latest_step() or 0
    finished.record(session.ledger, workdir, last)
  return results


def _train(
  session: Session, state: PyTree, step: int, trace: Profile
) -> Results:
  """Trains from a restored or initial state to the end of the run.

  Args:
    session: resources of the run.
    state: state after `step` updates.
    step: number of updates completed.
    trace: profiler of a range of steps.

  Returns:
    The last metrics of each evaluator, by name.

  Raises:
    PreemptedError: a signal arrived; the state is saved.
    RollbackError: there were too many bad steps in a row.
  """
  total, recorder = session.experiment.total_steps, session.recorder
  first_step, results = step, {}
  with session.train_batches(step) as batches:
    # The run may have been killed after this step was saved and before it was
    # evaluated. Schedules depend on the step only, so it is evaluated here.
    fresh, stop = _between_steps(session, state, step)
    results |= fresh or {}
    ended = session.ends_early(fresh, step)
    while step < total and not stop and not ended:
      trace.update(step)
      with session.ledger.span('data_wait'):
        batch = next(batches)
      step += 1
      # Dispatches the step. This blocks only while the queue of the devices
      # is full. An implicit transfer here would be a bug in the pipeline.
      # `fixed` contains the random key and the parameters of frozen models.
      with recorder.host_times.waiting(), jax.transfer_guard('disallow'):
        state, metrics = session.compiled_step(state, batch, *session.fixed)
      # Fetches the metrics of an earlier step, so that the host stays ahead.
      recorder.append(step, metrics)
      fresh, stop = _between_steps(session, state, step)
      results |= fresh or {}
      ended = session.ends_early(fresh, step)
  trace.update(step)
  # The last state must be on disk before the run reports its end: a run that is
  # killed from here on resumes without computing any step again.
  session.finish_saving(step, state)
  if not stop:
    session.write_pictures(state, step)
  session.ledger.flush(step)
  # A signal after the last evaluation does not interrupt anything. If it ended
  # that evaluation (`fresh` is None), a resumed run has to repeat it.
  is_complete = ended or (step == total and fresh is not None)
  if stop and not is_complete:
    raise PreemptedError(f'stopped at step {step} of {total}; saved')
  log.info('%s', recorder.summary(step, step - first_step, results))
  events = ledger.read(session.workdir / 'events.jsonl')
  log.info('%s', ledger.summarise(events).line())
  if runtime.is_main() and (best := session.checkpoints.best_line()):
    log.info('%s', best)
  return results


def _between_steps(
  session: Session, state: PyTree, step: int
) -> tuple[Results | None, bool]:
  """Saves and evaluates if due after `step` updates, in a crash-safe order.

  Args:
    session: resources of the run.
    state: state after `step` updates.
    step: number of updates completed.

  Returns:
    Metrics of the evaluators that were due, or None if a signal prevented some
    of them; and whether the run must stop here because of a signal.
  """
  recorder, save_is_due = session.recorder, session.save_is_due(step)
  evals = session.evaluations.due(step)
  # All processes must call `reached` equally often, because they agree on the
  # number of the call at which they stop.
  stop = session.preemption.reached()
  if not (evals or save_is_due or stop):
    return {}, False
  # 1. All metrics so far are fetched, checked and written to disk. After too
  # many bad steps in a row this raises RollbackError, before anything is saved.
  recorder.drain()
  # 2. The state is saved before it is evaluated, because evaluators may fail.
  saved = save_is_due or stop
  if saved:
    session.save(step, state)
  # 3. Evaluators run, unless the machine is about to go away.
  fresh = None if evals else {}
  if evals and not stop:
    weights = session.weights(state)
    fresh = session.evaluations.run(evals, weights, step)
    del weights  # an average of the parameters may need much memory
  stop = session.preemption.reached()  # a signal may have ended the evaluation
  recorder.evaluations(step, fresh or {})
  # 4. The metric that selects the best step is added to the saved step. If a
  # signal arrived during the evaluation, the state is saved now.
  has_best = session.checkpoints.best in (fresh or {})
  if has_best or (stop and not saved):
    session.save(step, state, fresh)
  if fresh and step < session.experiment.total_steps:
    session.write_report()
  return fresh, stop
