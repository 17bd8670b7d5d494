"""Flags of `launch`, and the message for each wrong one."""

import shutil
import subprocess
import sys

import launch_jobs
import pytest
from absl import flags

from vit_jax.errors import UserError
from vit_jax.launch import __main__ as command
from vit_jax.launch import clusters, job

CLOUD = ['--zone=z', '--project=p']
GS = '--workdir=gs://bucket/run'
TPU_VM = ['--target=tpu-vm', '--topology=v3:4x4', GS, *CLOUD]
GKE = ['--target=gke', '--topology=v6e:4x4', GS, '--image=host/path/vit_jax']
SLURM = ['--target=slurm', '--topology=h100:4x8', '--workdir=/shared/run']


@pytest.fixture
def checkout(tmp_path):
  """Returns a checkout with a committed and an uncommitted config."""
  for name in ('configs/quickstart.py', 'launch/tpu_vm.sh'):
    (tmp_path / name).parent.mkdir()
    shutil.copy(launch_jobs.ROOT / name, tmp_path / name)
  git = ['git', '-c', 'user.name=a', '-c', 'user.email=a@example.com']
  commit = ['commit', '--quiet', '--no-verify', '--no-gpg-sign', '--message=x']
  for words in (['init', '--quiet'], ['add', '.'], commit):
    subprocess.run([*git, *words], cwd=tmp_path, check=True)
  name = tmp_path / 'configs/uncommitted.py'
  shutil.copy(tmp_path / 'configs/quickstart.py', name)
  return tmp_path


@pytest.fixture
def job_of(checkout, monkeypatch):
  """Returns a function from arguments to a job; removes its flags later."""
  before = set(flags.FLAGS)
  monkeypatch.chdir(checkout)

  def parse(*arguments):
    argv = ['launch', *arguments]
    if not any(word.startswith('--config=') for word in arguments):
      argv.insert(1, '--config=configs/quickstart.py')
    monkeypatch.setattr(sys, 'argv', argv)
    command.define_flags()
    rest = flags.FLAGS(sys.argv)[1:]
    return command.job_of(flags.FLAGS, tuple(rest), checkout)

  yield parse
  flags.FLAGS.unparse_flags()
  flags.FLAGS.remove_flag_values([f for f in flags.FLAGS if f not in before])


def test_flags_become_a_job(job_of, checkout):
  made = job_of(
    '--config.batch_size',
    '64',
    *GKE,
    '--slices=2',
    '--spot',
    '--config.checkpoint.best=None',
    '--',
    '--profile=10:15',
  )
  head = ['git', 'rev-parse', 'HEAD']
  commit = subprocess.check_output(head, cwd=checkout, text=True).strip()
  assert made == job.Job(
    target='gke',
    name='quickstart',
    commit=commit,
    config='configs/quickstart.py',
    workdir='gs://bucket/run',
    topology=clusters.tpu('v6e:4x4'),
    overrides=('--config.batch_size=64', '--config.checkpoint.best=None'),
    trainer_flags=('--profile=10:15',),
    slices=2,
    spot=True,
    image='host/path/vit_jax',
  )


