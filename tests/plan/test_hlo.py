"""Tests of costs summed over a small hand-written program."""

import dataclasses
import math
import pathlib

import pytest

from vit_jax.arrays import devices
from vit_jax.errors import UserError
from vit_jax.plan import cost, hlo, topology, tpu_cost

TEXT = (pathlib.Path(__file__).parent / 'small.hlo').read_text()
# Outer loop: 2, 4, 6 < 7; inner loop: 24 times each.
OUTER, INNER = 3, 24


@pytest.fixture
def target():
  """Returns four v3 cores without devices."""
  v3 = devices.TPUS['v3']
  return topology.Target('v3:1x2', (None,) * 4, v3, sides=(1, 2))


def of(text, target):
  """Returns the cost of a program."""
  return tpu_cost.of_program(hlo.parse(text), target)


def test_cycles_are_multiplied_by_trip_counts(target):
  """Nested loops multiply; asynchronous operations count at their start.

  A conditional counts its most expensive branch. The instructions inside a
  fusion or a reduction are not added.
  """
  total = of(TEXT, target)
  assert total.estimated_cycles == OUTER * INNER * 1000 + 70 + 300


@pytest.mark.parametrize(
  'old, new, count',
  [
    ('constant(24)', 'constant(5)', 5),
    ('direction=LT', 'direction=LE', INNER + 1),
    ('direction=LT', 'direction=NE', INNER),
    (
      '%copy.3 = s32[]{:T(256)} copy(%zero.3)',
      '%copy.3 = s32[] copy(%two.3)',
      22,
    ),
    ('%one.1 = s32[]{:T(256)} constant(1)', '%one.1 = s32[] constant(3)', 8),
    (  # compilers for CPUs and GPUs write the number into the program
      'body=%inner_body',
      'body=%inner_body, backend_config={"known_trip_count":{"n":"11"}}',
      11,
    ),
  ],
)
def test_trip_count_of_other_loops(target, old, new, count):
  """The limit, direction, start and step are taken into account."""
  assert TEXT.count(old) == 1
  total = of(TEXT.replace(old, new), target)
  assert total.estimated_cycles == OUTER * count * 1000 + 370


@pytest.mark.parametrize(
  'old, new',
  [
    ('constant(24)', 'parameter(1)'),  # the limit is data
    ('%one.1 = s32[]{:T(256)} constant(1)', '%one.1 = s32[] constant(0)'),
    ('add(%param_0.2, %param_1.2)', 'multiply(%param_0.2, %param_1.2)'),
    ('copy(%zero.3)', 'copy(%limit.3)'),  # the start is not known
  ],
)
def test_unknown_trip_count_is_an_error(target, old, new):
  """It is not counted as one."""
  assert TEXT.count(old) == 1
  with pytest.raises(UserError, match='number of iterations'):
    of(TEXT.replace(old, new), target)


def test_random_bits_and_custom_kernels_are_counted(target):
  """They have no estimates; bits take as long as writing them or longer."""
  chip = target.device
  kernel = 45_000 / chip.bytes_per_s * chip.clock_hz
  written = (4 * 2**20 + 2 * 16) / chip.bytes_per_s * chip.clock_hz
  no_bits = TEXT.replace(' rng-bit-generator(', ' bitcast(')
  allocation = no_bits.replace('"tpu_custom_call"', '"AllocateBuffer"')
  all_, kernels, others = (
    of(text, target).uncounted_cycles for text in (TEXT, no_bits, allocation)
  )
  assert all_ - kernels >= round(written) > 0
  assert kernels - others == pytest.approx(kernel, abs=1)
  assert others < 5  # counters of loops


def test_collectives_count_with_their_loops(target):
  """Only those that the program waits for are exposed."""
  total = of(TEXT, target)
  size = 4 * 8 * 128
  reduce, gather = (
    total.collective_seconds[kind] for kind in ('all-reduce', 'all-gather')
  )
  assert (reduce['count'], reduce['bytes']) == (OUTER, OUTER * size)
  assert (gather['count'], gather['bytes']) == (1, 4 * size)
  link = target.device.link_bytes_per_s
  # The sum passes the link between the two chips twice, 1 µs each.
  once = 2 * size * 3 / 4 / link + 2 * 1e-6
  assert reduce['seconds'] == pytest.approx(OUTER * once)
  assert total.exposed_collective_seconds == reduce['seconds']


@pytest.mark.parametrize(
  'members, sides, hops',
  [
    (2, (4, 4), 0),  # both cores of a chip
    (32, (4, 4), 6),
    (8, (4, 4), 2),
    (512, (16, 16), 30),
    (16, (1, 8), 7),
  ],
)
def test_latency_of_the_longest_way(target, members, sides, hops):
  """On v3, a chip has two devices; links do not wrap around."""
  cores = (None,) * (2 * math.prod(sides))
  placed = dataclasses.replace(target, devices=cores, sides=sides)
  assert tpu_cost._hops(members, placed) == hops


def test_the_range_of_a_step(target):
  """Kernels cost their declared cycles more or less; exchanges may be seen."""
  total = of(TEXT, target)
  chip = target.device
  kernel = 45_000 / chip.bytes_per_s
  low, high = total.predicted_step_seconds_range
  seconds = total.predicted_step_seconds
  assert low == pytest.approx(seconds - 0.2 * kernel, rel=1e-9)
  hidden = total.collective_seconds['all-gather']['seconds']
  assert hidden > 0
  exposed = total.exposed_collective_seconds
  unhidden = hidden / 0.8 + exposed * (1 / 0.8 - 1)
  assert high == pytest.approx(seconds + 0.45 * kernel + unhidden, rel=1e-9)


ENCODER = 'while/body/closed_call/layers'


@pytest.mark.parametrize(
  'path, place, way',
  [
    (
      f'while/body/transpose(jvp(ViT))/ViT.predict/encoder/{ENCODER}/mlp/dot',
      'encoder/layers/mlp',
      'backward',
    ),
    (
      f'jvp(ViT)/ViT.predict/encoder/{ENCODER}/attention/nqhc,nkhc->nhqk/dot',
      'encoder/layers/attention',
      'forward',
    ),
    (
      'transpose(jvp(ViT))/encoder/checkpoint/rematted_computation/mlp/fc1/dot',
      'encoder/mlp/fc1',
      'recomputed',
    ),
    ('jvp(ViT)/ViT._predict/encoder/norm/mul', 'encoder/norm', 'forward'),
    ('mul', '(outside the model)', 'update'),
  ],
)
def test_group_of_an_operation(path, place, way):
  """Operations are grouped by their layer and their pass."""
  assert cost.group(f'jit(train_step)/{path}') == (place, way)
  assert cost.group('reshape.554') == ('(made by the compiler)', 'update')
