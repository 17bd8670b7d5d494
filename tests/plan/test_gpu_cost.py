"""Tests of the modelled time of GPU programs against sums by hand."""

import math
import pathlib

import pytest

from vit_jax.plan import gpu_cost, gpus, hlo

TEXT = (pathlib.Path(__file__).parent / 'small_gpu.hlo').read_text()
H100 = gpus.GPUS['h100']
RATES = gpu_cost.Rates(
  product=0.5, attention=0.25, memory=0.8, link=1.0, launch_s=0.0
)


def cost(nodes=2, per_node=8, text=TEXT, **rates):
  cluster = gpus.Cluster(H100, per_node, nodes * per_node)
  return gpu_cost.of_program(hlo.parse(text), cluster, RATES._replace(**rates))


def test_products_count_their_flops_in_every_iteration():
  """There are twelve products of 1024x1024x1024, and a convolution."""
  part = cost().parts['product']
  products = 12 * 2 * 1024**3
  convolution = 2 * (64 * 56 * 56 * 128) * (3 * 3 * 64)
  assert part.count == 13
  assert part.flops == products + convolution
  # The workspaces (s8, u8) are not read or written.
  convolved = 2 * (64 * 56 * 56 * (64 + 128) + 3 * 3 * 64 * 128)
  assert part.bytes == 12 * 3 * 2 * 1024**2 + convolved
  seconds = [
    12 * max(2 * 1024**3 / (0.5 * 989e12), 6 * 1024**2 / (0.8 * 3.352e12)),
    max(convolution / (0.5 * 989e12), convolved / (0.8 * 3.352e12)),
  ]
  assert math.isclose(part.seconds, sum(seconds))


def test_attention_counts_two_products_forward_and_five_backward():
  part = cost().parts['attention']
  assert part.flops == (2 + 5) * 2 * 64 * 12 * 198 * 198 * 64
  array = 2 * 64 * 198 * 12 * 64
  assert part.bytes == 3 * array + array + 4 * 64 * 12 * 198 + 4 * array


def test_slices_of_stacked_layers_count_only_their_bytes():
  """The stack of twelve matrices is not read or written as a whole."""
  part = cost().parts['memory']
  matrix = 2 * 1024**2
  scalar = 4
  each = 2 * matrix + scalar + 2 * matrix + scalar
  assert part.count == 2 * 12 + 1
  assert part.bytes == 12 * each + 2 * 4_000_000


def test_concurrent_kernels_hide_collectives():
  """A ring per node and one between the nodes, less the copy's time."""
  total = cost()
  ring = 2 * 4e6 * 7 / 8 / 450e9 + 2 * 4e6 / 8 / 2 / 50e9
  copy = 2 * 4e6 / (0.8 * 3.352e12)
  assert math.isclose(total.collectives['all-reduce'].seconds, ring)
  assert total.collectives['all-reduce'].bytes == 4_000_000
  assert math.isclose(total.exposed_seconds, ring - copy)
  assert math.isclose(total.total, total.seconds + ring - copy)
  blocking = TEXT.replace('all-reduce-start(', 'all-reduce(').replace(
    'all-reduce-done(%all-reduce-start)', 'copy(%all-reduce-start)'
  )
  assert math.isclose(cost(text=blocking).exposed_seconds, ring)


def test_one_node_uses_no_network():
  text = TEXT.replace(',8,9,10,11,12,13,14,15', '')
  ring = 2 * 4e6 * 7 / 8 / 450e9
  collectives = cost(nodes=1, text=text).collectives
  assert math.isclose(collectives['all-reduce'].seconds, ring)


def test_a_kernel_takes_at_least_its_launch_time():
  part = cost(launch_s=1.0).parts['attention']
  assert part.seconds == 2.0


def test_time_ranges_are_in_order():
  cluster = gpus.Cluster(H100, 8, 16)
  low, middle, high = (
    gpu_cost.of_program(hlo.parse(TEXT), cluster, rates).total
    for rates in (
      gpu_cost.OPTIMISTIC,
      gpu_cost.EXPECTED,
      gpu_cost.PESSIMISTIC,
    )
  )
  assert low < middle < high


def test_time_is_grouped_by_layer_and_pass():
  groups = cost().groups
  assert ('encoder/layers/mlp/fc1', 'forward') in groups
  assert math.isclose(sum(groups.values()), cost().seconds)


@pytest.mark.parametrize('kind', gpus.GPUS)
def test_rates_agree_with_the_peaks_that_runs_use(kind):
  """`plan` and the MFU in metrics.jsonl use the same peak rate."""
  known = gpus.chips.GPUS[kind]
  assert gpus.GPUS[kind].peak_flops == gpus.chips.peak_flops(known.device_kind)
