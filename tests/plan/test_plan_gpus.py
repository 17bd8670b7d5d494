"""Tests of plans for GPUs, with and without XLA's GPU compiler."""

import json
import math
import pathlib
import re
import sys

import jax
import pytest

from tests import cli
from vit_jax.config import loading
from vit_jax.errors import UserError
from vit_jax.plan import compile, environment, report, topology


@pytest.fixture(autouse=True)
def described(monkeypatch):
  """Lets CPU devices stand for GPUs, without XLA's compiler for them."""
  devices = tuple(jax.devices('cpu')[:8])
  monkeypatch.setattr(environment, 'has_gpu_compiler', lambda: True)
  monkeypatch.setattr(topology, '_described', lambda *_: devices)


@pytest.fixture
def compiled(monkeypatch):
  """Returns a function that plans a config with a small program for GPUs."""
  text = (pathlib.Path(__file__).parent / 'small_gpu.hlo').read_text()
  program = compile.Program(text, None, 1.0)

  def compile_step(experiment, options, name, cache):
    plan.options = options
    return program

  def plan(config, *options):
    return compile.plan(config, topology.find('h100:2x4'), *options)

  monkeypatch.setattr(compile, 'compile_step', compile_step)
  return plan


QUICKSTART = loading.load('configs/quickstart.py')


def test_the_summary_of_a_compiled_step_is_a_range(compiled):
  """A user who pays reads a range of GPU-days, and what is left out."""
  made = compiled(compile.changed(QUICKSTART, total='1000000000 steps'))
  groups = report.costliest(made)
  shown = report.summary(made, {'breakdown': groups, 'price_per_hour': 2.5})
  rows = dict(line.split(None, 1) for line in shown.splitlines() if line)
  for name in ('step,', 'days', 'GPU-days', 'price'):
    numbers = re.findall(r'[\d,]+\.\d+', rows[name].partition('at')[0])
    middle, low, high = (float(n.replace(',', '')) for n in numbers)
    assert low < middle < high
  assert middle == pytest.approx(made.predicted_days * 24 * 8 * 2.5, abs=0.01)
  cores = math.ceil(made.predicted_images_per_second / report.DECODED_PER_CORE)
  assert rows['input'].startswith(f'{cores:,} CPU cores')
  assert 'not measured' in shown and 'checkpoints are not included' in shown
  # The breakdown adds up to the time of the kernels.
  cost = made.cost
  assert len(groups) == len(cost.groups)
  seconds = [row['seconds'] for row in groups]
  exposed = cost.exposed_collective_seconds
  assert math.isclose(sum(seconds), cost.predicted_step_seconds - exposed)
  assert math.isclose(sum(row['share'] for row in groups), 1)
  assert seconds == sorted(seconds, reverse=True)
  assert f'{seconds[0] * 1e3:,.2f}' in shown


@pytest.mark.parametrize(
  'name, slices, message',
  [
    ('h100', 1, 'give h100:NODESxGPUS'),
    ('h100:0x8', 1, 'give h100:NODESxGPUS'),
    ('h100:2x2x2', 1, 'give h100:NODESxGPUS'),
    ('h100:1x8', 2, 'slices is 2.*h100:1x8'),
    ('h10:1x8', 1, "did you mean 'h100'"),
    ('v3:4x4,v3:2x2', 1, r"v3:2x2'; give VERSION:SHAPE .* or 'local'\.$"),
  ],
)
def test_wrong_topologies_are_refused(name, slices, message):
  with pytest.raises(UserError, match=message):
    topology.find(name, slices)


COMPILER = pathlib.Path(sys.prefix) / 'gpu'  # see requirements-gpu.txt


@pytest.mark.skipif(
  not COMPILER.is_dir(), reason='launch/test.sh --all installs the compiler'
)
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize('name', ['h100:1x8', 'a100-80gb:2x8'])
def test_a_step_is_compiled_for_absent_gpus(name, monkeypatch):
  """A small ViT: attention by cuDNN, exchanges, and a range of times."""
  monkeypatch.setenv('PYTHONPATH', f'{COMPILER}:{cli.ROOT}')
  sizes = dict(width=128, num_heads=2, dtype='bfloat16', depth=2)
  changes = [f'--config.model.{key}={value}' for key, value in sizes.items()]
  out, _ = cli.run(
    [
      *cli.command('plan', '--config=configs/quickstart.py'),
      f'--topology={name}',
      '--json',
      *changes,
    ]
  )
  result = json.loads(out.splitlines()[-1])
  assert result['fits'] and result['devices'] in (8, 16)
  assert result['computed_by'] == 'attention by cuDNN'
  assert result['kernels']['attention']['count'] == 2 * 2  # both passes
  low, high = result['predicted_step_seconds_range']
  assert 0 < low < result['predicted_step_seconds'] < high
  assert 0 < result['predicted_mfu'] < 1
  # Gradients are exchanged in bfloat16 or float32.
  exchanged = result['collective_bytes']['all-reduce']
  assert 2 <= exchanged / result['parameters'] < 4.5
  assert result['peak_bytes_per_device'] < result['hbm_bytes_per_device']


@pytest.mark.parametrize(
  'name', ['vit.py:variant=L/16,data=i21k', 'mae.py:model=L']
)
def test_configs_for_gpu_memory_keep_the_recipe(name):
  """Less memory takes more micro-batches; the recipe stays the same."""
  plain = loading.load(f'configs/{name}')
  parts = []
  for gigabytes in (24, 40, 80):
    made = loading.load(f'configs/{name},gpu={gigabytes}')
    parts.append(made.micro_batches)
    assert made.model.remat == 'none' and made.model.unroll > 1
    for key in ('batch_size', 'total', 'schedule', 'optimizer', 'augment'):
      assert made[key] == plain[key], key
    assert made.batch_size % (8 * made.micro_batches) == 0
  assert parts == sorted(parts, reverse=True) and parts[0] > parts[-1]
  with pytest.raises(UserError, match='gpu=16.*24, 40 or 80'):
    loading.load(f'configs/{name},gpu=16')


def test_a_step_is_compiled_without_kernels_that_need_autotuning(compiled):
  """The options of the user take precedence."""
  compiled(QUICKSTART, {'xla_gpu_autotune_level': '4', 'other': 1})
  assert compiled.options == {
    'xla_gpu_autotune_level': '4',
    'xla_gpu_enable_triton_gemm': False,
    'other': 1,
  }
