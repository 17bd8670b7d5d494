"""Tests of the messages that answer mistyped commands, flags and values.

They run in the test's process: the flags and the body of a command, without its
exit code, which tests/commands/test_commands.py tests.
"""

import importlib
import subprocess
import sys

import pytest
from absl import flags
from tiny_vit import save_classifier

from tests.command_line import message_of, own_flags
from vit_jax.cli import help, process
from vit_jax.processes import interruption, machine

QUICK = ('train', '--config=configs/quickstart.py')
TUNE = ('finetune', '--config=configs/finetune_imagenet.py')
PLAN = ('plan.main', '--config=configs/l16_i21k.py')
PREPARE = 'prepare.__main__'

# (command and arguments, words that the message must contain). Other messages
# are in tests/commands/test_advice.py and tests/config. The working directory
# contains tiny.npz, text.npz, another/config.json and an empty directory
# photos/cat.
ROWS = [
  (('train', '--config=configs/sweeps/digits.py'), '-m vit_jax.sweep --config'),
  (('train', '--config=configs/vit.py:variant=B16'), "'variant=B/16"),
  (('train', '--config=configs/folder.py:path=photos'), 'no image'),
  (('train', '--config=configs/finetune.py'), '-m vit_jax.finetune'),
  ((*QUICK, '--config.schedule.base_lr=1e-3x'), 'give a number'),
  ((*QUICK, '--config.source.dataset=imagenet21k'), 'prepare imagenet21k'),
  ((*QUICK, '--branch_from='), '--branch_from is empty: give'),
  ((*QUICK, '--config.source.data_dir=text.npz'), 'cannot be written to'),
  ((*QUICK, '--workdir=another'), 'run of this program'),
  ((*QUICK, '--workdir=/proc/none'), 'path or permissions'),
  (TUNE, 'init_from=PATH is missing'),
  ((*TUNE, '--config.init_from=tiny.npz@3'), 'omit --step=3, or the @3'),
  (('convert', 'tiny.npz'), 'usage'),
  (('evaluate', '--checkpoint=photo'), 'Did you mean photos'),
  (('export', '--checkpoint=tiny.npz', '--out=o', '--to=tf'), 'savedmodel'),
  (('export', '--checkpoint=tiny.npz', '--out=x.ONNX'), 'x.ONNX ends like a'),
  (('analyze', '--checkpoint=tiny.npz', '--out=a.pdf'), '--format=pdf'),
  (('analyze', 'report', 'nowhere'), 'give the workdir of a run'),
  (('analyze', 'curves', 'photos'), 'usage'),
  (('preview', *QUICK[1:], '--out=none/grid.png'), 'existing directory'),
  (PLAN, '--topology is missing'),
  ((*PLAN, '--topology=v3:4x4', '--slices=0'), 'at least 1'),
  ((PREPARE, 'cifar11', '--data_dir=d'), "did you mean 'cifar10"),
  ((PREPARE, 'imagenet21k', '--data_dir=d'), 'fall11_whole.tar'),
]


@pytest.fixture(scope='module')
def place(tmp_path_factory):
  """Creates the working directory of the rows below."""
  root = tmp_path_factory.mktemp('place')
  (root / 'photos' / 'cat').mkdir(parents=True)
  (root / 'another').mkdir()
  (root / 'another' / 'config.json').write_text('{"model_type": "vit"}')
  (root / 'text.npz').write_text('no arrays')
  save_classifier(str(root / 'tiny.npz'))
  return root


@pytest.mark.parametrize(
  ('typed', 'answer'), ROWS, ids=[' '.join(row[0])[:60] for row in ROWS]
)
def test_messages_of_wrong_commands(place, monkeypatch, typed, answer):
  """Each has what is allowed, the nearest spelling, or the right command."""
  monkeypatch.chdir(place)
  monkeypatch.setenv('TFDS_DATA_DIR', str(place / 'tfds'))
  message = message_of(monkeypatch, *typed)
  assert answer in message and len(message) < 1_200
  assert message.count('did you mean') <= 1


