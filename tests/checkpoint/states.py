"""Small training states, and functions that save, restore and compare them."""

import contextlib
import functools
import pathlib
import types
from unittest import mock

import jax
import numpy as np

from vit_jax.checkpoint import Checkpointer, agreement
from vit_jax.config import loading
from vit_jax.config.completion import complete
from vit_jax.training.experiment import Experiment


def config(**changes):
  loaded = loading.load('configs/quickstart.py')
  values = loaded.to_dict()
  values['model'] |= {'width': 32, 'depth': 2, 'mlp_dim': 32} | changes
  values['average_decay'] = 0.9
  values['mesh'] = {'data': 1, 'fsdp': 1, 'model': 1}
  return complete(type(loaded)(values))


@functools.cache
def wide() -> Experiment:
  return Experiment.build(config(width=48), jax.devices()[:1])


@functools.cache
def experiment(devices: int = 1, fsdp: int = 1) -> Experiment:
  values = config()
  with values.unlocked():
    values.mesh.data, values.mesh.fsdp = devices // fsdp, fsdp
  return Experiment.build(values, jax.devices()[:devices])


@functools.cache
def _maker(of: Experiment):
  shardings = jax.tree.map(lambda s: s.sharding, of.abstract_state)

  def make(number):
    first = of.init_state(jax.random.key(0))
    return jax.tree.map(lambda x: x + number.astype(x.dtype), first)

  return jax.jit(make, out_shardings=shardings)


def state(number: int, of=None):
  """Returns a state whose leaves all depend on a number."""
  return _maker(of or experiment())(jax.numpy.asarray(number))


def same(a, b) -> bool:
  return all(
    np.array_equal(x, y)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  )


ABOUT = {'format': 3, 'class_names': ['cat', 'dog'], 'config': {'seed': 7}}


def save(folder: pathlib.Path, *numbers: int, about=ABOUT, **settings) -> None:
  """Saves these steps, each with the state of its number."""
  with contextlib.closing(
    Checkpointer(folder, about, **settings)
  ) as checkpoints:
    for number in numbers:
      checkpoints.save(number, state(number), {})


def restore(folder: pathlib.Path, of=None, about=ABOUT, sleep=lambda _: None):
  """Restores the newest intact step; pauses between retries are skipped."""
  clock = types.SimpleNamespace(sleep=sleep)
  with (
    mock.patch.object(agreement, 'time', clock),
    contextlib.closing(Checkpointer(folder, about)) as checkpoints,
  ):
    return checkpoints.restore_latest((of or experiment()).abstract_state)
