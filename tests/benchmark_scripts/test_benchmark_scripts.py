"""Tests that every script in benchmarks/ runs, at its smallest size."""

import csv
import datetime
import importlib.util
import json
import math
import runpy
import subprocess
import sys
import types
from contextlib import nullcontext

import cv2
import numpy as np
import pytest

from benchmarks import expected_losses, kernels, peers, real_weights
from tests import cli
from tests.faults.counts import ALL
from vit_jax.plan import environment, topology


def write(path, seed):
  pixels = np.random.default_rng(seed).integers(0, 256, (40, 50, 3), np.uint8)
  path.parent.mkdir(exist_ok=True)
  cv2.imwrite(str(path), pixels)


def run(*arguments, **options):
  """Returns the output of a script that must end with exit code 0."""
  done = subprocess.run(
    [sys.executable, *arguments],
    cwd=cli.ROOT,
    env=cli.environment() | options,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  return done.stdout


@pytest.mark.slow
@pytest.mark.long
def test_step_compares_with_plain_flax():
  """The table has rows for training and inference of both."""
  sizes = ('--variants=Ti/16', '--batch=2', '--steps=1', '--rounds=1')
  out = run('benchmarks/step.py', *sizes)
  rows = [line for line in out.splitlines() if line.startswith('| Ti/16')]
  assert [row.split('|')[2].strip() for row in rows] == [
    'train',
    'train',
    'infer',
    'infer',
  ]


def test_measurements_list_their_rows():
  out = run('benchmarks/gpu_measured.py', '--dry_run')
  assert [line.split(' configs/')[0] for line in out.splitlines()][:2] == [
    'B/16, no dropout',
    'S/16',
  ]


@pytest.mark.slow
@pytest.mark.long
def test_a_tiny_step_of_timm_is_measured(tmp_path):
  flags = '--timm', '--toy', f'--out={tmp_path}'
  assert run('benchmarks/gpu_measured.py', *flags).startswith('| timm vit_tiny')
  [row] = map(json.loads, (tmp_path / 'timm.jsonl').read_text().splitlines())
  assert row['batch_size'] == 2 and row['step_seconds'] > 0


@pytest.mark.slow
@pytest.mark.long
def test_a_tiny_step_is_measured_and_modelled(tmp_path):
  """Each instruction of the program has a modelled time."""
  out = run('benchmarks/gpu_measured.py', '--toy', f'--out={tmp_path}')
  assert out.splitlines()[-1].startswith('| toy | 2 |')
  [row] = map(json.loads, (tmp_path / 'rows.jsonl').read_text().splitlines())
  with open(tmp_path / 'toy.csv', newline='') as file:
    modelled = [float(line['modelled_us']) for line in csv.DictReader(file)]
  assert math.isclose(sum(modelled) / 1e6, row['modelled_seconds'])
  assert row['step_seconds'] > 0


@pytest.mark.slow
@pytest.mark.long
def test_input_compares_readers(tmp_path):
  """The table has rows of this project and of tf.data."""
  for i in range(8):
    write(tmp_path / 'ab'[i % 2] / f'{i}.jpg', i)
  out = run(
    'benchmarks/input.py',
    f'--images={tmp_path}',
    '--records=64',
    '--measured=32',
    '--batch=16',
    '--rounds=1',
    '--threads=1',
    '--readers=vit_jax folder,tf.data folder',
  )
  assert 'vit_jax folder' in out and 'tf.data folder' in out


@pytest.mark.slow
@pytest.mark.long
def test_preprocessing_runs(tmp_path):
  write(tmp_path / 'a' / '1.png', 1)
  assert run('-m', 'benchmarks.preprocessing', str(tmp_path))


@pytest.mark.parametrize('name', ['plan_all', 'plan_configs', 'gpu_plans'])
def test_plan_scripts_list_their_configs(name):
  """Only the lists are printed, because planning takes minutes."""
  assert 'configs/' in run(f'benchmarks/{name}.py', '--list')


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(
  importlib.util.find_spec('libtpu') is None, reason='needs libtpu'
)
def test_kernels_are_compared():
  """There is a row for each size; CI tests three of them.

  They are a short sequence, one in tiles, and the windows of Swin.
  """
  few = ((50, 1024, 16), (1025, 1024, 16), (49, 512, 16))
  sizes = kernels.SIZES if ALL else few
  code = f'from benchmarks import kernels; kernels.SIZES = {sizes}'
  out = run('-c', f'{code}; kernels.main()', 'v3:2x2')
  rows = [line for line in out.splitlines() if line.startswith('| v3 |')]
  cells = [tuple(cell.strip() for cell in row.split('|')[2:4]) for row in rows]
  assert cells == [(str(w // heads), str(tokens)) for tokens, w, heads in sizes]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(
  not environment.has_gpu_compiler(), reason='needs the extra plan-gpu'
)
def test_gpu_flags_run():
  words = ['benchmarks/gpu_flags.py', '--config=configs/quickstart.py']
  words += ['--topology=h100:1x1', '--batch_size=8', '--flag=none']
  assert '| none |' in run(*words)


@pytest.mark.skipif(
  environment.has_gpu_compiler(), reason='has the extra plan-gpu'
)
@pytest.mark.parametrize('name', ['gpu_flags', 'gpu_plans'])
def test_a_missing_compiler_is_one_message(name):
  _, err = cli.run([sys.executable, f'benchmarks/{name}.py'], code=2)
  assert environment.GPU_EXTRA in err and 'Traceback' not in err


@pytest.mark.parametrize(
  'name', ['scaling', 'compile_time', 'gpu_flags', 'inference']
)
def test_slow_scripts_can_be_imported(name):
  """Their imports and flags are checked; tests/plan tests what they compile."""
  out = run('-c', f'import runpy; runpy.run_path("benchmarks/{name}.py")')
  assert out == ''


@pytest.mark.parametrize(
  ('memory', 'largest'),
  [
    (89, 0),
    (90, 1),
    (539, 8),
    (540, 16),
    (850, 32),
    (9_000, 256),
    (10**9, 2**14),
  ],
)
def test_the_largest_batch_of_inference(memory, largest, monkeypatch):
  """It is the largest power of two that fits, in a few compilations.

  A program that needs up to 1.2 times the memory is reduced until it fits: 32
  images need 1,020 bytes and fit into 850.
  """
  inference = runpy.run_path(f'{cli.ROOT}/benchmarks/inference.py')
  tried = []

  def predict(config, target, per_core):
    tried.append(per_core)
    assert config.image_size == (210, 210)  # a multiple of H/14's patches
    peak = 60 + 30 * per_core
    if per_core == 32 and memory < peak <= 1.2 * memory:
      peak = memory
    if peak > memory:
      return None
    return {'rate': 7 - abs(per_core - 16), 'peak': peak, 'weights': 40}

  monkeypatch.setitem(inference['row'].__globals__, 'predict', predict)
  target = types.SimpleNamespace(name='v3:1x1', hbm_bytes=memory)
  row = inference['row']('ViT-H/14', 223, target)
  assert row['largest_batch'] == largest
  assert len(tried) == len({*tried}) <= 5
  rates = {size: 7 - abs(size - 16) for size in tried if size <= largest}
  assert row['at_batch'] == max(rates, key=rates.get, default=0)
  text = inference['table']([row | {'images_per_second': 1234}])
  date = datetime.date.today().isoformat()
  assert text.splitlines()[-1] == f'| ViT-H/14 | 1,234; {largest:,} | {date} |'


def test_inference_replaces_rows_of_earlier_days(tmp_path, monkeypatch, capsys):
  """With --again; a row of the table has the date of its oldest cell."""
  inference = runpy.run_path(f'{cli.ROOT}/benchmarks/inference.py')
  variables = inference['main'].__globals__
  today = datetime.date.today().isoformat()
  path = tmp_path / 'rows.csv'
  rows = [('a', 64, today), ('a', 128, '2020-01-02'), ('b', 64, '2020-01-01')]
  head = ','.join(inference['COLUMNS'])
  lines = [f'chip,{name},{size},7,8,8,1,{date}' for name, size, date in rows]
  path.write_text('\n'.join([head, *lines]) + '\n')

  def computed(name, pixels, target):
    values = (target.name, name, pixels, 9, 8, 8, 1, today)
    return dict(zip(inference['COLUMNS'], values, strict=True))

  def run(*flags):
    words = ['inference.py', f'--csv={path}', '--models=a', '--sizes=64,128']
    monkeypatch.setattr(sys, 'argv', [*words, *flags])
    inference['main']()
    return capsys.readouterr().out.splitlines()[-2:]

  found = types.SimpleNamespace(name='chip', compiles=True)
  monkeypatch.setattr(topology, 'find', lambda name: found)
  monkeypatch.setitem(variables, 'row', computed)
  other = '| b | 7; 8 |  | 2020-01-01 |'
  assert run() == ['| a | 7; 8 | 7; 8 | 2020-01-02 |', other]
  assert run('--again') == [f'| a | 7; 8 | 9; 8 | {today} |', other]


def test_plain_flax_is_compared():
  """Ratios below 1 mean that this project needs less."""
  plans = runpy.run_path(f'{cli.ROOT}/benchmarks/gpu_plans.py')
  plain = {'peak_bytes_per_device': 4e9, 'predicted_step_seconds': 0.1}
  ours = {'peak_bytes_per_device': 3e9, 'predicted_step_seconds': 0.06}
  row = plans['compared'](
    plans['Row']('B/16', 'h100:1x1', ''),
    plain,
    ours | {'images_per_device': 256.0},
  )
  assert row == (
    '| B/16 | h100:1x1 | 256 | 4.0, 3.0 | 0.75 | 100.0, 60.0 | 0.60 |'
  )


def test_scaling_is_relative_to_the_first_row_that_fits():
  """A slice that does not fit has no predicted time."""
  scaling = runpy.run_path(f'{cli.ROOT}/benchmarks/scaling.py')
  row = {'batch_size': 64, 'micro_batches': 1, 'peak_bytes_per_device': 2**30}
  fits = {'predicted_step_seconds': 1.0, 'exposed_collective_seconds': 0.5}
  rows = [
    row | {'cores': 8, 'fits': False, 'predicted_step_seconds': None},
    *(
      row
      | fits
      | {
        'cores': cores,
        'fits': True,
        'predicted_images_per_second': rate,
        'collectives': {'all-reduce': 3},
      }
      for cores, rate in ((16, 160), (32, 240))
    ),
  ]
  first, *others = scaling['lines'](rows, '64 in total')
  assert first == '| 64 in total | 8 | 64 | 1 | no | 1.00 |  |  |  |  |  |'
  for line, efficiency in zip(others, ('100.0', '75.0'), strict=True):
    cells = [cell.strip() for cell in line[1:-1].split('|')]
    found = dict(zip(scaling['COLUMNS'], cells, strict=True))
    assert (found['efficiency %'], found['step ms']) == (efficiency, '1,000.0')


# Logs a loss every 50 steps, and stops at SIGTERM like a training.
_TRAINING = """
import json, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit({code}))
workdir = pathlib.Path(sys.argv[-1].partition('=')[2])
workdir.mkdir()
file = open(workdir / 'metrics.jsonl', 'w')
for step in range(50, {last} + 1, 50):
  print(json.dumps(dict(step=step, loss=step / 100)), file=file)
  print(json.dumps({{'step': step, 'test/loss': 9}}), file=file, flush=True)
  time.sleep(0.7 * (step == 50))
print('{{"step": 999, "lo', end='', file=file, flush=True)
time.sleep({wait})
"""


@pytest.mark.parametrize(
  ('last', 'code', 'wait', 'error'),
  [(200, 42, 60, ''), (200, 1, 60, 'code 1'), (150, 42, 0, 'code 0')],
)
def test_expected_losses_stops_a_run(
  tmp_path, monkeypatch, last, code, wait, error
):
  """It is stopped once the last step is logged; other ends are errors."""
  script = _TRAINING.format(last=last, code=code, wait=wait)

  def command(flags):
    assert flags == ('--config=x', f'--workdir={tmp_path}/w')
    return [sys.executable, '-c', script, *flags]

  monkeypatch.setattr(expected_losses, 'command', command)
  with pytest.raises(SystemExit, match=error) if error else nullcontext():
    expected_losses.train(tmp_path / 'w', ('--config=x',), 200)
  if last == 200:  # nothing is started again
    monkeypatch.delattr(expected_losses, 'command')
    expected_losses.train(tmp_path / 'w', ('--config=x',), 200)
  logged = expected_losses.losses(tmp_path / 'w')
  assert logged == {step: step / 100 for step in range(50, last + 1, 50)}


def test_expected_losses_of_the_faq():
  """The table is that of the file, which has three seeds of every row."""
  found = expected_losses.read(cli.ROOT / 'benchmarks/expected_losses.csv')
  steps = sorted({step for _, _, step in found})
  assert steps[:2] == [50, 100]
  assert set(found) == {
    (name, seed, step)
    for name in expected_losses.ROWS
    for seed in range(3)
    for step in steps
  }
  table = expected_losses.table(found)
  values = [found['Swin', seed, 100] for seed in range(3)]
  assert f'{np.mean(values):.3f} ± {np.std(values, ddof=1):.3f}' in table
  assert table in (cli.ROOT / 'docs/faq.md').read_text()
  # Nothing is started, because all runs are in the file.
  assert run('benchmarks/expected_losses.py').strip() == table


@pytest.mark.slow
@pytest.mark.long
def test_tokens_of_a_tiny_model_equal_those_of_transformers(tmp_path):
  pytest.importorskip('torch')
  peers.import_timm()
  from transformers import Dinov2Config, Dinov2Model

  sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
  config = Dinov2Config(**real_weights.ARCHITECTURE | sizes)
  Dinov2Model(config).save_pretrained(tmp_path)
  preprocessing = json.dumps(real_weights.PREPROCESSING)
  (tmp_path / 'preprocessor_config.json').write_text(preprocessing)
  out = run('-m', 'benchmarks.real_weights', 'tokens', str(tmp_path))
  rows = [line.split('|') for line in out.splitlines()[2:]]
  assert [row[1].strip() for row in rows] == ['518x518', '224x224', '112x168']
  assert all(float(row[3]) < 1e-5 for row in rows)