def test_a_mistyped_command_lists_the_commands(capsys, monkeypatch):
  """Python itself would only say that the module does not exist."""
  monkeypatch.setattr(interruption.HANDLER, 'install', lambda: None)
  for words in (
    '-m vit_jax.train --config=x',
    '-m vit_jax',
    '-m pytest',
    'a.py',
  ):
    help.begin(['python', *words.split()])
  with pytest.raises(SystemExit) as ended:
    help.begin(['python', '-X', 'dev', '-m', 'vit_jax.trian'])
  assert ended.value.code == 2
  assert "did you mean 'train'?" in capsys.readouterr().err


# Windows has neither these modules nor SIGHUP.
# shutil is imported first, because it needs a module of the real Windows.
WINDOWS = """
import runpy, shutil, signal, sys
sys.modules |= {'fcntl': None, 'resource': None}
sys.platform, sys.orig_argv = 'win32', ['python', '-m', 'vit_jax.train']
del signal.SIGHUP
runpy.run_module('vit_jax.train', run_name='__main__')
"""


def test_windows_is_refused():
  """There is one message, before anything is imported that needs Unix."""
  command = [sys.executable, '-c', WINDOWS]
  done = subprocess.run(command, capture_output=True, text=True)
  assert done.returncode == 2 and 'WSL' in done.stderr
  assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize('typed', ['train', 'trian'])
def test_a_space_instead_of_a_dot_is_refused(typed, capsys):
  """`python -m vit_jax train …` must not exit with 0."""
  with pytest.raises(SystemExit) as ended:
    help.refuse_arguments([typed, '--config=x'])
  assert ended.value.code == 2
  assert "with a dot; did you mean 'train'?" in capsys.readouterr().err


def test_all_commands_are_described():
  """The list has one line per command, with an example."""
  described = help.descriptions()
  assert {'train', 'plan', 'launch', 'configs'} <= described.keys()
  assert 'errors' not in described
  assert all('python -m vit_jax.' in line for line in described.values())


@pytest.mark.parametrize(
  ('platforms', 'devices', 'error', 'expected'),
  [
    ('tpu', 'none*', RuntimeError("Unable to initialize backend 'tpu'"), True),
    ('rocket', 'none*', RuntimeError('Unknown backend rocket'), True),
    ('', 'none*', RuntimeError('Unable to initialize backend'), False),
    ('tpu', 'none*', RuntimeError('out of memory'), False),
    ('tpu', 'none*', ValueError('Unable to initialize backend'), False),
    # Another process may hold the devices, so that a restart may succeed.
    ('tpu', 'null', RuntimeError("Unable to initialize backend 'tpu'"), False),
  ],
)
def test_missing_devices_are_a_user_error(
  monkeypatch, platforms, devices, error, expected
):
  """That is so only if JAX_PLATFORMS names them and they are what failed."""
  monkeypatch.setattr(machine, '_DEVICES', {'tpu': (devices,)})
  monkeypatch.setenv('JAX_PLATFORMS', platforms)
  assert (machine.user_error(error) is not None) == expected


@pytest.mark.parametrize('name', ['train', 'plan.main', 'evaluate'])
def test_help_prints_the_module_docstring_and_flags(name, monkeypatch):
  module = importlib.import_module(f'vit_jax.{name}')
  monkeypatch.setattr(sys, 'argv', ['program', '--help'])
  assert help.is_requested(sys.argv)
  assert not help.is_requested(['program', '--helpful'])
  with own_flags():
    getattr(module, 'define_flags', process.define_flags)()
    text = help.text(module.__doc__, flags.FLAGS)
  assert text.startswith(module.__doc__.strip())
  assert 'python -m vit_jax.' in text
  flag = {'train': '--workdir', 'evaluate': '--image_size'}
  assert flag.get(name, '--topology') in text
  assert ('--config.KEY' in text) == (name != 'evaluate')
  assert max(map(len, text.splitlines())) <= 80
