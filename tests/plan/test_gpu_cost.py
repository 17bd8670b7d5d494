"""Tests of the modelled time of GPU programs against sums by hand."""

import gzip
import json
import math
import pathlib

import pytest

from tests.faults.counts import further
from vit_jax.arrays.devices import GPUS
from vit_jax.plan import gpu_cost, hlo
from vit_jax.plan.topology import Target

TEXT = (pathlib.Path(__file__).parent / 'small_gpu.hlo').read_text()
H100 = GPUS['h100']
PRODUCT, ATTENTION = 0.80 * 989e12, 0.33 * 989e12  # attainable FLOP/s
RATES = gpu_cost.Rates(
  product=0.5,
  attention=0.25,
  reduction=0.4,
  memory=0.8,
  copy=0.8,
  link=1.0,
  product_s=0.0,
  launch_s=0.0,
)
MEASURED = pathlib.Path(__file__).parents[2] / 'benchmarks/measured/h200'


def cost(nodes=2, text=TEXT):
  target = Target('', (None,) * (nodes * 8), H100, nodes)
  return gpu_cost.at_rates(hlo.parse(text), target, RATES)


def test_products_count_their_flops_in_every_iteration():
  """There are twelve products of 1024x1024x1024, and a convolution."""
  part = cost().kernels['product']
  products = 12 * 2 * 1024**3
  convolution = 2 * (64 * 56 * 56 * 128) * (3 * 3 * 64)
  # The workspaces (s8, u8) are not read or written.
  convolved = 2 * (64 * 56 * 56 * (64 + 128) + 3 * 3 * 64 * 128)
  filled = 0.5 * PRODUCT * 64 / 132  # 64 tiles for 132 multiprocessors
  seconds = [
    12 * max(2 * 1024**3 / filled, 6 * 1024**2 / (0.8 * 3.352e12)),
    max(convolution / (0.5 * PRODUCT), convolved / (0.8 * 3.352e12)),
  ]
  assert part == {
    'count': 13,
    'flops': products + convolution,
    'bytes': 12 * 3 * 2 * 1024**2 + convolved,
    'seconds': pytest.approx(sum(seconds)),
  }


def kernel_of(instruction, left, right, out):
  """Returns the kernel of an instruction on the arrays %a and %b."""
  module = hlo.parse(f"""HloModule m
ENTRY %main (a: bf16{left}, b: bf16{right}) -> bf16{out} {{
  %a = bf16{left} parameter(0)
  %b = bf16{right} parameter(1)
  ROOT %c = bf16{out} {instruction}
}}
""")
  return gpu_cost.kernel(module, module.computations['main'].ops['c'])


@pytest.mark.parametrize(
  'left, right, out, attributes, multiplications',
  [
    (
      '[2,9,9,3]',
      '[3,3,3,8]',
      '[2,7,7,8]',
      'window={size=3x3}, dim_labels=b01f_01io->b01f',
      (2 * 7 * 7 * 8) * (3 * 3 * 3),
    ),
    (  # two groups, whose filters have half the channels
      '[2,9,9,4]',
      '[8,3,3,2]',
      '[2,7,7,8]',
      'window={size=3x3}, dim_labels=b01f_o01i->b01f, feature_group_count=2',
      (2 * 7 * 7 * 8) * (3 * 3 * 2),
    ),
    (  # gradient of the input of a convolution with stride 2
      '[2,4,4,8]',
      '[8,3,3,5]',
      '[2,8,8,5]',
      'window={size=3x3 pad=2_1x2_1 lhs_dilate=2x2}, '
      'dim_labels=b01f_i01o->b01f, convolution_kind=dgrad',
      (2 * 4 * 4 * 8) * (3 * 3 * 5),
    ),
    (  # gradient of its filters
      '[2,8,8,5]',
      '[2,4,4,8]',
      '[8,3,3,5]',
      'window={size=4x4 pad=0_1x0_1 rhs_dilate=2x2}, '
      'dim_labels=f01b_i01o->f01b, convolution_kind=wgrad',
      (2 * 4 * 4 * 8) * (3 * 3 * 5),
    ),
  ],
)
def test_flops_of_convolutions_in_fusions(
  left, right, out, attributes, multiplications
):
  """An experimental option of XLA leaves them to its own fusions."""
  convolution = f'convolution(%a, %b), {attributes}'
  work = kernel_of(convolution, left, right, out)
  assert (work.kind, work.flops) == ('product', 2 * multiplications)


