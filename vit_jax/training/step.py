"""The training step: one pure function of state, batch and key."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Key

from vit_jax.arrays import sharding, tree
from vit_jax.errors import UserError
from vit_jax.objectives.contract import Objective
from vit_jax.optim import average as average_lib

PyTree = Any
Metrics = dict[str, Array]
LOSS_DECAY = 0.99  # of the mean that spikes are told from
SPIKE_WARMUP_STEPS = 20  # good steps before anything counts as a spike


class Guard(NamedTuple):
  """Statistics that bad steps are detected by; part of the training state.

  Attributes:
    skipped: steps whose update was left out, int32.
    streak: how many of them came last, int32.
    loss_mean: moving average of good losses, float32.
    good: steps that it has seen, int32.
  """

  skipped: Int[Array, '']
  streak: Int[Array, '']
  loss_mean: Float[Array, '']
  good: Int[Array, '']


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """Everything that training changes.

  Attributes:
    step: updates completed, int32; like every leaf an array, or its shape and
      sharding where nothing has been computed yet.
    params: the model's parameters, float32.
    opt_state: optax's state.
    extra: the objective's own state (a teacher, say).
    average: an `average.Average`, or None where none is kept.
    guard: a `Guard` of the steps so far.
  """

  step: Any
  params: PyTree
  opt_state: PyTree
  extra: PyTree
  average: Any
  guard: Any


@dataclasses.dataclass(frozen=True)
class Trainer:
  """What a step is made of.

  Attributes:
    objective: what is trained, and by what loss.
    optimizer: an optax chain that ends with the learning rate.
    schedule: the learning rate, for the log.
    micro_batches: parts of a batch whose gradients are averaged.
    average_decay: of the average of parameters; None keeps none.
    spike_factor: a loss above this many times the mean of recent good losses
      is as bad as one that is not finite; None for no such limit.
  """

  objective: Objective
  optimizer: optax.GradientTransformation
  schedule: optax.Schedule
  micro_batches: int
  average_decay: float | None
  spike_factor: float | None = None

  def init_state(self, key: Key[Array, ''], batch: PyTree) -> TrainState:
    """The state before the first step, for batches of that shape."""
    return self.state_of(*self.objective.init(key, batch))

  def state_of(self, params: PyTree, extra: PyTree) -> TrainState:
    """The state before the first step, from given parameters."""
    return TrainState(
      step=jnp.zeros((), jnp.int32),
      params=params,
      opt_state=self.optimizer.init(params),
      extra=extra,
      average=average_lib.init(params) if self.average_decay else None,
      guard=Guard(
        skipped=jnp.zeros((), jnp.int32),
        streak=jnp.zeros((), jnp.int32),
        loss_mean=jnp.zeros((), jnp.float32),
        good=jnp.zeros((), jnp.int32),
      ),
    )

  def weights(self, state: TrainState) -> dict[str, PyTree]:
    """All that is worth evaluating, by the ending that its metrics get.

    What the objective says, and under '_ema' the average where one is kept.
    """
    weights = self.objective.weights(state.params, state.extra)
    if state.average is not None:
      mean = self.objective.weights(state.average.mean, state.extra)['']
      weights = weights | {'_ema': mean}
    return weights

  def train_step(
    self, state: TrainState, batch: PyTree, key: Key[Array, ''], frozen: PyTree
  ) -> tuple[TrainState, Metrics]:
    """One update.

    A step whose loss or gradient is not finite (or whose loss is a spike)
    changes nothing but `step` and `guard`.

    Args:
      state: before it.
      batch: as the transform declares it.
      key: of the run; the step's own is `key` folded with `state.step`.
      frozen: parameters of the objective's frozen models, by name.

    Returns:
      The new state, and scalars: loss, grad_norm (before clipping), lr, skipped
      (how many bad steps came last) and what the objective adds.
    """
    key = jax.random.fold_in(key, state.step)
    loss, added, carry, grads = self._gradients(state, batch, key, frozen)
    # Left to itself, the partitioner splits products by the optimizer's state.
    grads = sharding.constrain_leaves(grads, self.objective.sharding_rules)
    grad_norm = optax.tree.norm(grads)
    guard, ok = self._judge(state.guard, loss, grad_norm)
    updates, opt_state = self.optimizer.update(
      grads, state.opt_state, state.params
    )
    params = optax.apply_updates(state.params, updates)
    average = state.average
    if average is not None and self.average_decay:
      average = average_lib.update(average, params, self.average_decay)
    step = state.step + 1
    extra = self.objective.update_extra(params, state.extra, carry, step)
    # A bad step changes none of these, the optimizer's count included.
    params, opt_state, average, extra = jax.tree.map(
      lambda new, old: jnp.where(ok, new, old),
      (params, opt_state, average, extra),
      (state.params, state.opt_state, state.average, state.extra),
    )
    metrics = added | {
      'loss': loss,
      'grad_norm': grad_norm,
      'lr': jnp.asarray(
        self.schedule(state.step - state.guard.skipped), jnp.float32
      ),
      'skipped': guard.streak,
    }
    if 'replaced' in batch:
      metrics['bad_records'] = batch['replaced'].sum()
    return TrainState(step, params, opt_state, extra, average, guard), metrics

  def _gradients(
    self, state: TrainState, batch: PyTree, key: Key[Array, ''], frozen: PyTree
  ) -> tuple[Float[Array, ''], Metrics, PyTree, PyTree]:
    """Means over micro-batches of loss, metrics, carry and gradients."""
    loss_fn = jax.value_and_grad(self.objective.loss, has_aux=True)

    apart = self.objective.apart if self.micro_batches > 1 else ()

    def of_part(part: PyTree, part_key: Key[Array, '']) -> PyTree:
      values, grads = loss_fn(
        state.params, state.extra, part, part_key, state.step, frozen
      )
      return values, tree.apart(grads, apart)

    # Gradients of separate layers are summed in place. A stack of all layers
    # would be written, and all-reduced, once for every micro-batch.
    values, grads = accumulate(of_part, batch, key, self.micro_batches)
    loss, (added, carry) = values
    return loss, added, carry, tree.together(grads)

  def _judge(
    self, guard: Guard, loss: Array, grad_norm: Array
  ) -> tuple[Guard, Bool[Array, '']]:
    """Whether a step is good, and the guard after it."""
    ok = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    if self.spike_factor is not None:
      settled = guard.good >= SPIKE_WARMUP_STEPS
      ok &= ~settled | (loss <= self.spike_factor * guard.loss_mean)
    share = jnp.maximum(1 - LOSS_DECAY, 1 / (guard.good + 1.0))
    mean = guard.loss_mean + share * (loss - guard.loss_mean)
    bad = jnp.where(ok, 0, 1)
    return Guard(
      skipped=guard.skipped + bad,
      streak=jnp.where(ok, 0, guard.streak + 1),
      loss_mean=jnp.where(ok, mean, guard.loss_mean),
      good=guard.good + 1 - bad,
    ), ok


def accumulate(
  function: Callable[[PyTree, Key[Array, '']], PyTree],
  batch: PyTree,
  key: Key[Array, ''],
  parts: int,
) -> PyTree:
  """Mean of `function(part of the batch, key of the part)` over the parts.

  Part i holds the examples i, i + parts, …: every device keeps its own
  examples (contiguous parts would move all of them).

  Raises:
    UserError: the batch is not divisible.
  """
  if parts == 1:
    return function(batch, key)
  size = jax.tree.leaves(batch)[0].shape[0]
  if size % parts:
    raise UserError(
      f'a batch of {size} is not divisible into {parts} micro_batches.'
    )
  split = jax.tree.map(
    lambda x: x.reshape(size // parts, parts, *x.shape[1:]).swapaxes(0, 1),
    batch,
  )
  keys = jax.random.split(key, parts)
  shapes = jax.eval_shape(
    function, jax.tree.map(lambda x: x[0], split), keys[0]
  )
  zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

  def body(total: PyTree, part: tuple[PyTree, Array]) -> tuple[PyTree, None]:
    return jax.tree.map(jnp.add, total, function(*part)), None

  total, _ = jax.lax.scan(body, zeros, (split, keys))
  return jax.tree.map(lambda x: x / parts, total)
