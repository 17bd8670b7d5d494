"""Compares a model's own kernels with plain XLA operations before a run.

A wrong kernel would train a worse model without any error. So a run first
passes a few random images of every size that occurs in training through both
implementations, and does not use the kernels if the results differ.
"""

import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Key

from vit_jax.arrays import sharding, tree
from vit_jax.errors import UserError
from vit_jax.models.contract import Model, Size
from vit_jax.run.ledger import Ledger
from vit_jax.training.experiment import Experiment

log = logging.getLogger('vit_jax')
PyTree = Any

EXAMPLES = 2  # random images on each of the devices that share a batch
# Sixteen times the rounding error of bfloat16, which TPUs use for products of
# float32, too. Two layers in bfloat16, with kernels interpreted on a CPU,
# differed by a quarter of this tolerance.
TOLERANCE = 2**-4
# The difference of a gradient is divided by at least this fraction of the
# largest gradient. Some gradients are zero except for rounding (those of the
# biases of attention keys).
_NEGLIGIBLE = 0.05
_NOISE = 0.3  # std of the noise added to parameters that start constant


def checked(
  experiment: Experiment, key: Key[Array, ''], ledger: Ledger
) -> Experiment:
  """Returns the experiment, without its model's kernels if they are wrong.

  It must be called inside `jax.set_mesh`. All processes return the same,
  because the compared numbers are replicated. Nothing is compared for a model
  that uses no kernels on these devices.

  Args:
    experiment: experiment about to run.
    key: random key of the run.
    ledger: destination of the event `kernel_check` with the largest difference.

  Raises:
    UserError: the model cannot be built for this mesh.
  """
  kernels = experiment.model.kernels
  if kernels is None:
    return experiment
  problem, fields = _check(experiment, key)
  ledger.event('kernel_check', passed=problem is None, **fields)
  if problem is None:
    return experiment
  log.error(
    "KERNEL CHECK FAILED: results of the model's kernels on %s differ from "
    'those of XLA: %s. This run goes on without the kernels, which is slower '
    'but correct. Please report this line.',
    experiment.mesh.devices.flat[0].device_kind,
    problem,
  )
  return experiment.with_model(kernels.plain)


def _check(
  experiment: Experiment, key: Key[Array, '']
) -> tuple[str | None, dict[str, Any]]:
  """Compares the kernels of all passes of the objective.

  Returns:
    A description of the problem, or None if the kernels are correct; and the
    fields of the event.
  """
  others = experiment.objective.other_passes(experiment.augment.spec)
  passes = ((experiment.model, experiment.image_size), *others)
  found = {}  # differences by name ('output', or a parameter) and image size
  # A dict, because several passes may have the same kernels and size.
  for kernels, size in dict.fromkeys((m.kernels, size) for m, size in passes):
    if kernels is None:
      continue
    try:
      compiled = compare(kernels.probe, size, experiment.mesh, key)
    except UserError:
      raise
    # Compilers of kernels raise errors of many types. An error that has nothing
    # to do with kernels is raised again when the training step is compiled.
    except Exception as error:
      text = f'{type(error).__name__}: {error}'[:500]
      return f'they do not compile: {text}', {'error': text}
    differences = compiled(key).items()
    found |= {(name, size): float(x) for name, x in differences}
  # NaN counts as worse than any number.
  (name, size), value = max(
    found.items(), key=lambda item: (math.isnan(item[1]), item[1])
  )
  fields = {
    'worst': name,
    'image_size': list(size),
    'difference': value if math.isfinite(value) else None,
    'tolerance': TOLERANCE,
  }
  if value <= TOLERANCE:
    return None, fields
  subject = name if name == 'output' else f'the gradient of {name}'
  return (
    f'{subject}, for images of {size[0]}x{size[1]}, differs by {value:.3g} of '
    f'its size, more than {TOLERANCE:.3g}'
  ), fields


def compare(
  model: Model, image_size: Size, mesh: Mesh, key: Key[Array, '']
) -> jax.stages.Compiled:
  """Compiles a function of `key` that compares a model with its `reference`.

  Args:
    model: model with kernels.
    image_size: height and width in pixels.
    mesh: mesh of the devices.
    key: random key for images and parameters, replicated on all devices.

  Returns:
    A function of `key` that returns the relative differences of the logits
    ('output') and of each parameter's gradient (by path): the root mean square
    (RMS) of the difference, divided by the RMS of the reference's value.
  """
  n = EXAMPLES * sharding.batch_parts(mesh)

  def both(key: Key[Array, '']) -> dict[str, Float[Array, '']]:
    image_key, init_key, noise_key, output_key = jax.random.split(key, 4)
    images = jax.random.uniform(
      image_key, (n, *image_size, model.channels), minval=-1.0
    )
    images = sharding.constrain(images, sharding.BATCH)
    params = model.reference.init(init_key, images[:1])['params']
    params = _with_noise(params, noise_key)
    ours = _output_and_gradients(model, params, images, output_key)
    plain = _output_and_gradients(model.reference, params, images, output_key)
    sizes = {path: _rms(x) for path, x in plain.items()}
    output_size = sizes.pop('output')
    least = _NEGLIGIBLE * jnp.stack([*sizes.values()]).max()
    divisors = {path: jnp.maximum(size, least) for path, size in sizes.items()}
    divisors['output'] = output_size
    return {
      path: _rms(ours[path] - x) / divisors[path] for path, x in plain.items()
    }

  comparison = jax.jit(both, out_shardings=sharding.replicated(mesh))
  return comparison.lower(key).compile()


def _with_noise(params: PyTree, key: Key[Array, '']) -> PyTree:
  """Adds noise to leaves that start constant, because zeros hide errors."""
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
  """Computes logits, and gradients of a random weighted sum of them.

  The model is in training, where the angles of rotations may be random.

  Returns:
    The logits as 'output', and the gradients by the path of the parameter.
  """
  model_key = jax.random.fold_in(key, 0)

  def logits(params: PyTree) -> Float[Array, 'n k']:
    return model.apply({'params': params}, images, model_key)

  y, pull = jax.vjp(logits, params)
  [gradients] = pull(jax.random.normal(key, y.shape, y.dtype))
  return {'output': y} | tree.flatten(gradients)


def _rms(x: Float[Array, '...']) -> Float[Array, '']:
  """Computes the root mean square."""
  return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32))))