def seconds_of_dot(m, n, k, batch=1):
  """Returns seconds at full rates, with an endless memory bandwidth."""
  work = kernel_of(
    'dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, '
    'rhs_batch_dims={0}, rhs_contracting_dims={1}',
    f'[{batch},{m},{k}]{{2,1,0}}',
    f'[{batch},{k},{n}]{{2,1,0}}',
    f'[{batch},{m},{n}]{{2,1,0}}',
  )
  return work.seconds(H100, RATES._replace(product=1.0, copy=1e9))


def test_the_last_wave_of_tiles_takes_as_long_as_a_full_one():
  """An H100 computes 132 tiles of 128x128 at once, and then the 133rd."""
  wave = seconds_of_dot(128 * 132, 128, 512)
  assert math.isclose(wave, 2 * 128 * 132 * 128 * 512 / PRODUCT)
  assert math.isclose(seconds_of_dot(128 * 133, 128, 512), 2 * wave)
  assert math.isclose(seconds_of_dot(128, 128, 512, batch=133), 2 * wave)
  # A long contraction is split: 132 x 1,024 elements fill the GPU.
  split = seconds_of_dot(128, 128, 132 * 1024)
  assert math.isclose(split, 2 * 128 * 128 * 132 * 1024 / PRODUCT)


def test_attention_counts_two_products_forward_and_five_backward():
  """A third of the rate is reached with 198 tokens, half with 400."""
  part = cost().kernels['attention']
  flops = (2 + 5) * 2 * 64 * 12 * 198 * 198 * 64
  array = 2 * 64 * 198 * 12 * 64
  assert part['flops'] == flops
  assert part['bytes'] == 3 * array + array + 4 * 64 * 12 * 198 + 4 * array
  assert math.isclose(
    part['seconds'], flops / (0.25 * ATTENTION * 198 / (198 + 400))
  )


def test_slices_of_stacked_layers_count_only_their_bytes():
  """The stack of twelve matrices is not read or written as a whole."""
  part = cost().kernels['memory']
  matrix = 2 * 1024**2
  scalar = 4
  each = 2 * matrix + scalar + 2 * matrix + scalar
  assert part['count'] == 2 * 12 + 1
  assert part['bytes'] == 12 * each + 2 * 4_000_000


def test_concurrent_kernels_hide_collectives():
  """A ring per node and one between the nodes, less the copy's time."""
  total = cost()
  copy = 2 * 4e6 / (0.8 * 3.352e12)
  kernels = sum(each['seconds'] for each in total.kernels.values())
  exchanged = total.collective_seconds['all-reduce']
  assert math.isclose(exchanged['seconds'], RING)
  assert exchanged['bytes'] == 4_000_000
  assert math.isclose(total.exposed_collective_seconds, RING - copy)
  seconds = total.predicted_step_seconds
  assert math.isclose(seconds, kernels + RING - copy)
  assert math.isclose(sum(total.groups.values()), kernels)
  assert ('encoder/layers/mlp/fc1', 'forward') in total.groups
  blocking = TEXT.replace('all-reduce-start(', 'all-reduce(').replace(
    'all-reduce-done(%all-reduce-start)', 'copy(%all-reduce-start)'
  )
  assert math.isclose(exposed(blocking), RING)
  one_node = cost(nodes=1, text=TEXT.replace(',8,9,10,11,12,13,14,15', ''))
  ring = 2 * 4e6 * 7 / 8 / 450e9  # without the network
  assert math.isclose(
    one_node.collective_seconds['all-reduce']['seconds'], ring
  )


