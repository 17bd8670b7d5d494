"""Tests of the command line of launch/tpu_vm.sh."""

import importlib.metadata
import pathlib
import shlex
import shutil
import subprocess

import pytest
from fake_cloud import LAUNCH, NASTY, ROOT, SLICE, UP, WORKDIR, understood
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def launch(*arguments: str, path: pathlib.Path) -> subprocess.CompletedProcess:
  """Runs tpu_vm.sh with only the programs of one directory."""
  return subprocess.run(
    [str(shutil.which('bash')), LAUNCH / 'tpu_vm.sh', *arguments],
    env={'PATH': str(path)},
    capture_output=True,
    text=True,
    timeout=60,
  )


@pytest.fixture
def bare_path(tmp_path):
  """Returns a directory that contains only `dirname` and `cat`."""
  folder = tmp_path / 'bare'
  folder.mkdir()
  for name in ('dirname', 'cat'):
    (folder / name).symlink_to(str(shutil.which(name)))
  return folder


@pytest.fixture
def dry_run(tmp_path, bare_path):
  """Returns a function that lists the commands of a dry run."""

  def run(command: str, *arguments: str) -> list[list[str]]:
    result = launch(command, '--dry_run', *arguments, path=bare_path)
    assert (result.returncode, result.stderr) == (0, '')
    return understood(result.stdout, tmp_path)

  return run


@pytest.mark.parametrize('script', sorted(p.name for p in LAUNCH.glob('*.sh')))
def test_scripts_parse(script):
  subprocess.run(['bash', '-n', LAUNCH / script], check=True)


def test_help_exits_with_0(bare_path):
  result = launch('--help', path=bare_path)
  assert result.returncode == 0
  assert 'Usage: launch/tpu_vm.sh' in result.stdout


def test_up_prints_every_step_in_order(dry_run):
  steps = dry_run(*UP, '--config=configs/quickstart.py', '--spot')
  where = ['--zone=europe-west4-a', '--project=my-project']
  assert [step[:5] if step[0] == 'gcloud' else step for step in steps] == [
    ['gcloud', 'compute', 'tpus', 'tpu-vm', 'describe'],
    ['gcloud', 'compute', 'tpus', 'tpu-vm', 'create'],
    ['gcloud', 'compute', 'tpus', 'tpu-vm', 'ssh'],  # is a job running?
    ['mkdir', '-p', 'build'],
    ['git', 'archive', '--format=tar.gz', '--output=build/vit.tar.gz', 'HEAD'],
    ['gcloud', 'compute', 'tpus', 'tpu-vm', 'scp'],
    ['gcloud', 'compute', 'tpus', 'tpu-vm', 'ssh'],  # install
    ['gcloud', 'compute', 'tpus', 'tpu-vm', 'ssh'],  # start
    ['gcloud', 'compute', 'tpus', 'tpu-vm', 'ssh'],  # follow the log
  ]
  assert steps[1][5:] == [
    'vit',
    '--accelerator-type=v3-32',
    '--version=tpu-ubuntu2204-base',
    '--spot',
    *where,
  ]
  packed = 'vit:vit_jax_code.tar.gz'
  assert steps[5][5:] == ['build/vit.tar.gz', packed, '--worker=all', *where]
  workers = [step[6] for step in steps if 'ssh' in step]
  assert workers == ['--worker=all'] * 3 + ['--worker=0']
  assert steps[7][7] == (
    '--command=TFDS_DATA_DIR=gs://bucket/tfds bash '
    'vit_jax_job/code/launch/tpu_vm_worker.sh start '
    f'--config=configs/quickstart.py --workdir={WORKDIR}'
  )


def test_create_flags_and_commit_reach_their_commands(dry_run):
  flags = ['--network=n', '--labels=a=b c']
  given = [f'--create_flag={flag}' for flag in flags]
  config = '--config=configs/quickstart.py'
  steps = dry_run(*UP, config, *given, '--commit=abc123')
  (create,) = [step for step in steps if 'create' in step]
  assert create[8:10] == flags
  assert [step for step in steps if set(flags) & set(step)] == [create]
  (archive,) = [step for step in steps if step[:2] == ['git', 'archive']]
  assert archive[-1] == 'abc123'


