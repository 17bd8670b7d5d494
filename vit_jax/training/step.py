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
from vit_jax.objectives.contract import Inputs, Loss, Mean, Objective
from vit_jax.optim import average as average_lib
from vit_jax.optim import rules
from vit_jax.optim.optimizers import Optimizer

PyTree = Any
Metrics = dict[str, Array]
LOSS_DECAY = 0.99  # decay of the average loss that detects spikes
SPIKE_WARMUP_STEPS = 20  # good steps before a loss can count as a spike


class Guard(NamedTuple):
  """Statistics that detect bad steps; part of the training state.

  Attributes:
    skipped: number of steps whose update was left out, int32.
    streak: number of bad steps in a row up to the last step, int32.
    loss_mean: moving average of the losses of good steps, float32.
    good: number of good steps, int32.
  """

  skipped: Int[Array, '']
  streak: Int[Array, '']
  loss_mean: Float[Array, '']
  good: Int[Array, '']


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """The arrays that training changes, or only their shapes and shardings.

  Attributes:
    step: number of updates completed, int32.
    params: parameters of the model, float32.
    opt_state: state of the optimizer.
    extra: the objective's own state, such as a teacher.
    average: an `average.Average`; None if no average is kept.
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
  """Objective, optimizer and options of a training step.

  Attributes:
    objective: objective, which holds the model and the loss.
    optimizer: optax chain that ends with the learning rate. If it is an
      `Optimizer`, there are no gradients of the leaves that its rules freeze.
    schedule: learning rate by the number of updates, for the log.
    micro_batches: number of micro-batches of a batch, which are computed one
      after the other; their gradients are averaged.
    average_decay: decay of the average of the parameters; None for no average.
    spike_factor: a loss above this many times the mean of recent good losses
      is treated like one that is not finite; None for no such limit.
  """

  objective: Objective
  optimizer: optax.GradientTransformation | Optimizer
  schedule: optax.Schedule
  micro_batches: int
  average_decay: float | None
  spike_factor: float | None = None

  def state_of(self, params: PyTree, extra: PyTree) -> TrainState:
    """Returns the state before the first step, from given parameters.

    Args:
      params: parameters of the model.
      extra: the objective's own state.
    """
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

  def weights(self, state: TrainState, frozen: PyTree) -> dict[str, PyTree]:
    """Returns all sets of weights to evaluate, by name.

    The objective defines them; 'ema' is added if an average is kept.

    Args:
      state: training state.
      frozen: parameters of the objective's frozen models, by name.

    Raises:
      UserError: the objective does not name the trained weights.
    """
    objective = self.objective
    params = objective.whole(state.params, frozen)
    weights = objective.weights(params, state.extra)
    if 'params' not in weights:
      raise UserError(
        "the objective's method `weights` returns the sets of weights "
        f"{[*weights]}; one of them must be 'params', the trained ones."
      )
    if state.average is not None:
      mean = objective.whole(state.average.mean, frozen)
      averaged = objective.weights(mean, state.extra)
      weights = weights | {'ema': averaged['params']}
    return weights

  def trained(self, params: PyTree) -> PyTree:
    """Returns the parameters with None in place of frozen ones."""
    # A plain optax chain has no rules, so it freezes nothing.
    return rules.trained(getattr(self.optimizer, 'table', ()), params)

  def loss(self, trained: PyTree, params: PyTree, inputs: Inputs) -> Loss:
    """Computes the loss as a function of the parameters that are trained.

    Args:
      trained: result of the method `trained`.
      params: all parameters; only the frozen ones are used.
      inputs: other inputs of the loss.
    """
    return self.objective.loss(_merged(params, trained), inputs)

  def train_step(
    self, state: TrainState, batch: PyTree, key: Key[Array, ''], frozen: PyTree
  ) -> tuple[TrainState, Metrics]:
    """Computes one update.

    A step whose loss or gradient is not finite, or whose loss is a spike,
    changes nothing but `step` and `guard`.

    Args:
      state: state before the update.
      batch: batch with the entries that the transform declares.
      key: random key of the run. `state.step` is folded into it, so the key of
        a step does not depend on where a run was resumed.
      frozen: parameters of the objective's frozen models, by name.

    Returns:
      The new state, and scalars: loss, grad_norm (before clipping), lr, skipped
      (number of bad steps in a row), bad_records if the batch counts replaced
      examples, and the metrics of the objective.
    """
    key = jax.random.fold_in(key, state.step)
    loss, aux_metrics, carry, grads = self._gradients(state, batch, key, frozen)
    # Without this constraint, the partitioner would shard the products that
    # compute gradients like the optimizer's state.
    grads = sharding.constrain_leaves(grads, self.objective.sharding_rules)
    grad_norm = optax.tree.norm(grads)
    guard, ok = self._check_step(state.guard, loss, grad_norm)
    # The optimizer needs a leaf for each parameter, also for frozen ones.
    grads = jax.tree.map(
      lambda p, g: jnp.zeros_like(p) if g is None else g, state.params, grads
    )
    updates, opt_state = self.optimizer.update(
      grads, state.opt_state, state.params
    )
    params = optax.apply_updates(state.params, updates)
    average = state.average
    if self.average_decay:
      average = average_lib.update(average, params, self.average_decay)
    step = state.step + 1
    extra = self.objective.update_extra(params, state.extra, carry, step)
    # A bad step changes none of these, not even the optimizer's step count.
    params, opt_state, average, extra = jax.tree.map(
      lambda new, old: jnp.where(ok, new, old),
      (params, opt_state, average, extra),
      (state.params, state.opt_state, state.average, state.extra),
    )
    metrics = aux_metrics | {
      'loss': loss,
      'grad_norm': grad_norm,
      # Skipped steps advance neither the optimizer's count nor the schedule.
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
    """Averages loss, metrics, carry and gradients over micro-batches.

    The gradients of frozen parameters are None.
    The carry contains the values that the loss returns for `update_extra`.
    """
    trained = self.trained(state.params)
    inputs = Inputs(state.extra, batch, key, state.step, frozen)
    if self.objective.joint and self.micro_batches > 1:
      return self._joint_gradients(trained, state.params, inputs)

    # A loss that is a `Mean` is differentiated as its total. The sums over all
    # micro-batches are divided by the sum of the counts below.
    def summed(*arguments: Any) -> tuple[Array, PyTree]:
      loss, (metrics, carry) = self.loss(*arguments)
      total, *counts = loss if isinstance(loss, Mean) else (loss,)
      return total, (counts, metrics, carry)

    loss_fn = jax.value_and_grad(summed, has_aux=True)
    # Gradients of separate layers are summed in place. A stack of all layers
    # would be written, and all-reduced, once for every micro-batch.
    unstacked = self.objective.unstacked if self.micro_batches > 1 else ()

    def gradients(micro_batch: PyTree, key: Key[Array, '']) -> PyTree:
      own = inputs._replace(batch=micro_batch, key=key)
      values, grads = loss_fn(trained, state.params, own)
      return values, tree.unstack_layers(grads, unstacked)

    values, grads = accumulate(gradients, batch, key, self.micro_batches)
    loss, (counts, metrics, carry) = values
    grads = tree.stack_layers(grads)
    if counts:
      mean = Mean(loss, *counts)
      loss, grads = mean.value(), jax.tree.map(mean.of, grads)
    metrics, carry = jax.tree.map(
      lambda leaf: leaf.value() if isinstance(leaf, Mean) else leaf,
      (metrics, carry),
      is_leaf=lambda leaf: isinstance(leaf, Mean),
    )
    return loss, metrics, carry, grads

  def _joint_gradients(
    self, trained: PyTree, params: PyTree, inputs: Inputs
  ) -> tuple[Float[Array, ''], Metrics, PyTree, PyTree]:
    """Computes the results of `_gradients` for a joint loss.

    See `Objective.embed`.
    """
    objective, count = self.objective, self.micro_batches

    def embed(trained: PyTree, batch: PyTree, key: Any) -> PyTree:
      own = inputs._replace(batch=batch, key=key)
      return objective.embed(_merged(params, trained), own)

    def joint_loss(trained: PyTree, embedded: PyTree) -> Loss:
      return objective.joint_loss(_merged(params, trained), embedded)

    # 1 Embeddings of all examples, in the order of the batch.
    parts = _micro_batches(inputs.batch, inputs.key, count)
    embedded = jax.tree.map(
      lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]),
      jax.lax.map(lambda part: embed(trained, *part), parts),
    )  # [count, n / count, …] → [n, …]
    # 2 The loss, and its gradients with respect to the parameters that the loss
    # uses directly (such as a temperature), and to the embeddings.
    loss_fn = jax.value_and_grad(joint_loss, argnums=(0, 1), has_aux=True)
    (loss, aux), (direct, by_embedding) = loss_fn(trained, embedded)

    # 3 The backward pass of each micro-batch, from embeddings to parameters.
    def backward(part: PyTree, key: Key[Array, '']) -> PyTree:
      batch, by_embedding = part
      _, pull = jax.vjp(lambda leaves: embed(leaves, batch, key), trained)
      [grads] = pull(by_embedding)
      return tree.unstack_layers(grads, objective.unstacked)

    parts = inputs.batch, by_embedding
    means = accumulate(backward, parts, inputs.key, count)
    # The gradient is the sum over micro-batches, not the mean.
    grads = jax.tree.map(
      lambda mean, leaf: count * mean + leaf, tree.stack_layers(means), direct
    )
    return loss, *aux, grads

  def _check_step(
    self, guard: Guard, loss: Array, grad_norm: Array
  ) -> tuple[Guard, Bool[Array, '']]:
    """Decides whether a step is good, and updates the statistics.

    Args:
      guard: statistics of the earlier steps.
      loss: loss of the step.
      grad_norm: norm of the gradient of the step.

    Returns:
      The statistics after the step, and whether it is good.
    """
    ok = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    if self.spike_factor is not None:
      warmed_up = guard.good >= SPIKE_WARMUP_STEPS
      ok &= ~warmed_up | (loss <= self.spike_factor * guard.loss_mean)
    # A plain mean of the first 1 / (1 - LOSS_DECAY) losses, then an exponential
    # moving average.
    weight = jnp.maximum(1 - LOSS_DECAY, 1 / (guard.good + 1.0))
    mean = guard.loss_mean + weight * (loss - guard.loss_mean)
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
  count: int,
) -> PyTree:
  """Averages the results of a function over micro-batches.

  Micro-batch i consists of the examples i, i + count, …, so every device keeps
  its own examples. Contiguous micro-batches would be moved between devices.

  Args:
    function: function (micro-batch, its random key) → tree of arrays.
    batch: arrays `[n, …]`.
    key: random key, from which the key of each micro-batch is derived.
    count: number of micro-batches, a divisor of n.

  Returns:
    The mean of the results.
  """
  if count == 1:
    return function(batch, key)
  parts = _micro_batches(batch, key, count)
  shapes = jax.eval_shape(function, *jax.tree.map(lambda x: x[0], parts))
  zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

  def add(total: PyTree, inputs: tuple[PyTree, Array]) -> tuple[PyTree, None]:
    return jax.tree.map(jnp.add, total, function(*inputs)), None

  total, _ = jax.lax.scan(add, zeros, parts)
  return jax.tree.map(lambda x: x / count, total)


def _micro_batches(batch: PyTree, key: Key[Array, ''], count: int) -> PyTree:
  """Returns the micro-batches of `accumulate`, and a key for each of them.

  Arrays `[n, …]` become `[count, n / count, …]`.
  """
  parts = jax.tree.map(
    lambda x: x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1), batch
  )
  return parts, jax.random.split(key, count)


def _merged(params: PyTree, trained: PyTree) -> PyTree:
  """Returns all parameters, given the trained ones."""
  return jax.tree.map(
    lambda leaf, own: leaf if own is None else own, params, trained
  )
