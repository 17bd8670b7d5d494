"""Tests of `--search` and of proposals, with a formula as compiler."""

import math

import jax
import pytest

from tests.minimal_config import completed
from vit_jax.arrays.devices import TPUS
from vit_jax.config import loading
from vit_jax.errors import UserError
from vit_jax.plan import search, topology
from vit_jax.plan.compile import STATE_AND_BATCH, Plan
from vit_jax.plan.cost import Cost

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

  def plan(config, target, cache=None):
    tried.append(config)
    parameters = 600 // (DEVICES if config.mesh.fsdp == -1 else 1)
    images = config.batch_size / DEVICES / config.micro_batches
    needed = math.ceil(parameters + images * IMAGE[config.model.remat])
    seconds = SECONDS[config.model.remat] * config.batch_size
    seconds *= 1 + 0.02 * config.micro_batches
    seconds *= 1.05 if config.mesh.fsdp == -1 else 1
    seconds *= 0.9 if config.model.unroll > 1 else 1
    return Plan(
      config=config,
      topology=target.name,
      devices=DEVICES,
      parameters=parameters,
      hbm_bytes_per_device=LIMIT,
      model_flops_per_image=1.0,
      total_steps=1,
      paper_core_days=None,
      batch_size=config.batch_size,
      micro_batches=config.micro_batches,
      images_per_device=images,
      mesh=dict(config.mesh),
      remat=config.model.remat,
      unroll=config.model.unroll,
      computed_by=None,
      bytes=dict.fromkeys(STATE_AND_BATCH, 0) | {'parameters': parameters},
      fits=needed <= LIMIT,
      peak_bytes_per_device=needed,
      cost=Cost(predicted_step_seconds=seconds if needed <= LIMIT else None),
    )

  monkeypatch.setattr(search, 'plan', plan)
  return tried


def config(batch_size, remat='none'):
  return completed(**{'batch_size': batch_size, 'model.remat': remat})


def ways(plans):
  """Returns (remat, micro-batches, whether parameters are split) per plan."""
  return [
    (p.config.model.remat, p.config.micro_batches, p.config.mesh.fsdp == -1)
    for p in plans
  ]


def test_search_sorts_plans_by_time(target, attempts):
  """Each mesh and remat has the smallest number of micro-batches that fits."""
  plans = search.search(config(256), target)
  assert all(p.fits for p in plans)
  assert [p.seconds for p in plans] == sorted(p.seconds for p in plans)
  found = ways(plans)
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
    search.search(config(8 * 400), target)


@pytest.mark.parametrize('batch_size', [8, 64, 4096, 100_000])
def test_largest_batch(target, attempts, batch_size):
  """The result is within a sixteenth of the formula's limit."""
  found = search.largest_batch(config(batch_size), target)
  most = (LIMIT - 600) // IMAGE['none'] * DEVICES
  assert found is not None and found.fits
  assert most * (1 - search.GRANULARITY) - DEVICES <= found.config.batch_size
  assert found.config.batch_size <= most
  assert len(attempts) <= search.MAX_TRIES


@pytest.mark.parametrize(
  'batch_size, remat, changes',
  [
    (144, 'none', {'micro_batches': 2}),
    (1600, 'none', {'micro_batches': 25}),
    (1600, 'dots', {'micro_batches': 10}),
    # 15 images of a device cannot be halved.
    (120, 'none', {'micro_batches': 3}),
    (1600, 'full', {'micro_batches': 4}),
  ],
)
def test_micro_batches_that_fit_are_found(
  target, attempts, caplog, batch_size, remat, changes
):
  """The first estimate fits, because the memory is proportional here."""
  caplog.set_level('INFO', 'vit_jax')
  asked = config(batch_size, remat)
  refused = search.plan(asked, target)
  found = search.find_fit(asked, target, refused)
  assert found is not None and found[1].fits
  assert found[0] == changes
  assert found[1].micro_batches == changes['micro_batches']
  assert len(attempts) == 2
  # It is said before the compiler starts.
  lines = [record.getMessage() for record in caplog.records]
  assert 'does not fit' in lines[0]
  assert f'trying batch {batch_size}, micro_batches=' in lines[1]


def test_at_most_three_programs_show_that_a_config_fits(
  target, attempts, monkeypatch
):
  """Memory that is not proportional needs a second estimate, or remat."""
  asked = config(800)
  refused = search.plan(asked, target)
  monkeypatch.setitem(IMAGE, 'none', 90)  # more than the first plan showed
  found = search.find_fit(asked, target, refused)
  assert found is not None and len(attempts) == 3
  assert found[0] == {'micro_batches': 25}
  attempts.clear()
  monkeypatch.setitem(IMAGE, 'none', 500)  # one image does not fit
  refused = search.plan(asked, target)
  found = search.find_fit(asked, target, refused)
  assert found is not None and len(attempts) == 2
  assert found[0] == {'model.remat': 'full', 'micro_batches': 100}
  monkeypatch.setitem(IMAGE, 'full', 500)
  assert search.find_fit(asked, target, refused) is None
  assert len(attempts) == 3


def test_nothing_is_compiled_if_the_state_does_not_fit(target, attempts):
  asked = config(160)
  refused = search.plan(asked, target)
  refused.bytes['optimizer'] = LIMIT
  assert search.find_fit(asked, target, refused) is None
  assert len(attempts) == 1


def test_only_micro_batches_that_a_transform_allows_are_proposed(
  target, attempts, monkeypatch
):
  """Groups of 64 examples, for which masks are drawn, must divide them."""
  asked = loading.load('configs/dinov2.py')
  asked.model.remat = 'none'
  assert asked.augment.group == 64 and asked.batch_size == 2048
  monkeypatch.setitem(IMAGE, 'none', 80)  # 54 parts would fit
  refused = search.plan(asked, target)
  found = search.find_fit(asked, target, refused)
  assert found is not None and len(attempts) == 2
  assert found[0] == {'model.remat': 'full', 'micro_batches': 32}
