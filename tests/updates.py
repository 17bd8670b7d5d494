"""Parameters after updates by our optimizers and by torch's."""

import re

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.arrays import tree

STEPS = 9


def parameters(*paths, shape=(3, 4)):
  """Returns a tree of random parameters."""
  rng = np.random.default_rng(0)
  return tree.unflatten(
    {path: rng.normal(size=shape).astype(np.float32) for path in paths}
  )


def gradients(params, step):
  """Returns gradients of changing size, the same for every optimizer."""
  rng = np.random.default_rng([1, step])
  return jax.tree.map(
    lambda p: (rng.normal(size=p.shape) * 2.0**step).astype(np.float32), params
  )


def run(optimizer, params, given=gradients, steps=STEPS):
  """Returns the parameters by path after each update, and the last state."""
  state, history = optimizer.init(params), []
  update = jax.jit(optimizer.update)
  for step in range(steps):
    updates, state = update(given(params, step), state, params)
    params = jax.tree.map(jnp.add, params, updates)
    history.append({k: np.asarray(v) for k, v in tree.flatten(params).items()})
  return history, state


def run_torch(make, params, prepare=lambda optimizer, step: None, steps=STEPS):
  """Returns the parameters by path after each update of torch's optimizer.

  Args:
    make: function from one group {'params', 'path'} for each parameter, in
      float64, to an optimizer.
    params: initial parameters.
    prepare: function of the optimizer and the step that changes rates or
      gradients before an update.
    steps: number of updates.
  """
  import torch  # it is not installed where the newest Python is tested

  tensors = {
    path: torch.tensor(leaf, dtype=torch.float64, requires_grad=True)
    for path, leaf in tree.flatten(params).items()
  }
  groups = [dict(params=[t], path=path) for path, t in tensors.items()]
  optimizer, history = make(groups), []
  for step in range(steps):
    for path, leaf in tree.flatten(gradients(params, step)).items():
      tensors[path].grad = torch.tensor(leaf, dtype=torch.float64)
    prepare(optimizer, step)
    optimizer.step()
    history.append({k: t.detach().numpy().copy() for k, t in tensors.items()})
  return history


def assert_close(first, second, rtol=1e-5, atol=1e-6):
  """Checks that the parameters are equal after each update."""
  for step, (one, other) in enumerate(zip(first, second, strict=True)):
    assert one.keys() == other.keys()
    for path, leaf in one.items():
      # atol: values of order one are summed in float32
      np.testing.assert_allclose(
        leaf, other[path], rtol=rtol, atol=atol, err_msg=f'{step} {path}'
      )


DEPTH, WIDTH = 3, 8
SHAPES = {
  'embedding/kernel': (2, 2, 3, WIDTH),
  'cls': (1, 1, WIDTH),
  'encoder/layers/attention/query/kernel': (DEPTH, WIDTH, 2, 4),
  'encoder/layers/attention/key/kernel': (DEPTH, WIDTH, 2, 4),
  'encoder/layers/attention/value/kernel': (DEPTH, WIDTH, 2, 4),
  'encoder/layers/attention/query/bias': (DEPTH, 2, 4),
  'encoder/layers/attention/out/kernel': (DEPTH, 2, 4, WIDTH),
  'encoder/layers/mlp/in/kernel': (DEPTH, WIDTH, 12),
  'encoder/layers/norm1/scale': (DEPTH, WIDTH),
  'head/kernel': (WIDTH, 5),
  'head/bias': (5,),
}
QKV = 'query|key|value'


def stacks(seed):
  """Returns random leaves of a ViT, whose layers have different norms."""
  rng = np.random.default_rng(seed)
  flat = {
    path: rng.normal(size=shape)
    * 2.0 ** np.arange(shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    for path, shape in SHAPES.items()
  }
  return tree.unflatten({k: jnp.array(v, jnp.float32) for k, v in flat.items()})


def tensors(values, joined=True):
  """Returns the tensors of other projects as vectors, by name.

  Each layer has its own tensors; query, key and value are `joined` in one.
  """
  parts = {}
  for path, leaf in tree.flatten(values).items():
    name = re.sub(QKV, 'qkv', path) if joined else path
    for i, part in enumerate(leaf if 'layers/' in path else [leaf]):
      parts.setdefault(f'{name}:{i}', []).append(np.ravel(part))
  return {name: np.concatenate(each) for name, each in parts.items()}


def trained(optimizer):
  """Returns parameters after updates with different gradients, by path."""
  given = lambda params, step: stacks(step + 1)  # noqa: E731
  return run(optimizer, stacks(0), given, steps=3)[0][-1]
