"""Tests that every script in benchmarks/ runs, at its smallest size."""

import csv
import importlib.util
import json
import math
import subprocess
import sys

import cv2
import numpy as np
import pytest

from benchmarks import expected_losses, peers, published, real_weights
from tests import cli
from vit_jax.arrays.devices import GPUS, TPUS
from vit_jax.config import loading
from vit_jax.plan import compile


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


@pytest.mark.long
@pytest.mark.parametrize(
  'command, rows',
  [
    (
      'benchmarks/step.py --variants=Ti/16 --batch=2 --steps=1 --rounds=1',
      ['| Ti/16 | train | 2 | flax', '| Ti/16 | infer | 2 | flax'],
    ),
    (
      'benchmarks/input.py --images=PHOTOS --records=64 --measured=32 '
      '--batch=16 --rounds=1 --threads=1',
      ['vit_jax folder', 'tf.data folder'],
    ),
    ('-m benchmarks.preprocessing PHOTOS', ['|']),
  ],
)
def test_small_measurements_print_tables(command, rows, tmp_path):
  for i in range(8):
    write(tmp_path / 'ab'[i % 2] / f'{i}.jpg', i)
  words = command.replace('PHOTOS', str(tmp_path)).split()
  if 'benchmarks/input.py' in words:
    words.append('--readers=vit_jax folder,tf.data folder')
  out = run(*words)
  assert all(row in out for row in rows)


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


@pytest.mark.parametrize(
  'script, flags',
  [
    ('plan_all', '--list'),
    ('plan_configs', '--list'),
    ('gpu_plans', '--list'),
    ('gpu_measured', '--dry_run'),
  ],
)
def test_scripts_list_their_configs(script, flags):
  """Only the lists are printed, because planning takes minutes."""
  assert 'configs/' in run(f'benchmarks/{script}.py', flags)


@pytest.mark.long
@pytest.mark.skipif(
  importlib.util.find_spec('libtpu') is None, reason='needs libtpu'
)
def test_kernels_are_compared():
  """There is a row for each size: few tokens, tiles, and windows of Swin."""
  sizes = ((50, 1024, 16), (1025, 1024, 16), (49, 512, 16))
  code = f'from benchmarks import kernels; kernels.SIZES = {sizes}'
  out = run('-c', f'{code}; kernels.main()', 'v3:2x2')
  rows = [line for line in out.splitlines() if line.startswith('| v3 |')]
  cells = [tuple(cell.strip() for cell in row.split('|')[2:4]) for row in rows]
  assert cells == [(str(w // heads), str(tokens)) for tokens, w, heads in sizes]


@pytest.mark.parametrize(
  'name', ['scaling', 'compile_time', 'gpu_flags', 'inference']
)
def test_slow_scripts_can_be_imported(name):
  """Their imports and flags are checked; tests/plan tests what they compile."""
  out = run('-c', f'import runpy; runpy.run_path("benchmarks/{name}.py")')
  assert out == ''


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


PUBLISHED = published.read()


def test_rows_name_known_devices_and_their_sources():
  assert len(PUBLISHED) >= 30
  assert len({published.key(row) for row in PUBLISHED}) == len(PUBLISHED)
  for row in PUBLISHED:
    assert row['device'].partition(':')[0] in {**GPUS, **TPUS}, row
    assert row['source'] and float(row['images_per_s']) > 0, row


@pytest.mark.parametrize(
  'row',
  PUBLISHED[::4],
  ids=[' '.join(published.key(row)) for row in PUBLISHED[::4]],
)
def test_configs_of_rows_are_valid(row):
  config = compile.changed(
    loading.load(row['config']), **published.changes(row)
  )
  assert config.batch_size == int(row['batch'])