@pytest.mark.parametrize('text', NASTY)
def test_no_argument_is_read_as_shell_code(dry_run, text):
  start = dry_run(
    'train',
    *SLICE,
    '--config=configs/quickstart.py',
    '--data_dir',
    text,
    '--workdir',
    f'gs://bucket/{text}',
    '--',
    f'--config.x={text}',
    text,
    '',
  )[-1]
  remote = start[-3].removeprefix('--command=')
  assert shlex.split(remote) == [
    f'TFDS_DATA_DIR={text}',
    'bash',
    'vit_jax_job/code/launch/tpu_vm_worker.sh',
    'start',
    '--config=configs/quickstart.py',
    f'--workdir=gs://bucket/{text}',
    f'--config.x={text}',
    text,
    '',
  ]


@pytest.mark.parametrize(
  'arguments, message',
  [
    ([], "the command is ''; allowed: up, create"),
    (['fly', *SLICE], "the command is 'fly'; allowed: up, create"),
    (['log', *SLICE[1:]], 'needs --name'),
    (['log', SLICE[0], SLICE[2]], 'needs --zone'),
    (['log', *SLICE[:2]], 'needs --project'),
    (['create', *SLICE], 'add --type=v3-32'),
    (['train', *SLICE], 'add --workdir=gs://BUCKET/DIRECTORY'),
    (['up', *SLICE, '--type=v3-8'], 'needs --workdir'),
    (['log', '--name'], '--name has no value'),
    (['log', '--name='], '--name has no value'),
    (['log', '--name', '--zone=z'], '--name has no value'),
    (['log', *SLICE, '--steps=3'], "got '--steps=3'; allowed: --name"),
    (['log', *SLICE, 'extra'], "got 'extra'; allowed: --name"),
    (['log', *SLICE, '--name=../x'], "--name is '../x'; allowed"),
    (['create', *SLICE, '--type=h100'], "--type is 'h100'"),
    (['train', *SLICE, '--workdir=/tmp/x'], 'it must be on gs://'),
    (
      ['train', *SLICE, f'--workdir={WORKDIR}', '--config=configs/none.py'],
      "'configs/none.py'",
    ),
    (['up', *UP[1:], '--commit=;x'], "--commit is ';x'"),
    (['up', *UP[1:], '--create_flag='], "got '--create_flag='"),
    (['log', *SLICE], 'gcloud is not installed'),
  ],
)
def test_user_errors_exit_with_2_and_one_message(bare_path, arguments, message):
  result = launch(*arguments, path=bare_path)
  assert (result.returncode, result.stdout) == (2, '')
  assert result.stderr.startswith('error: ')
  assert message in result.stderr


def test_delete_is_quiet(dry_run):
  (command,) = dry_run('delete', *SLICE)
  assert command[4:7] == ['delete', 'vit', '--quiet']


def test_constraints_allow_what_jax_needs_on_a_tpu():
  """Otherwise the installation fails, but only on a slice."""
  lines = (ROOT / 'constraints.txt').read_text().splitlines()
  pins = [Requirement(line) for line in lines if line and line[0] not in '#-']
  versions = {
    canonicalize_name(pin.name): next(iter(pin.specifier)).version
    for pin in pins
  }
  if importlib.metadata.version('jax') != versions['jax']:
    pytest.skip('another version of JAX is installed')
  for text in importlib.metadata.requires('jax') or []:
    needed = Requirement(text)
    version = versions.get(canonicalize_name(needed.name))
    on_tpu = not needed.marker or needed.marker.evaluate({'extra': 'tpu'})
    if on_tpu and version:
      assert needed.specifier.contains(version, prereleases=True), text


def test_unavailable_packages_give_one_message(tmp_path):
  """Prints the reason of pip and the remedy, also when it is run again."""
  python = tmp_path / 'python'
  python.write_text(
    '#!/usr/bin/env bash\n'
    'case "$*" in\n'
    '  *"-m venv"*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python";;\n'
    '  *"pip install"*) echo "ERROR: no matching distribution" >&2; exit 1;;\n'
    'esac\n'
  )
  python.chmod(0o755)
  venv = tmp_path / 'venv'
  for _ in range(2):
    ran = subprocess.run(
      ['bash', LAUNCH / 'local.sh'],
      env={'PATH': '/usr/bin:/bin', 'PYTHON': str(python)}
      | {'VIT_JAX_VENV': str(venv), 'VIT_JAX_RUNS': str(tmp_path / 'runs')},
      capture_output=True,
      text=True,
      timeout=60,
    )
    assert ran.returncode == 2, ran.stderr
    reason, message = ran.stderr.splitlines()
    assert reason == 'ERROR: no matching distribution'
    assert 'PIP_INDEX_URL' in message
  assert not (tmp_path / 'runs').exists()