def program(*lines, loop=()):
  """Returns a program, optionally with a loop of twelve iterations.

  Its arrays are %small, %large and, for copies, %huge; %small is that of the
  loop, too.
  """
  types = {'small': 1_000_000, 'large': 3_000_000, 'huge': 10_000_000}
  given = [
    f'%{name} = f32[{size}]{{0}} parameter({i})'
    for i, (name, size) in enumerate(types.items())
  ]
  body = ['%small = f32[1000000]{0} parameter(0)', *loop]
  blocks = {'%body (x: f32[1000000]) -> f32[1000000]': body} if loop else {}
  blocks['ENTRY %main (x: f32[1000000]) -> f32[1000000]'] = [*given, *lines]
  return 'HloModule exchange, is_scheduled=true\n' + ''.join(
    f'\n{head} {{\n' + ''.join(f'  {line}\n' for line in block) + '}\n'
    for head, block in blocks.items()
  )


LOOP = (
  '%loop = f32[1000000]{0} while(%small), condition=%body, body=%body, '
  'backend_config={"known_trip_count":{"n":"12"}}'
)
COPY = '%copy = f32[10000000]{0} copy(%huge)'
START = '%a = f32[1000000]{0} all-reduce-start(%small)'
DONE = '%done = f32[1000000]{0} all-reduce-done(%a)'
# Seconds of the all-reduce of %small by 16 GPUs, and of the copy.
RING = 2 * 4e6 * 7 / 8 / 450e9 + 2 * 4e6 / 8 / 2 / 50e9
COPY_S = 2 * 4e7 / (0.8 * 3.352e12)


def exposed(text):
  """Returns the seconds of collectives that nothing hides."""
  return cost(text=text).exposed_collective_seconds


def test_a_kernel_hides_one_collective_at_a_time():
  """It hides the first one, and no time is left over for the second one."""
  second = START.replace('%a', '%b').replace('small', 'large')
  second = second.replace('1000000', '3000000')
  done = DONE.replace('%done', '%last').replace('(%a)', '(%b)')
  assert RING < COPY_S < 3 * RING
  first = exposed(program(START, second, COPY, DONE, done))
  assert math.isclose(first, 3 * RING)
  last = exposed(program(second, START, COPY, DONE, done))
  assert math.isclose(last, 3 * RING - COPY_S + RING)


def test_collectives_in_loops_are_added_in_every_iteration():
  """Their names may also occur outside of the loop."""
  text = program(START, LOOP, DONE, loop=(START, DONE))
  assert cost(text=text).collective_seconds['all-reduce']['count'] == 13
  assert math.isclose(exposed(text), 13 * RING)
  blocking = START.replace('-start', '')
  assert math.isclose(exposed(program(LOOP, loop=(blocking,))), 12 * RING)


@pytest.mark.slow
@pytest.mark.parametrize(
  'name, file',
  [('S/16', 's_16'), *further(['B/16, no dropout', 'b_16_no_dropout'])],
)
def test_measured_steps_are_predicted(name, file):
  """The rates were fitted to B/16; S/16 was not used."""
  rows = map(json.loads, (MEASURED / 'rows.jsonl').read_text().splitlines())
  [seconds] = [row['step_seconds'] for row in rows if row['name'] == name]
  text = gzip.decompress((MEASURED / f'{file}.hlo.gz').read_bytes()).decode()
  total = gpu_cost.of_program(
    hlo.parse(text), Target('h200:1x1', (None,), GPUS['h200'])
  )
  assert math.isclose(total.predicted_step_seconds, seconds, rel_tol=0.03)
  low, high = total.predicted_step_seconds_range
  assert low < seconds < high
