"""Tests of `--search`, with a formula as compiler."""

import math
from unittest import mock

import jax
import pytest

from tests.minimal_config import completed
from vit_jax.arrays.devices import TPUS
from vit_jax.errors import UserError
from vit_jax.plan import search, topology
from vit_jax.plan.compile import Plan

DEVICES, LIMIT = 8, 1000
# Bytes of activations per image, and seconds per step, by rematerialization.
IMAGE = {'none': 40, 'dots': 16, 'full': 4}
SECONDS = {'none': 1.0, 'dots': 1.1, 'full': 1.5}


@pytest.fixture
def target():
  v3 = TPUS['v3']
  devices = tuple(jax.devices()[:DEVICES])
  return topology.Target('v3:2x2', devices, v3, hbm_bytes=LIMIT)


@pytest.fixture
def attempts(monkeypatch):
  """Replaces the compiler by a formula; returns the list of tried configs."""
  tried = []

  def plan(config, target):
    tried.append(config)
    is_split = config.mesh.fsdp == -1
    remat, parts = config.model.remat, config.micro_batches
    images = config.batch_size / DEVICES / parts
    parameters = 600 // (DEVICES if is_split else 1)
    needed = math.ceil(parameters + images * IMAGE[remat])
    seconds = SECONDS[remat] * config.batch_size * (1 + 0.02 * parts)
    seconds *= 1.05 if is_split else 1
    seconds *= 0.9 if config.model.unroll > 1 else 1
    fits = needed <= LIMIT
    return mock.Mock(
      spec=Plan,
      config=config,
      fits=fits,
      seconds=seconds if fits else math.inf,
      peak_bytes_per_device=needed,
      hbm_bytes_per_device=LIMIT,
    )

  monkeypatch.setattr(search, 'plan', plan)
  return tried


def test_search_sorts_plans_by_time(target, attempts):
  """Each mesh and remat has the smallest number of micro-batches that fits."""
  plans = search.search(completed(batch_size=256), target)
  assert all(p.fits for p in plans)
  assert [p.seconds for p in plans] == sorted(p.seconds for p in plans)
  # Rematerialization, micro-batches, and whether parameters are split.
  found = [
    (each.model.remat, each.micro_batches, each.mesh.fsdp == -1)
    for each in (plan.config for plan in plans)
  ]
  # 32 images per device of 40 bytes: 4 parts, or 2 with split parameters.
  assert found[:2] == [('none', 4, False)] * 2
  assert [p.config.model.unroll for p in plans[:2]] == [search.ALL_LAYERS, 1]
  assert ('none', 2, True) in found and ('none', 2, False) not in found
  assert ('dots', 2, False) in found and ('dots', 1, True) in found
  assert ('full', 1, False) in found
  assert len(attempts) < 30


def test_search_says_when_nothing_fits(target, attempts, monkeypatch):
  """The message contains the batch and the slice."""
  del attempts
  for remat in IMAGE:
    monkeypatch.setitem(IMAGE, remat, 10**6)
  with pytest.raises(UserError, match='v3:2x2.*3200'):
    search.search(completed(batch_size=3200), target)
