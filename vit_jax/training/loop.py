"""The training loop: restore or start; then step, log, evaluate, save."""

import contextlib
import logging
from typing import Any

import jax
from etils import epath

from vit_jax.analysis import curves
from vit_jax.analysis.report import page
from vit_jax.config.completion import Config
from vit_jax.errors import PreemptedError
from vit_jax.evaluators.contract import judged
from vit_jax.processes import runtime
from vit_jax.processes.preemption import StopRequested
from vit_jax.run import ledger
from vit_jax.run.profiling import Profile
from vit_jax.run.recovery import RollbackError
from vit_jax.training import reporting
from vit_jax.training.session import InitialParams, Session, open_session

log = logging.getLogger('vit_jax')
PyTree = Any
Results = dict[str, float]


def run(
  config: Config,
  workdir: epath.Path,
  *,
  initial_params: InitialParams = None,
  profile: tuple[int, int] | None = None,
  allow_changes: bool = False,
) -> Results:
  """Trains to the end, from the newest whole checkpoint if there is one.

  Args:
    config: completed.
    workdir: of this run.
    initial_params: makes the parameters that a new run starts from
      (fine-tuning); by default they are fresh.
    profile: trace the steps in [start, stop).
    allow_changes: resume although the checkpoint is of another run.

  Returns:
    The last results of the evaluators.

  Raises:
    UserError: something in the config, the data or the workdir is invalid.
    PreemptedError: a signal came; the state is saved.
    StorageError: the last step could not be saved, or the newest not be read.
    DivergedError: rolling back did not help.
  """
  with (
    open_session(config, workdir, allow_changes) as session,
    contextlib.closing(Profile(profile, workdir)) as traced,
  ):
    results = None
    while results is None:
      state, step = session.start(initial_params)
      session.ledger.event('start', step=step)
      try:
        results = _train(session, state, step, traced)
      except RollbackError as error:
        del state  # makes room for the one that is restored
        session.roll_back(error)
  if config.log.report and runtime.is_main():
    page.write(workdir)
  if config.log.curves and runtime.is_main():
    curves.draw(workdir)
  return results


def _train(
  session: Session,
  state: PyTree,
  step: int,
  profile: Profile,
) -> Results:
  """Steps from `step` updates completed to the end.

  What is due follows from `step` alone, so a resumed run repeats what was
  missed. The order makes crashes harmless: metrics are fetched, judged and on
  disk before anything is saved, and it is saved before evaluators, which may
  fail, look at it; the metric that the best step is told by is added later.
  """
  total, recorder = session.experiment.total_steps, session.recorder()
  first_step, results = step, {}
  with session.train_batches(step) as batches:
    while True:
      due_evals, due_save = _due(session, step)
      stop = session.preemption.reached()
      if due_evals or due_save or stop:
        recorder.drain()
        saved = due_save or stop
        if saved:
          session.save(step, state)
        fresh = {} if stop else _evaluate(session, due_evals, state, step)
        stop = session.preemption.reached()  # perhaps in the evaluation
        recorder.evaluations(step, fresh)
        results |= fresh
        if session.config.checkpoint.best in fresh or stop and not saved:
          session.save(step, state, fresh)
        if fresh and step < total:
          _report(session)
      profile.at(step)
      if stop or step == total:
        session.finish_saving(step, state)
        if not stop:
          _report(session, state)
        session.ledger.flush(step)
        if stop and (step < total or due_evals and not fresh):
          raise PreemptedError(f'stopped at step {step} of {total}; saved')
        break
      with session.ledger.span('data_wait'):
        batch = next(batches)
      step += 1
      replayed = session.replay.run(state, batch, step)
      # Blocks where the devices' queue is full.
      with session.hosts.waiting(), jax.transfer_guard('disallow'):
        state, step_metrics = session.train_step(state, batch, *session.fixed)
      session.replay.compare(replayed, state, step)
      recorder.append(step, step_metrics)
  log.info('%s', recorder.summary(step - first_step, results))
  events = ledger.read(session.workdir / 'events.jsonl')
  log.info('%s', ledger.summarise(events).line())
  return results


def _report(session: Session, state: PyTree = None) -> None:
  """Makes the run's page anew; of the last state, the pictures for it."""
  if not session.config.log.report:
    return
  with session.doing('report'):
    if state is not None:
      weights = session.weights(state)['']
      known = session.setting, weights, session.source
      reporting.write(
        session.workdir,
        session.experiment,
        *known,
        step=session.experiment.total_steps,
      )
    elif runtime.is_main():
      page.write(session.workdir)


def _due(session: Session, step: int) -> tuple[list[str], bool]:
  """The evaluators due after `step` updates, and whether to save."""
  config, experiment = session.config, session.experiment

  def due(every: str) -> bool:
    interval = experiment.steps(every)
    last = step == experiment.total_steps
    return step > 0 and (last or interval > 0 and step % interval == 0)

  evals = [name for name in config.evals if due(config.evals[name].every)]
  save = due(config.checkpoint.every) or session.save_is_due(step)
  return evals, save


def _evaluate(
  session: Session, due: list[str], state: PyTree, step: int
) -> Results:
  """Runs evaluators on all weights that are worth it; see `Trainer.weights`.

  A signal ends it without results; the resumed run evaluates again.
  """
  results = {}
  for name in due:
    evaluator = session.evaluators[name]
    for suffix, params in judged(evaluator, session.weights(state)).items():
      session.judging = f'step {step:,}' + (f', {suffix}' if suffix else '')
      with session.doing('eval'):
        try:
          scores = evaluator.run(params)
        except StopRequested:
          return {}
      results |= {f'{name}{suffix}/{key}': v for key, v in scores.items()}
  return results