@pytest.mark.parametrize(
  'arguments, message',
  [
    ([], '--target is not given; allowed: gke, queued, slurm, tpu-vm'),
    (['--target=tpuvm'], "'tpuvm'; did you mean 'tpu-vm'"),
    (['--target=slrum'], "did you mean 'slurm'"),
    (TPU_VM[:-1], 'add --project='),
    (['--target=gke', *TPU_VM[1:3]], 'add --image=europe-docker.pkg.dev/'),
    ([TPU_VM[0], *TPU_VM[2:]], 'add --topology=v3:4x4'),
    ([SLURM[0], *SLURM[2:]], 'add --topology=h100:4x8'),
    ([*TPU_VM[:2], *CLOUD], 'add --workdir=gs://BUCKET/DIRECTORY'),
    ([*SLURM, '--zone=z'], '--zone has no effect with --target=slurm'),
    ([*TPU_VM, '--slices=2'], '--slices has no effect with --target=tpu-vm'),
    ([*GKE, '--partition=p'], 'allowed: data_dir, image, max_restarts, '),
    ([*TPU_VM, 'extra'], "'extra'"),
    ([*TPU_VM, '--name=../x'], "--name is '../x'; allowed: a lower-case"),
    ([*TPU_VM, '--name=' + 'x' * 41], 'at most 40'),
    ([*TPU_VM, '--max_restarts=-1'], '--max_restarts is -1; it must be at'),
    ([*GKE, '--slices=0'], '--slices is 0; it must be at least 1'),
    ([*TPU_VM, '--topology=v3:44'], "did you mean 'v3:4x4'? allowed: v3:"),
    ([*TPU_VM, '--topology=v9:4x4'], "is 'v9:4x4'; did you mean 'v"),
    ([*TPU_VM, '--topology=h100:4x8'], 'Versions: v2, v3, v4'),
    (
      [*TPU_VM, '--topology=tpu7x:2x2x1'],
      'tpu7x:2x2x1, which is not offered as a TPU VM',
    ),
    ([*GKE, '--topology=v2:4x4'], 'GKE does not offer v2'),
    (
      [*GKE, '--topology=v3:4x4', '--slices=2'],
      '--slices is 2 and --topology is v3:4x4',
    ),
    ([*SLURM, '--topology=h10:4x8'], "KIND is 'h10'; did you mean 'h100'?"),
    ([*SLURM, '--topology=h100:4'], 'give h100:NODESxGPUS'),
    ([*SLURM, '--workdir=runs/x'], "--workdir is 'runs/x'"),
    ([*SLURM, '--data_dir=data'], "--data_dir is 'data'; it must be a path"),
    (
      [*GKE, '--workdir=/tmp/x'],
      "--workdir is '/tmp/x'; it must be a path on gs://",
    ),
    ([*GKE, '--image=vit_jax'], '--image is'),
    ([*GKE, '--image=host/vit_jax:tag;x'], '--image is'),
    ([*GKE, '--service_account=A B'], "--service_account is 'A B'"),
    ([*SLURM, '--partition=a b'], "--partition is 'a b'"),
    ([*SLURM, '--time_limit=a day'], 'such as 2-00:00:00'),
    (
      [*TPU_VM, '--config=configs/uncommitted.py'],
      "'configs/uncommitted.py', which is not in",
    ),
    ([*TPU_VM, '--config.batch_sice=3'], "did you mean 'batch_size'"),
  ],
)
def test_errors_state_the_value_and_what_is_allowed(job_of, arguments, message):
  with pytest.raises(UserError) as caught:
    job_of(*arguments)
  assert message in str(caught.value)


def test_a_config_outside_of_the_checkout_is_refused(job_of, tmp_path):
  with pytest.raises(UserError, match='--config is .*quickstart.py'):
    job_of(*TPU_VM, f'--config={tmp_path}/configs/quickstart.py')


def test_a_package_without_its_repository_is_refused(job_of, checkout):
  (checkout / 'launch/tpu_vm.sh').unlink()
  with pytest.raises(UserError, match='not a git checkout'):
    job_of(*TPU_VM)


def _main(job_of, checkout, monkeypatch, ends):
  job_of(*TPU_VM, '--dry_run')
  monkeypatch.setattr(command, 'ROOT', checkout)
  monkeypatch.setattr(command, 'start', ends)
  command.main([])


def test_the_command_ends_with_the_code_of_the_run(
  job_of, checkout, monkeypatch
):
  def diverged(job, shell, *, force):
    assert shell.dry_run and not force
    return 43

  with pytest.raises(SystemExit) as ended:
    _main(job_of, checkout, monkeypatch, diverged)
  assert ended.value.code == 43


def test_an_interrupted_launch_leaves_the_run_alone(
  job_of, checkout, monkeypatch
):
  def interrupted(job, shell, *, force):
    raise KeyboardInterrupt

  with pytest.raises(UserError, match='interrupted'):
    _main(job_of, checkout, monkeypatch, interrupted)


def test_names_come_from_configs():
  assert job.default_name('configs/l16_i21k.py') == 'l16-i21k'
  long = job.default_name('configs/vit.py:variant=R50+L/16,data=' + 'x' * 40)
  assert long.startswith('vit-variant-r50-l-16-data-x') and len(long) == 40
  assert job.default_name('configs/2022.py') == 'vit-2022'


@pytest.mark.parametrize(
  'name, kind, hosts, per_host, devices',
  [
    ('v2:2x2', 'v2-8', 1, 4, 8),
    ('v3:4x4', 'v3-32', 4, 4, 32),
    ('v4:2x2x4', 'v4-32', 4, 4, 16),
    ('v5e:2x4', 'v5litepod-8', 1, 8, 8),
    ('v5e:4x4', 'v5litepod-16', 4, 4, 16),
    ('v5p:4x4x4', 'v5p-128', 16, 4, 64),
    ('v6e:1x1', 'v6e-1', 1, 1, 1),
    ('v6e:16x16', 'v6e-256', 64, 4, 256),
  ],
)
def test_slices_have_the_sizes_of_google_clouds_tables(
  name, kind, hosts, per_host, devices
):
  made = clusters.tpu(name)
  assert made.accelerator_type == kind
  assert (made.hosts, made.per_host, made.devices) == (hosts, per_host, devices)


def test_gpus_are_nodes_and_gpus_of_each():
  made = clusters.gpus('a100-80gb:2x4')
  assert (made.hosts, made.per_host, made.devices) == (2, 4, 8)
