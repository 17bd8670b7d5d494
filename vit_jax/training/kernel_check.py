"""Compares a model's own kernels with plain XLA operations before a run.

A kernel that computes something else would train a worse model without a sign.
So the first thing that a run does with its devices is to pass a few random
images through both, of every size that the model sees in training, and to leave
the kernels out if results differ.
"""

import dataclasses
import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Key

from vit_jax.arrays import sharding, tree
from vit_jax.config.sections import build_section
from vit_jax.errors import UserError
from vit_jax.models.contract import Model, Size
from vit_jax.run.ledger import Ledger
from vit_jax.training.experiment import Experiment

log = logging.getLogger('vit_jax')
PyTree = Any

EXAMPLES = 2  # a device
# Sixteen times the rounding of bfloat16, in which a TPU multiplies float32 too.
# Interpreted on a CPU, two layers in bfloat16 differed by a quarter of it.
TOLERANCE = 2**-4
# Gradients this much smaller than the largest are compared on that scale: some
# are zero but for rounding (those of the biases of attention's keys).
_NEGLIGIBLE = 0.05
_NOISE = 0.3  # standard deviation, added to parameters that start constant


def checked(experiment: Experiment, ledger: Ledger) -> Experiment:
  """The experiment, without its model's kernels if they are wrong.

  To be called inside `jax.set_mesh`. All processes come to the same answer,
  because each sees the same numbers. Does nothing for a model that uses no
  kernels on these devices.

  Args:
    experiment: about to be run.
    ledger: gets an event `kernel_check` with the largest difference.

  Raises:
    UserError: the model cannot be built for this mesh.
  """
  kernels = experiment.model.kernels
  if kernels is None:
    return experiment
  problem, fields = _judge(experiment)
  ledger.event('kernel_check', passed=problem is None, **fields)
  if problem is None:
    return experiment
  log.error(
    "KERNEL CHECK FAILED: the model's kernels do not compute on %s what XLA "
    'does: %s. This run goes on without them, slower and correct. Please '
    'report this line.',
    experiment.mesh.devices.flat[0].device_kind,
    problem,
  )
  return with_model(experiment, kernels.plain)


def _judge(experiment: Experiment) -> tuple[str | None, dict[str, Any]]:
  """What is wrong with the kernels, if anything; and the event's fields."""
  key, found = experiment.key(), {}
  spec = experiment.augment.spec
  others = experiment.objective.other_passes(spec)
  passes = ((experiment.model, experiment.image_size), *others)
  for kernels, size in dict.fromkeys((m.kernels, size) for m, size in passes):
    if kernels is None:
      continue
    try:
      compiled = compare(kernels.probe, size, experiment.mesh, key)
    except UserError:
      raise
    # The compilers of kernels raise errors of many types. One that has nothing
    # to do with kernels comes again when the training step is compiled.
    except Exception as error:
      text = f'{type(error).__name__}: {error}'[:500]
      return f'they do not compile: {text}', {'error': text}
    of_size = compiled(key).items()
    found |= {(name, size): float(x) for name, x in of_size}
  # NaN is worse than any number.
  worst = max(found, key=lambda key: (math.isnan(found[key]), found[key]))
  name, size = worst
  value = found[worst]
  fields = {
    'worst': name,
    'image_size': list(size),
    'difference': value if math.isfinite(value) else None,
    'tolerance': TOLERANCE,
  }
  if value <= TOLERANCE:
    return None, fields
  what = name if name == 'output' else f'the gradient of {name}'
  return (
    f'{what}, of images of {size[0]}x{size[1]}, differs by {value:.3g} of its '
    f'size, more than {TOLERANCE:.3g}'
  ), fields


def with_model(experiment: Experiment, model: Model) -> Experiment:
  """The same experiment with another model of the same parameters."""
  setting = experiment.setting._replace(model=model)
  objective = build_section(experiment.config, 'objective', setting)
  trainer = dataclasses.replace(experiment.trainer, objective=objective)
  return dataclasses.replace(experiment, trainer=trainer, setting=setting)


def compare(
  model: Model, image_size: Size, mesh: Mesh, key: Key[Array, '']
) -> jax.stages.Compiled:
  """Compiles a function of `key` that compares a model with its `reference`.

  Args:
    model: with kernels.
    image_size: pixels.
    mesh: of the devices; each gets `EXAMPLES` images.
    key: of images and parameters, on all devices.

  Returns:
    key → {'output', or the path of a parameter: root mean square of the
    difference in the logits, or in that parameter's gradient, divided by that
    of the reference's value}.
  """
  n = EXAMPLES * mesh.shape['data'] * mesh.shape['fsdp']

  def both(key: Key[Array, '']) -> dict[str, Float[Array, '']]:
    image_key, init_key, noise_key, dy_key = jax.random.split(key, 4)
    images = jax.random.uniform(image_key, (n, *image_size, 3), minval=-1.0)
    images = sharding.constrain(images, sharding.BATCH)
    params = model.reference.init(init_key, images[:1])['params']
    params = _with_noise(params, noise_key)
    ours = _output_and_gradients(model, params, images, dy_key)
    plain = _output_and_gradients(model.reference, params, images, dy_key)
    largest = jnp.stack([_rms(x) for p, x in plain.items() if p != 'output'])
    least = _NEGLIGIBLE * largest.max()
    return {
      path: _rms(ours[path] - x)
      / (_rms(x) if path == 'output' else jnp.maximum(_rms(x), least))
      for path, x in plain.items()
    }

  comparison = jax.jit(both, out_shardings=sharding.replicated(mesh))
  return comparison.lower(key).compile()


def _with_noise(params: PyTree, key: Key[Array, '']) -> PyTree:
  """Leaves that start constant, made random: zeros would hide errors."""
  leaves, structure = jax.tree.flatten(params)
  keys = jax.random.split(key, len(leaves))
  noisy = [
    leaf
    + jnp.where(leaf.std() > 0, 0, _NOISE) * jax.random.normal(k, leaf.shape)
    for leaf, k in zip(leaves, keys, strict=True)
  ]
  return jax.tree.unflatten(structure, noisy)


def _output_and_gradients(
  model: Model,
  params: PyTree,
  images: Float[Array, 'n y x c'],
  key: Key[Array, ''],
) -> dict[str, Array]:
  """Logits, and gradients of a random weighted sum of them, by path."""

  def logits(params: PyTree) -> Float[Array, 'n k']:
    return model.apply({'params': params}, images)

  y, pull = jax.vjp(logits, params)
  [gradients] = pull(jax.random.normal(key, y.shape, y.dtype))
  return {'output': y} | tree.flatten(gradients)


def _rms(x: Float[Array, '...']) -> Float[Array, '']:
  """Root mean square."""
  return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32))))
