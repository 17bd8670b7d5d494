"""Tests of the list of configs, in a checkout and installed from a wheel."""

import json
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

from vit_jax import configs
from vit_jax.config import loading, predicted
from vit_jax.errors import UserError

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
def test_all_configs_are_listed(capsys):
  """The list has each path, first line, and table of published results."""
  configs.main([])
  out = capsys.readouterr().out
  for file in (ROOT / 'configs').rglob('*.py'):
    assert str(file.relative_to(ROOT)) in out
  assert 'configs/vit.py  Table 3, every ViT and hybrid row' in out
  assert '| L/16    | jft  | 14     | 87.12; 87.76 (Table 2)| 0.68k' in out


@pytest.mark.parametrize('name', ['deit', 'configs/deit.py:model=B'])
def test_the_header_of_one_config_is_printed(capsys, name):
  configs.main([name])
  out = capsys.readouterr().out
  assert out.startswith('configs/deit.py\n\nDeiT on ImageNet-1k')
  assert 'Differences: the warm-up starts at 0' in out
  with pytest.raises(UserError, match="no config 'diet'; did you mean 'deit'"):
    configs.main(['diet'])


def test_shipped_configs_are_found_in_any_directory(tmp_path, monkeypatch):
  """A file of the user with the same path comes first."""
  monkeypatch.chdir(tmp_path)
  assert loading.load('configs/quickstart.py').batch_size == 128
  with pytest.raises(UserError, match="did you mean 'configs/quickstart.py'"):
    loading.load('configs/quickstrat.py')
  own = tmp_path / 'configs/quickstart.py'
  own.parent.mkdir()
  text = (ROOT / 'configs/quickstart.py').read_text()
  own.write_text(text.replace('batch_size = 128', 'batch_size = 64'))
  assert loading.load('configs/quickstart.py').batch_size == 64
  assert loading.find('elsewhere/x.py') == pathlib.Path('elsewhere/x.py')


def test_predicted_costs_are_shown(capsys, monkeypatch, tmp_path):
  """A prediction for a config that has changed since is marked."""
  monkeypatch.setattr(predicted, 'NAME', str(tmp_path / 'predicted.json'))
  assert predicted.read() == []
  name = 'configs/deit.py:model=S'
  known = predicted.fingerprint(loading.load(name))
  row = dict(config=name, topology='v3:4x4', core_days=1234.5, mfu=0.456)
  row |= dict(images_per_second=9876.0, gib=7.25, hash=known)
  row |= dict(date='2026-01-02', compiler='libtpu 0.0.1')
  lost = row | {'config': 'configs/deit.py:model=X'}
  rows = [row, row | {'hash': 'other'}, row | {'core_days': None}, lost]
  (tmp_path / 'predicted.json').write_text(json.dumps(rows))
  configs.main(['deit'])
  shown = capsys.readouterr().out.partition('predicted:\n')[2].splitlines()
  current, changed, too_large, unknown = shown
  for part in ('1,234 core-days', '46%', '9,876 images/s', '7.2 GiB', 'v3:4x4'):
    assert part in current
  assert 'model=S' in changed and 'changed' in changed
  assert 'does not fit' in too_large
  assert 'model=X' in unknown and 'changed' in unknown
  configs.main([])
  out = capsys.readouterr().out
  assert out.count('predicted:') == 1 and '1,234 core-days' in out


def test_predictions_depend_on_the_compiled_step():
  """They do not depend on data, logging and evaluation."""

  def fingerprint(**keys):
    config = loading.load('configs/deit.py:model=S')
    config.update_from_flattened_dict(keys)
    return predicted.fingerprint(config)

  other = {'log.every': '7 steps', 'seed': 3, 'augment.min_area': 0.5}
  assert fingerprint(**other, **{'model.pixels': 'symmetric'}) == fingerprint()
  for key in ('batch_size', 'train.num_examples'):
    assert fingerprint(**{key: 2048}) != fingerprint()


@pytest.mark.slow
def test_shipped_predictions_are_current():
  """If this fails, plan the row again with benchmarks/plan_configs.py."""
  rows = predicted.read()
  assert rows
  for row in rows:
    assert predicted.is_current(row), (row['config'], row['topology'])
    assert {'hash', 'commit', 'jax', 'compiler', 'date'} <= row.keys()


@pytest.mark.long
def test_a_wheel_contains_configs_and_launch_scripts(tmp_path):
  """`vit_jax.configs` and the configs work without a checkout."""
  tree = tmp_path / 'tree'  # setuptools writes build files into the tree
  for name in ('vit_jax', 'configs', 'launch'):
    shutil.copytree(ROOT / name, tree / name)
  for file in ('setup.py', 'README.md', 'pyproject.toml'):
    shutil.copy(ROOT / file, tree)
  for file in ROOT.glob('requirements*.txt'):
    shutil.copy(file, tree)
  options = ['--no-deps', '-q', '--no-build-isolation', '-w', tmp_path, tree]
  build = [sys.executable, '-m', 'pip', 'wheel', *options]
  made = subprocess.run(build, capture_output=True, text=True)
  assert made.returncode == 0, made.stderr
  (wheel,) = tmp_path.glob('*.whl')
  target = tmp_path / 'site'
  zipfile.ZipFile(wheel).extractall(target)
  tables = (ROOT / 'vit_jax').rglob('*.csv')
  for file in (
    'vit_jax/shipped/launch/jobset.template',
    'vit_jax/shipped/configs/predicted.json',
    'vit_jax/analysis/report.html',
    'vit_jax/plan/gpu_target.txt',
    'vit_jax/prepare/listing.txt',
    *(table.relative_to(ROOT) for table in tables),
  ):
    assert (target / file).is_file(), file
  code = (
    'import vit_jax; from vit_jax.config import loading; '
    'print(vit_jax.__file__, loading.load("configs/vit.py").total)'
  )
  env = {'PYTHONPATH': str(target), 'JAX_PLATFORMS': 'cpu', 'HOME': '/tmp'}
  options = dict(cwd=tmp_path, env=env, capture_output=True, text=True)
  ran = subprocess.run([sys.executable, '-c', code], **options)
  assert ran.returncode == 0, ran.stderr
  assert ran.stdout.split() == [f'{target}/vit_jax/__init__.py', '90', 'epochs']
